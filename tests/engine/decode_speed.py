# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Milliseconds per decode step of vLLM's own engine, by batch size.

``python decode_speed.py MODEL`` with the plugin switched by ``VLLM_PLUGINS`` as a user
would, on a folder of ``make_model.py``. A step's time is the difference of two runs of
different length, so prefill and set-up cancel.
"""

import argparse
import json
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from serve_case import ENVIRONMENT

SHORT = 16


def make_engine(options: argparse.Namespace) -> Any:
    from vllm import LLM

    more = {}
    if options.kda_backend:
        more["additional_config"] = {"kda_decode_backend": options.kda_backend}
    return LLM(
        model=options.model,
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=2048,
        max_num_seqs=max(options.batches),
        max_num_batched_tokens=2048,
        cudagraph_capture_sizes=sorted(options.batches),
        gpu_memory_utilization=float(os.environ.get("GMU", "0.6")),
        enable_prefix_caching=False,
        seed=0,
        kernel_config={"enable_jit_warmup": False},
        **more,
    )


def hide_single_token() -> None:
    """Make the layer see a B12X that has ``run_kda`` alone."""
    from vllm.models.glm5next import decode_kda

    features = replace(decode_kda.installed_b12x(), single_token=False)
    decode_kda.installed_b12x = lambda: features


def seconds(engine: Any, batch: int, tokens: int) -> float:
    """Time one greedy run of ``batch`` requests."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
    )
    requests = [
        {"prompt_token_ids": [10 + (batch * 31 + r * 17 + i) % 9000 for i in range(64)]}
        for r in range(batch)
    ]
    start = time.perf_counter()
    engine.generate(requests, sampling, use_tqdm=False)
    return time.perf_counter() - start


def milliseconds_per_step(
    engine: Any, batch: int, steps: int, repetitions: int
) -> list[float]:
    """One reading per repetition, in order of size."""
    seconds(engine, batch, SHORT)
    readings = []
    for _ in range(repetitions):
        short = seconds(engine, batch, SHORT)
        readings.append((seconds(engine, batch, SHORT + steps) - short) / steps * 1e3)
    return sorted(readings)


def print_kernels(engine: Any, batch: int, steps: int, count: int = 15) -> None:
    """Print the kernels of a run that took longest, in microseconds of a step."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        seconds(engine, batch, steps)
    events = sorted(
        profiler.key_averages(), key=lambda e: e.self_device_time_total, reverse=True
    )
    total = sum(event.self_device_time_total for event in events)
    print(f"batch {batch}: {total / steps:.0f} us of GPU time a step, prefill included")
    for event in events[:count]:
        print(
            f"  {event.self_device_time_total / steps:8.1f} us in "
            f"{event.count / steps:6.1f} calls of {event.key[:90]}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--kda-backend")
    parser.add_argument(
        "--hide-single-token",
        action="store_true",
        help="time a B12X with run_kda_single_token as if it had run_kda alone",
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--profile", action="store_true", help="list the kernels too")
    parser.add_argument("--output-json", type=Path)
    options = parser.parse_args()
    os.environ |= ENVIRONMENT
    if options.hide_single_token:
        hide_single_token()
    start = time.perf_counter()
    engine = make_engine(options)
    found: dict[str, Any] = {"seconds to start": time.perf_counter() - start}
    print(f"started in {found['seconds to start']:.1f} s", flush=True)
    for batch in options.batches:
        readings = milliseconds_per_step(
            engine, batch, options.steps, options.repetitions
        )
        found[str(batch)] = readings
        print(
            f"batch {batch}: {statistics.median(readings):.3f} ms a step "
            f"({readings[0]:.3f} to {readings[-1]:.3f})",
            flush=True,
        )
        if options.profile:
            print_kernels(engine, batch, options.steps)
    if options.output_json:
        options.output_json.write_text(json.dumps(found))
    os._exit(0)


if __name__ == "__main__":
    main()
