# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the wheel carries, next to what vLLM installed."""

import subprocess
import sys
import zipfile
from importlib.metadata import files
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "-o", folder, ROOT],
        check=True,
        capture_output=True,
        timeout=300,
    )
    [path] = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_wheel_carries_no_file_that_vllm_has(wheel):
    installed = {str(path) for path in files("vllm")}
    assert installed, "vLLM's RECORD is the other side of the comparison"
    assert not installed & set(wheel.namelist())


def test_wheel_carries_every_module_and_shadows_no_package(wheel):
    carried = {name for name in wheel.namelist() if name.endswith(".py")}
    sources = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "vllm").rglob("*.py")
        if "__pycache__" not in path.parts
    }
    assert carried == sources
    ours = ("vllm/benchmarks/kda_decode", "vllm/model_executor/layers/mamba/gdn")
    for name in carried:
        if name.endswith("__init__.py"):
            assert name.startswith(ours), f"{name} would shadow vLLM's own"


def test_metadata(wheel):
    [name] = [n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")]
    metadata = wheel.read(name).decode()
    for line in (
        "Requires-Dist: vllm==0.33.0",
        'Requires-Dist: b12x==1.5.1; extra == "b12x"',
        "Requires-Python: <3.15,>=3.11",
        "License-Expression: Apache-2.0",
    ):
        assert line in metadata.splitlines()
