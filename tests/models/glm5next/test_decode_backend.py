# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Feature detection and the choice of a backend, from plain values."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from vllm.model_executor.layers.mamba.gdn.kda_decode.b12x import (
    INSTALL_COMMAND,
    B12xFeatures,
    probe_b12x,
)
from vllm.model_executor.layers.mamba.gdn.kda_decode.backend import (
    DECODE_BACKENDS,
    resolve_kda_decode_backend,
)
from vllm.model_executor.layers.mamba.gdn.kda_decode.routes import Capability
from vllm.model_executor.layers.mamba.gdn.kda_decode.step import LayerGeometry

GEOMETRY = LayerGeometry(
    num_heads=8,
    head_dim=128,
    conv_width=4,
    num_spec=3,
    model_dtype=torch.bfloat16,
    conv_dtype=torch.bfloat16,
    state_dtype=torch.float32,
    lower_bound=-5.0,
    max_num_seqs=256,
)
BLACKWELL, HOPPER = (12, 0), (9, 0)
ENTRY_POINTS = ("Caps", "plan", "bind_kda", "run_kda", "is_supported")


def api(*more, without=None, supported=True):
    names = [name for name in (*ENTRY_POINTS, *more) if name != without]
    module = SimpleNamespace(**dict.fromkeys(names, object))
    if hasattr(module, "is_supported"):
        module.is_supported = lambda: supported
    return module


def resolve(requested="auto", capability=BLACKWELL, features=None, **geometry):
    return resolve_kda_decode_backend(
        requested,
        b12x=probe_b12x(api()) if features is None else features,
        compute_capability=capability,
        geometry=replace(GEOMETRY, **geometry),
    )


def test_absent_package():
    resolution = resolve(features=B12xFeatures())
    assert resolution.capability is Capability.ONE_LAUNCH
    assert resolution.declined == "b12x not used: b12x is not installed"


@pytest.mark.parametrize("name", ("Caps", "plan", "bind_kda", "run_kda"))
def test_absent_entry_point(name):
    resolution = resolve(features=probe_b12x(api(without=name)))
    assert resolution.capability is Capability.ONE_LAUNCH
    assert resolution.declined == f"b12x not used: b12x lacks {name}"


def test_single_token_call_is_found_by_looking():
    without = probe_b12x(api())
    with_call = probe_b12x(api("run_kda_single_token"))
    assert resolve(features=without).capability is Capability.B12X_PACKED
    assert resolve(features=with_call).capability is Capability.B12X_SINGLE_TOKEN


def test_plan_generation_is_found_by_looking():
    preparation = object()
    assert probe_b12x(api(), preparation).preparation is None
    live = probe_b12x(api("invocation_from_tensors"), preparation)
    assert live.preparation is preparation


def test_is_supported_is_asked_and_may_be_absent():
    refused = probe_b12x(api(supported=False))
    assert "is_supported" in resolve(features=refused).declined
    assert probe_b12x(api(without="is_supported")).missing is None


def test_a_probe_that_raises_is_a_reason():
    broken = api()
    broken.is_supported = lambda: 1 // 0
    assert "ZeroDivisionError" in resolve(features=probe_b12x(broken)).declined


B12X_REQUIRES = (
    {"head_dim": 64},
    {"model_dtype": torch.float16},
    {"conv_dtype": torch.float32},
    {"state_dtype": torch.float16},
    {"lower_bound": None},
    {"lower_bound": 0.5},
    {"lower_bound": float("-inf")},
    {"num_spec": 8},
)
ONE_LAUNCH_REQUIRES = (*B12X_REQUIRES[:5], {"conv_width": 3})


@pytest.mark.parametrize("change", B12X_REQUIRES, ids=str)
def test_each_requirement_of_b12x(change):
    assert resolve(**change).backend != "b12x"
    with pytest.raises(RuntimeError) as error:
        resolve("b12x", **change)
    assert resolve(**change).declined.split("; ")[0].partition(": ")[2] in str(
        error.value
    )
    assert INSTALL_COMMAND not in str(error.value), "it is installed"


@pytest.mark.parametrize("change", ONE_LAUNCH_REQUIRES, ids=str)
def test_each_requirement_of_the_one_launch_kernel(change):
    resolution = resolve(features=B12xFeatures(), **change)
    assert resolution.capability is Capability.VLLM
    assert "one_launch not used: " in resolution.declined
    with pytest.raises(RuntimeError) as error:
        resolve("one_launch", **change)
    assert resolution.declined.partition("one_launch not used: ")[2] in str(error.value)


@pytest.mark.parametrize("capability", (None, (7, 5)))
def test_one_launch_needs_a_device_with_bfloat16(capability):
    resolution = resolve(capability=capability)
    assert resolution.capability is Capability.VLLM
    with pytest.raises(RuntimeError, match="compute capability|CUDA device"):
        resolve("one_launch", capability)
    assert resolve("one_launch", (8, 0)).capability is Capability.ONE_LAUNCH


def test_explicit_choice_names_every_unmet_requirement():
    with pytest.raises(RuntimeError) as error:
        resolve("b12x", None, B12xFeatures(), head_dim=64, lower_bound=None)
    wanted = ("not installed", "CUDA device", "head dimension", "lower bound")
    for part in (*wanted, INSTALL_COMMAND):
        assert part in str(error.value)


def test_auto_keeps_to_b12x_hardware_and_explicit_does_not():
    assert "9.0" in resolve(capability=HOPPER).declined
    assert resolve(capability=HOPPER).backend == "one_launch"
    assert resolve("b12x", HOPPER).backend == "b12x"
    assert resolve(capability=(12, 1)).backend == "b12x"


@pytest.mark.parametrize("name", ("native", "flashinfer", "B12X", ""))
def test_unknown_names_list_the_valid_ones(name):
    with pytest.raises(ValueError) as error:
        resolve(name)
    assert repr(name) in str(error.value)
    for valid in DECODE_BACKENDS:
        assert valid in str(error.value)


def test_triton_keeps_vllms_kernels_without_a_reason():
    resolution = resolve("triton")
    assert resolution.capability is Capability.VLLM and resolution.declined is None
