# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""vLLM's real engine with the patch and without it, case by case.

``KDA_ENGINE_MODEL=<folder> pytest -m engine tests/engine``: the folder is written by
``make_model.py``; weights are dummies, seeded by the case. Several engines share a
GPU: ``KDA_ENGINE_JOBS`` on each, each with ``GMU`` of its memory. ``KDA_ENGINE_CASES``
names some of the cases, ``KDA_ENGINE_OUT`` a folder for reports, logs and a summary.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import triton
from packaging.version import Version
from serve_case import CASES as ALL_CASES

from vllm.utils.network_utils import get_open_port

pytestmark = pytest.mark.engine

MODEL = os.environ.get("KDA_ENGINE_MODEL", "")
JOBS = int(os.environ.get("KDA_ENGINE_JOBS", "6"))
TIMEOUT_S = 400
GPUS = torch.cuda.device_count()
VISIBLE = (
    os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(GPUS)))
).split(",")
CASES = [
    case
    for case in os.environ.get("KDA_ENGINE_CASES", "").split() or ALL_CASES
    if ALL_CASES[case].devices <= GPUS
]
HEADS = (
    json.loads((Path(MODEL) / "config.json").read_text())["text_config"][
        "linear_num_heads"
    ]
    if MODEL
    else 0
)
OURS, STOCK = "Glm5NextDecodeLinearAttention", "Glm5NextLinearAttention"
# The rest of the case is run with these backends too.
BACKENDS = {"graphs": (None, "triton", "b12x")}


# --- running the cases ------------------------------------------------------------


class Devices:
    """Hands out the GPUs, each to ``JOBS`` engines at once."""

    def __init__(self) -> None:
        self._free: SimpleQueue[str] = SimpleQueue()
        for device in VISIBLE * JOBS:
            self._free.put(device)

    @contextmanager
    def take(self, count: int) -> Iterator[str]:
        """Value of ``CUDA_VISIBLE_DEVICES`` for an engine of ``count`` GPUs."""
        taken = self._free.get()
        try:
            # An engine of several GPUs takes each once, whoever else is on them.
            yield taken if count == 1 else ",".join(VISIBLE[:count])
        finally:
            self._free.put(taken)


@contextmanager
def running(
    command: list[str], log: Path, environment: dict[str, str]
) -> Iterator[subprocess.Popen]:
    """A case in a process of its own; ended, with all that it started, on leaving."""
    with log.open("w") as stream:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def run_process(command: list[str], log: Path, environment: dict[str, str]) -> None:
    """Run a case to its end."""
    with running(command, log, environment) as process:
        try:
            process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            with log.open("a") as stream:
                stream.write(f"\nno end after {TIMEOUT_S} s\n")


def serve(
    devices: Devices, folder: Path, case: str, patched: bool, backend: str | None
) -> dict:
    """Run one case and read its report."""
    name = f"{case}-{'patched' if patched else 'stock'}-{backend or 'auto'}"
    out, log = folder / f"{name}.json", folder / f"{name}.log"
    command = [sys.executable, str(Path(__file__).with_name("serve_case.py"))]
    command += [MODEL, case, str(out)]
    if backend:
        command += ["--kda-backend", backend]
    environment = dict(os.environ)
    if not patched:
        environment["VLLM_PLUGINS"] = ""
    with devices.take(ALL_CASES[case].devices) as visible:
        environment["CUDA_VISIBLE_DEVICES"] = visible
        if case == "data_parallel":
            serve_two_ranks(command, out, log, environment)
        else:
            run_process(command, log, environment)
    if not out.exists():
        return {"failed": log.read_text()[-4000:]}
    return json.loads(out.read_text()) | {"log": log.read_text()}


