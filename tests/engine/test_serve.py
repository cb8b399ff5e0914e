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


# Where the last bits differ, greedy text may part at a near-tie and nowhere else:
# there the other's token must be within this of the likeliest, in log probability.
NEAR_TIE = 0.1


def partings(found: dict, wanted: dict) -> list[str]:
    """Where greedy text parts from the wanted one at no near-tie.

    Args:
        found: Requests by name, each with ``ids`` and the ``likeliest`` tokens.
        wanted: Likewise.

    Returns:
        A line for each such request; empty if there is none.
    """
    assert found.keys() == wanted.keys()
    lines = []
    for name in found:
        pairs = zip(found[name], wanted[name], strict=True)
        for number, (ours, theirs) in enumerate(pairs):
            place = first_difference(ours["ids"], theirs["ids"])
            if place is None:
                continue
            likeliest = theirs["likeliest"][place]
            ours_there = likeliest.get(str(ours["ids"][place]), float("-inf"))
            if max(likeliest.values()) - ours_there > NEAR_TIE:
                lines.append(f"{name}, request {number}, token {place}: {likeliest}")
    return lines


def first_difference(left: list, right: list) -> int | None:
    pairs = enumerate(zip(left, right, strict=True))
    return next((place for place, (a, b) in pairs if a != b), None)


@pytest.mark.parametrize("case", CASES)
def test_text_parts_from_stock_vllm_at_near_ties_only(reports, case):
    stock = report_of(reports, case, False, None)
    patched = report_of(reports, case, True, None)
    assert set(stock["layers"]) & {OURS, STOCK} == {STOCK}
    assert set(patched["layers"]) & {OURS, STOCK} == {OURS}
    assert patched["layers"][OURS] == stock["layers"][STOCK]
    texts = [text for texts in patched["tokens"].values() for text in texts]
    distinct = {token for text in texts for token in text["ids"]}
    assert len(distinct) >= 50, "a model that repeats itself proves nothing"
    assert not partings(patched["tokens"], stock["tokens"])


@pytest.mark.skipif("sleep" not in CASES, reason="the case is left out")
def test_text_is_the_same_after_sleep(reports):
    tokens = report_of(reports, "sleep", True, None)["tokens"]
    pairs = zip(tokens["awake"], tokens["batch 6"], strict=True)
    assert all(after["ids"] == before["ids"] for after, before in pairs)


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
    for name, texts in stock["tokens"].items():
        for found, wanted in zip(switched_off["tokens"][name], texts, strict=True):
            assert found["ids"] == wanted["ids"]
