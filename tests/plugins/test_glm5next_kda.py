# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The plugin: its registration, and how vLLM loads it in a process of its own."""

import importlib.metadata
import logging
import os
import subprocess
import sys

import pytest

import vllm.plugins.glm5next_kda as plugin
from vllm.model_executor.models import ModelRegistry

REPORT = """
import sys
from vllm.plugins import load_general_plugins
{before}
load_general_plugins()
{after}
from vllm.model_executor.models import ModelRegistry
for name in {architectures!r}:
    print(name, ModelRegistry.models[name].module_name)
print("model imported:", "vllm.models.glm5next.common.kda" in sys.modules)
import torch
print("CUDA touched:", torch.cuda.is_initialized())
"""


def report(before="", after="", **environment):
    """Load vLLM's general plugins in a new process and say what that did."""
    script = REPORT.format(
        before=before, after=after, architectures=list(plugin.ARCHITECTURES)
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def routed(output):
    lines = [f"{name} {plugin.MODEL_MODULE}" for name in plugin.ARCHITECTURES]
    return [line in output for line in lines]


def test_entry_point():
    found = importlib.metadata.entry_points(
        group="vllm.general_plugins", name="glm5next_kda"
    )
    assert [entry.load() for entry in found] == [plugin.register]


def test_registers_cheaply_and_twice():
    output = report(
        after="from vllm.plugins.glm5next_kda import register; register(); register()"
    )
    assert all(routed(output))
    assert "model imported: False" in output
    assert "CUDA touched: False" in output


def test_vllm_plugins_switches_it_off():
    assert not any(routed(report(VLLM_PLUGINS="")))


@pytest.fixture
def registered(monkeypatch):
    """What :func:`register` registers, while the registry keeps what it has."""
    monkeypatch.setattr(ModelRegistry, "models", {})
    return ModelRegistry.models


@pytest.mark.parametrize("version", ("0.32.0", "0.34.0", "0.33.0.dev1+g1234", "dev"))
def test_stands_down_on_another_vllm(version, registered, monkeypatch, caplog):
    monkeypatch.setattr(plugin, "_installed_vllm", lambda: version)
    with caplog.at_level(logging.WARNING, logger="vllm"):
        plugin.register()
        plugin.register()
    assert not registered
    [record] = caplog.records
    assert plugin.SUPPORTED_VLLM in record.getMessage()
    assert version in record.getMessage()


def test_stands_down_without_package_metadata(registered, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    plugin.register()
    assert not registered


def test_a_local_build_of_the_supported_version_is_supported(registered, monkeypatch):
    monkeypatch.setattr(plugin, "_installed_vllm", lambda: "0.33.0+cu130")
    plugin.register()
    assert set(registered) == set(plugin.ARCHITECTURES)


def test_another_replacement_of_the_layer_is_left_alone():
    output = report(
        after="from vllm.models.glm5next.common.kda import Glm5NextLinearAttention\n"
        "class Theirs(Glm5NextLinearAttention): pass\n"
        "Glm5NextLinearAttention.register_oot(Theirs)\n"
        "import vllm.models.glm5next.decode_kda\n"
        "from vllm.model_executor.custom_op import op_registry_oot\n"
        "print('kept:', op_registry_oot['Glm5NextLinearAttention'] is Theirs)"
    )
    assert "kept: True" in output and "stands down" in output