def serve_two_ranks(
    command: list[str], out: Path, log: Path, environment: dict[str, str]
) -> None:
    """Run a rank with the case's requests, and one that is idle but for a token."""
    environment["VLLM_DP_MASTER_PORT"] = str(get_open_port())
    idle = [
        str(out.with_name(f"{out.stem}-dp1.json")) if c == str(out) else c
        for c in command
    ]
    idle_log = log.with_name(f"{log.stem}-dp1.log")
    with running(idle, idle_log, environment | {"VLLM_DP_RANK": "1"}):
        run_process(command, log, environment | {"VLLM_DP_RANK": "0"})


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> Iterator[dict[tuple, Future]]:
    """Reports by (case, patched, backend), still being made while tests run."""
    if not MODEL:
        pytest.skip("KDA_ENGINE_MODEL names no model folder")
    folder = Path(os.environ.get("KDA_ENGINE_OUT") or tmp_path_factory.mktemp("engine"))
    wanted = []
    for case in CASES:
        wanted.append((case, False, None))
        wanted += [(case, True, backend) for backend in BACKENDS.get(case, (None,))]
    devices = Devices()
    with ThreadPoolExecutor(JOBS * GPUS) as pool:
        made = {key: pool.submit(serve, devices, folder, *key) for key in wanted}
        yield made
    summary = "\n".join(summary_line(*key, made) for key in wanted)
    (folder / "summary.txt").write_text(summary + "\n")


def report_of(reports: dict, *key: Any) -> dict:
    report = reports[key].result()
    if "failed" in report:
        pytest.fail(f"{key} did not finish:\n{report['failed']}")
    if "refused" in report and key[0] != "lora":
        pytest.fail(f"{key} was refused: {report['refused']}")
    return report


def summary_line(case: str, patched: bool, backend: str | None, reports: dict) -> str:
    """What a case gave, compared with stock vLLM's."""
    name = f"{case}, {'patched' if patched else 'stock'}, {backend or 'auto'}:"
    report, stock = (
        reports[case, patched, backend].result(),
        reports[case, False, None].result(),
    )
    if "tokens" not in report or "tokens" not in stock:
        return f"{name} {report.get('refused', 'failed')}"
    compared = list(compare(report["tokens"], stock["tokens"]))
    parted = [c for c in compared if c.parted is not None]
    largest = max((c.difference for c in compared), default=0.0)
    wide = max((c.gap for c in parted), default=0.0)
    return (
        f"{name} {len(compared) - len(parted)} of {len(compared)} texts equal, log "
        f"probabilities within {largest:.3f} before they part, at gaps of {wide:.3f} "
        f"or less; {sum(len(c.ids) for c in compared)} tokens, "
        f"{len(distinct(report))} different; kinds {dict(report['kinds'])}; "
        f"{report['counters']}; {report['memory']} B; "
        f"{report['seconds to start']:.0f} s to start"
    )


# --- comparing --------------------------------------------------------------------


class Comparison:
    """One request's text beside the wanted one.

    Attributes:
        ids: Its tokens.
        parted: The place of the first other token, or None.
        gap: There, by how much a run thinks the other's token less likely than its
            own, in log probability, in the run that holds them closer; infinite if
            neither has the other's among its likeliest.
        difference: Largest difference of a log probability up to there.
    """

    def __init__(self, found: dict, wanted: dict) -> None:
        self.ids = found["ids"]
        pairs = enumerate(zip(found["ids"], wanted["ids"], strict=True))
        self.parted = next((place for place, (a, b) in pairs if a != b), None)
        self.gap = 0.0
        end = len(found["ids"]) if self.parted is None else self.parted
        if self.parted is not None:
            self.gap = min(
                max(run["likeliest"][end].values())
                - run["likeliest"][end].get(str(other["ids"][end]), float("-inf"))
                for run, other in ((wanted, found), (found, wanted))
            )
        self.difference = max(
            (
                abs(probability - wanted["likeliest"][place][token])
                for place in range(min(end + 1, len(found["ids"])))
                for token, probability in found["likeliest"][place].items()
                if token in wanted["likeliest"][place]
            ),
            default=0.0,
        )


def compare(found: dict, wanted: dict) -> Iterator[Comparison]:
    assert found.keys() == wanted.keys()
    for name in found:
        for ours, theirs in zip(found[name], wanted[name], strict=True):
            yield Comparison(ours, theirs)


def distinct(report: dict) -> set[int]:
    texts = [text for texts in report["tokens"].values() for text in texts]
    return {token for text in texts for token in text["ids"]}


def ids(texts: list[dict]) -> list[list[int]]:
    return [text["ids"] for text in texts]


