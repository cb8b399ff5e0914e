# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""vLLM's real engine with the patch and without it, case by case.

``KDA_ENGINE_MODEL=<folder> pytest -m engine tests/engine``: the folder holds a
GLM-5.3 text configuration (weights are dummies, seeded by the case). Several engines
share the GPU: ``KDA_ENGINE_JOBS`` at once, each with ``GMU`` of its memory.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

MODEL = os.environ.get("KDA_ENGINE_MODEL", "")
JOBS = int(os.environ.get("KDA_ENGINE_JOBS", "4"))
CASES = os.environ.get("KDA_ENGINE_CASES", "").split() or [
    "graphs",
    "eager",
    "chunked",
    "prefix",
    "drafts1",
    "drafts3",
    "drafts5",
    "sync",
    "preempt",
    "sleep",
    "reload",
    "dim_first",
    "runner_v1",
]
OURS, STOCK = "Glm5NextDecodeLinearAttention", "Glm5NextLinearAttention"


def serve(folder: Path, case: str, patched: bool, backend: str | None) -> dict:
    """Run one case in a process of its own and read its report."""
    name = f"{case}-{'patched' if patched else 'stock'}-{backend or 'auto'}"
    out = folder / f"{name}.json"
    command = [sys.executable, str(Path(__file__).with_name("serve_case.py"))]
    command += [MODEL, case, str(out)]
    if backend:
        command += ["--kda-backend", backend]
    environment = dict(os.environ)
    if not patched:
        environment["VLLM_PLUGINS"] = ""
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False
    )
    log = done.stdout + done.stderr
    (folder / f"{name}.log").write_text(log)
    if not out.exists():
        return {"failed": log[-4000:]}
    return json.loads(out.read_text()) | {"log": log}


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> Iterator[dict[tuple, Future]]:
    """Reports by (case, patched, backend), still being made while tests run."""
    if not MODEL:
        pytest.skip("KDA_ENGINE_MODEL names no model folder")
    folder = Path(os.environ.get("KDA_ENGINE_OUT") or tmp_path_factory.mktemp("engine"))
    wanted = [(case, patched, None) for case in CASES for patched in (True, False)]
    if "graphs" in CASES:
        wanted += [("graphs", True, "triton"), ("graphs", True, "b12x")]
    with ThreadPoolExecutor(JOBS) as pool:
        yield {key: pool.submit(serve, folder, *key) for key in wanted}


def report_of(reports: dict, *key: Any) -> dict:
    report = reports[key].result()
    if "failed" in report:
        pytest.fail(f"{key} did not finish:\n{report['failed']}")
    return report


def matches(found: dict, wanted: dict) -> dict[str, str]:
    """What of two reports' tokens differs."""
    assert found.keys() == wanted.keys()
    return {
        name: f"{sum(a != b for a, b in zip(found[name], wanted[name], strict=True))} "
        f"of {len(found[name])} requests"
        for name in found
        if found[name] != wanted[name]
    }


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_stock_vllm(reports, case):
    stock = report_of(reports, case, False, None)
    patched = report_of(reports, case, True, None)
    assert set(stock["layers"]) & {OURS, STOCK} == {STOCK}
    assert set(patched["layers"]) & {OURS, STOCK} == {OURS}
    assert patched["layers"][OURS] == stock["layers"][STOCK]
    distinct = {t for ids in patched["tokens"].values() for seq in ids for t in seq}
    assert len(distinct) >= 50, "a model that repeats itself proves nothing"
    assert not matches(patched["tokens"], stock["tokens"])


WANTED_KINDS = {
    "graphs": {"SINGLE_TOKEN", "OTHER"},
    "chunked": {"SINGLE_TOKEN", "OTHER", "prefill with decode"},
    "drafts1": {"PACKED", "OTHER"},
    "drafts3": {"PACKED", "OTHER"},
    "drafts5": {"PACKED", "OTHER"},
}


@pytest.mark.parametrize("case", [c for c in CASES if c in WANTED_KINDS])
def test_each_batch_kind_occurred(reports, case):
    kinds = report_of(reports, case, True, None)["kinds"]
    assert WANTED_KINDS[case] <= set(kinds), kinds


@pytest.mark.skipif("graphs" not in CASES, reason="the case is left out")
def test_it_is_taken_and_says_so(reports):
    report = report_of(reports, "graphs", True, None)
    lines = [x for x in report["log"].splitlines() if "KDA decode backend" in x]
    assert len(lines) == 1 and "one-token steps: one_launch" in lines[0]
    assert (
        "FULL" in report["cudagraph mode"] and "PIECEWISE" in report["cudagraph mode"]
    )


@pytest.mark.skipif("graphs" not in CASES, reason="the case is left out")
def test_triton_is_stock(reports):
    stock = report_of(reports, "graphs", False, None)
    switched_off = report_of(reports, "graphs", True, "triton")
    assert not matches(switched_off["tokens"], stock["tokens"])