@pytest.fixture(scope="module")
def noise(reports) -> float:
    """How far stock vLLM's log probabilities move with the batch alone.

    The same requests decoded by themselves and in a batch of 32: other kernels and
    another order of sums, and the bound for everything that differs in last bits.
    """
    if "graphs" not in CASES:
        pytest.skip("the case 'graphs' is left out")
    tokens = report_of(reports, "graphs", False, None)["tokens"]
    together = next(name for name in tokens if name.startswith("batch 3"))
    pairs = zip(tokens["alone"], tokens[together][:4], strict=True)
    return max(Comparison(alone, other).difference for alone, other in pairs)


# --- it is taken ------------------------------------------------------------------


@pytest.mark.parametrize("case", [c for c in CASES if c != "lora"])
def test_every_kda_layer_is_replaced(reports, case):
    stock = report_of(reports, case, False, None)["layers"]
    patched = report_of(reports, case, True, None)["layers"]
    assert set(stock) & {OURS, STOCK} == {STOCK}
    assert set(patched) & {OURS, STOCK} == {OURS}
    assert patched[OURS] == stock[STOCK]


@pytest.mark.skipif("graphs" not in CASES, reason="the case is left out")
def test_it_is_taken_and_says_so(reports):
    report = report_of(reports, "graphs", True, None)
    lines = [x for x in report["log"].splitlines() if "KDA decode backend" in x]
    assert len(lines) == 1 and "one-token steps: one_launch" in lines[0]
    assert (
        "FULL" in report["cudagraph mode"] and "PIECEWISE" in report["cudagraph mode"]
    )


@pytest.mark.skipif("graphs" not in CASES, reason="the case is left out")
def test_memory_is_stock_vllms_within_a_percent(reports):
    [stock] = report_of(reports, "graphs", False, None)["memory"]
    [patched] = report_of(reports, "graphs", True, None)["memory"]
    assert patched <= 1.01 * stock


# --- same text --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "backend"),
    [(c, b) for c in CASES if c != "lora" for b in BACKENDS.get(c, (None,))],
)
def test_text_parts_from_stock_vllm_at_near_ties_only(reports, noise, case, backend):
    stock = report_of(reports, case, False, None)
    patched = report_of(reports, case, True, backend)
    assert len(distinct(patched)) >= 50, "a model that repeats itself proves nothing"
    for compared in compare(patched["tokens"], stock["tokens"]):
        assert compared.difference <= 2 * noise
        assert compared.gap <= 2 * noise


# With data parallelism the other rank's steps decide how far this one's are padded.
SAME_ORDER = [c for c in CASES if c not in ("lora", "dim_first", "data_parallel")]


@pytest.mark.parametrize("case", SAME_ORDER)
def test_one_launch_gives_stock_vllms_text(reports, case):
    """With 16, 32 or 64 heads and Triton 3.8 all its sums have vLLM's order."""
    if HEADS % 16 or Version(triton.__version__) < Version("3.8"):
        pytest.skip(f"{HEADS} heads, Triton {triton.__version__}: sums differ")
    stock = report_of(reports, case, False, None)["tokens"]
    for name, texts in report_of(reports, case, True, None)["tokens"].items():
        assert ids(texts) == ids(stock[name]), name


@pytest.mark.skipif("graphs" not in CASES, reason="the case is left out")
def test_triton_is_stock(reports):
    stock = report_of(reports, "graphs", False, None)
    switched_off = report_of(reports, "graphs", True, "triton")
    for name, texts in stock["tokens"].items():
        assert ids(switched_off["tokens"][name]) == ids(texts)


# --- what the cases are there for -------------------------------------------------

WANTED_KINDS = {
    "graphs": {"SINGLE_TOKEN", "OTHER"},
    "large": {"SINGLE_TOKEN", "OTHER"},
    "chunked": {"SINGLE_TOKEN", "OTHER", "prefill with decode"},
    "drafts1": {"PACKED", "OTHER", "1 drafted"},
    "drafts3": {"PACKED", "OTHER", "3 drafted", "prefill with verify"},
    "drafts5": {"PACKED", "OTHER", "5 drafted"},
    "mtp1": {"PACKED", "OTHER", "1 drafted"},
    "mtp3": {"PACKED", "OTHER", "3 drafted", "prefill with verify"},
    "runner_v1_drafts3": {
        "PACKED",
        "OTHER",
        "0 drafted",
        "3 drafted",
        "prefill with verify",
    },
}
DRAFTING = [c for c in CASES if "drafts" in c or "mtp" in c]


@pytest.mark.parametrize("case", [c for c in CASES if c in WANTED_KINDS])
def test_each_batch_kind_occurred(reports, case):
    kinds = report_of(reports, case, True, None)["kinds"]
    assert WANTED_KINDS[case] <= set(kinds), kinds


@pytest.mark.parametrize("case", DRAFTING)
def test_c2_accepted_counts_are_at_least_one(reports, case):
    assert report_of(reports, case, True, None)["least accepted"] >= 1


@pytest.mark.skipif("graphs" not in CASES, reason="the case is left out")
def test_c3_a_prompt_of_one_token_finds_no_state(reports):
    """Its text is the same in slots never used and in slots that others left."""
    tokens = report_of(reports, "graphs", True, None)["tokens"]
    [fresh], [recycled] = tokens["batch 0 of 1"], tokens["batch 0 again"]
    assert fresh["prompt"] == recycled["prompt"] == 1
    assert fresh["ids"] == recycled["ids"]


@pytest.mark.skipif("graphs" not in CASES, reason="the case is left out")
def test_c6_five_requests_decode_in_a_graph_of_more_rows(reports):
    """The layer's tests poison what such rows hold; here their text is compared."""
    report = report_of(reports, "graphs", True, None)
    assert any(name.endswith(" of 5") for name in report["tokens"])
    assert 5 not in report["captured sizes"] and max(report["captured sizes"]) > 5


@pytest.mark.parametrize("case", [c for c in ("eager", "drafts3") if c in CASES])
def test_c11_no_step_waits_for_the_device_in_our_modules(reports, case):
    """vLLM's own check reports the place of each wait, and ``Watch`` waits once."""
    log = report_of(reports, case, True, None)["log"].splitlines()
    waits = [x for x in log if "synchronizing CUDA" in x or "Implicit GPU" in x]
    assert any("serve_case.py" in wait for wait in waits)
    ours = ("kda_decode", "decode_kda", "kda_single_token")
    assert not [wait for wait in waits if any(name in wait for name in ours)]


@pytest.mark.parametrize("case", DRAFTING)
def test_drafts_were_accepted_and_rejected(reports, case):
    counters = report_of(reports, case, True, None)["counters"]
    drafted = counters["vllm:spec_decode_num_draft_tokens"]
    assert 0 < counters["vllm:spec_decode_num_accepted_tokens"] < drafted


@pytest.mark.skipif("prefix" not in CASES, reason="the case is left out")
def test_c14_a_prefix_was_found_in_the_cache(reports):
    for patched in (True, False):
        tokens = report_of(reports, "prefix", patched, None)["tokens"]
        cached = [text["cached"] for text in tokens["hits"]]
        assert all(cached[:4]), cached


@pytest.mark.skipif("preempt" not in CASES, reason="the case is left out")
def test_requests_were_preempted(reports):
    for patched in (True, False):
        counters = report_of(reports, "preempt", patched, None)["counters"]
        assert counters["vllm:num_preemptions"] > 0


@pytest.mark.skipif("sleep" not in CASES, reason="the case is left out")
@pytest.mark.parametrize("level", (1, 2))
@pytest.mark.parametrize("patched", (False, True))
def test_text_is_the_same_after_sleep(reports, patched, level):
    """Level 2 with what stock vLLM loses in it restored by the case."""
    tokens = report_of(reports, "sleep", patched, None)["tokens"]
    assert ids(tokens[f"after level {level}"]) == ids(tokens["before"])


@pytest.mark.skipif("reload" not in CASES, reason="the case is left out")
def test_text_follows_reloaded_weights(reports):
    tokens = report_of(reports, "reload", True, None)["tokens"]
    assert ids(tokens["weights 2"]) != ids(tokens["weights 1"])
    assert ids(tokens["weights 1 again"]) == ids(tokens["weights 1"])


@pytest.mark.skipif("lora" not in CASES, reason="the case is left out")
def test_lora_is_refused_as_stock_vllm_refuses_it(reports):
    stock = report_of(reports, "lora", False, None)
    assert "LoRA" in stock["refused"]
    assert report_of(reports, "lora", True, None)["refused"] == stock["refused"]
