# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Milliseconds per decode step of vLLM's own engine, by decode route and batch size.

``python decode_speed.py MODEL`` on a folder of ``make_model.py``. One engine serves all
routes, since two engines differ by more than the routes do: each route has FULL CUDA
graphs of its own over the same weights and caches, and the routes take turns. With
``VLLM_PLUGINS=""`` it times stock vLLM, in an engine of its own.

Weights are those of ``serve_case.py``. Each request is held to a token of its own, so
that the routes decode the same text: another one would take other experts. How far a
route's log probabilities of that text are from vLLM's says whether it did. A step lasts
from one launch of the batch's graph to the next, on the GPU's clock.
"""

import argparse
import fcntl
import json
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from serve_case import ENVIRONMENT, on_models, seed_weights

BASE = "vLLM"


@contextmanager
def turn(file: Path | None, operation: int) -> Iterator[None]:
    """Hold a lock on ``file``: shared while starting, exclusive while timing.

    So several of these scripts start side by side and still time one after another,
    none before all have started.
    """
    if file is None:
        yield
        return
    with file.open("a") as lock:
        fcntl.flock(lock, operation)
        yield


def make_engine(model: str, batches: list[int]) -> Any:
    from vllm import LLM

    return LLM(
        model=model,
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=2048,
        max_num_seqs=max(batches),
        max_num_batched_tokens=2048,
        cudagraph_capture_sizes=sorted(batches),
        # Not a share of the GPU, so that several of these fit on one.
        kv_cache_memory_bytes=8 << 30,
        gpu_memory_utilization=0.2,
        enable_prefix_caching=False,
        seed=0,
        kernel_config={"enable_jit_warmup": False},
        additional_config={"kda_decode_backend": "one_launch"},
    )


class Routes:
    """The decode routes of one engine, each with its backends and its graphs."""

    def __init__(self, engine: Any) -> None:
        core = engine.llm_engine.engine_core.engine_core
        self._runner = core.model_executor.driver_worker.worker.model_runner
        self.manager = self._runner.cudagraph_manager
        self._layers = [
            module
            for module in self._runner.model.modules()
            if hasattr(module, "decode_resolution")
        ]
        # Kept too: were they freed, their memory pool would go with them.
        self._from_start = self.manager.graphs
        self._kept: dict[str, tuple[list[tuple], dict]] = {}
        if not self._layers:
            self._kept[BASE] = ([], self._from_start)
            return
        for name, backend, features in self._found(self._layers[0]._b12x):
            self._add(name, backend, features)

    @property
    def names(self) -> list[str]:
        return list(self._kept)

    @staticmethod
    def _found(features: Any) -> Iterator[tuple[str, str, Any]]:
        """Name, backend and what B12X is to offer, of each route that runs here."""
        yield BASE, "triton", features
        if features.missing is None:
            live = features.preparation is not None
            packed = replace(features, single_token=False)
            yield f"B12X {'live' if live else 'staged'}", "b12x", packed
        if features.single_token:
            yield "B12X single-token", "b12x", features
        yield "one launch", "one_launch", features

    def _add(self, name: str, backend: str, features: Any) -> None:
        """Give every layer a backend, and capture it."""
        import torch

        from vllm.model_executor.layers.mamba.gdn.kda_decode.backend import (
            resolve_kda_decode_backend,
        )

        with torch.inference_mode():
            for layer in self._layers:
                layer._b12x = features
                layer._take(
                    resolve_kda_decode_backend(
                        backend,
                        b12x=features,
                        compute_capability=layer._compute_capability,
                        geometry=layer._geometry,
                    )
                )
                if layer._decode is not None:
                    layer._bind_decode()
        taken = [(layer._decode, layer.decode_resolution) for layer in self._layers]
        self.manager.graphs = {}
        self.manager._capture_descs = {
            mode: sizes
            for mode, sizes in self.manager._capture_descs.items()
            if mode.name == "FULL"
        }
        self._runner.capture_model()
        self._kept[name] = (taken, self.manager.graphs)

    def use(self, name: str) -> None:
        """Decode by this route from now on."""
        taken, self.manager.graphs = self._kept[name]
        for layer, of_layer in zip(self._layers, taken, strict=True):
            layer._decode, layer.decode_resolution = of_layer


def generate(engine: Any, batch: int, tokens: int, logprobs: int | None = None) -> Any:
    """Decode ``batch`` requests, each one token again and again."""
    from vllm import SamplingParams

    requests, sampling = [], []
    for request in range(batch):
        prompt = [10 + (batch * 31 + request * 17 + i) % 9000 for i in range(64)]
        requests.append({"prompt_token_ids": prompt})
        sampling.append(
            SamplingParams(
                temperature=0,
                max_tokens=tokens,
                ignore_eos=True,
                detokenize=False,
                allowed_token_ids=prompt[-1:],
                logprobs=logprobs,
            )
        )
    return engine.generate(requests, sampling, use_tqdm=False)


def log_probabilities(engine: Any, batch: int, tokens: int) -> list[float]:
    """What the model thinks of the tokens that the requests are held to."""
    return [
        place[token].logprob
        for output in generate(engine, batch, tokens, logprobs=0)
        for token, place in zip(
            output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True
        )
    ]


def milliseconds_per_step(engine: Any, manager: Any, batch: int, steps: int) -> float:
    """Median time of one run's steps on the batch's own graph.

    Raises:
        RuntimeError: The requests did not decode all at once.
    """
    import torch

    launches = []
    launch = manager.run_fullgraph

    def timed(description: Any) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        launches.append((description.num_tokens, event))
        return launch(description)

    manager.run_fullgraph = timed
    try:
        generate(engine, batch, steps)
    finally:
        manager.run_fullgraph = launch
    torch.accelerator.synchronize()
    times = [
        event.elapsed_time(following)
        for (rows, event), (_, following) in pairwise(launches)
        if rows == batch
    ]
    if not steps // 2 <= len(times) <= steps:
        raise RuntimeError(
            f"{batch} requests of {steps} tokens took {len(times)} steps of {batch} "
            "rows: they did not decode all at once. Make the KV cache larger."
        )
    return statistics.median(times)


def kernel_times(engine: Any, batch: int, steps: int) -> dict[str, float]:
    """Microseconds of a step by kernel; the prefill's share is in it."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        generate(engine, batch, steps)
    return {
        event.key: event.self_device_time_total / steps
        for event in profiler.key_averages()
    }


def print_kernels(
    found: dict[str, float], base: dict[str, float], count: int = 12
) -> None:
    """Print the kernels that differ most from the base's, then those that last longest.

    In microseconds of a step.
    """
    print(f"  {sum(found.values()):.0f} us of kernels, {BASE} {sum(base.values()):.0f}")

    both = [(found.get(k, 0.0), base.get(k, 0.0), k) for k in found | base]
    both.sort(key=lambda times: (abs(times[0] - times[1]), times[0]), reverse=True)
    for taken, by_base, kernel in both[:count]:
        print(
            f"  {taken - by_base:+8.1f} us: {taken:8.1f} and {by_base:8.1f} of "
            f"{kernel[:80]}"
        )


def time_routes(
    engine: Any, routes: Routes, batch: int, options: argparse.Namespace
) -> dict[str, list[float]]:
    """Readings in milliseconds by route, the routes taking turns.

    A first run, not timed, compares what the routes compute.
    """
    import torch

    readings: dict[str, list[float]] = {name: [] for name in routes.names}
    texts = {}
    for name in readings:
        routes.use(name)
        texts[name] = torch.tensor(log_probabilities(engine, batch, options.steps))
    for _ in range(options.repetitions):
        for name, found in readings.items():
            routes.use(name)
            found.append(
                milliseconds_per_step(engine, routes.manager, batch, options.steps)
            )
    for name, found in readings.items():
        median = statistics.median(found)
        ratio = median / statistics.median(readings[BASE])
        # A tensor's median and maximum are NaN where one of its values is.
        apart = (texts[name] - texts[BASE]).abs()
        print(
            f"batch {batch:3d} {name:18s} {median:7.3f} ms a step "
            f"({min(found):.3f} to {max(found):.3f}), {ratio:.3f} of {BASE}; log "
            f"probabilities {apart.median():.3f} apart, {apart.max():.3f} at most",
            flush=True,
        )
    if options.profile:
        kernels = {}
        for name in readings:
            routes.use(name)
            kernels[name] = kernel_times(engine, batch, options.steps)
        for name, found in kernels.items():
            print(f"batch {batch:3d} {name}:")
            print_kernels(found, kernels[BASE])
    return readings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument(
        "--profile", action="store_true", help="list the kernels that differ too"
    )
    parser.add_argument(
        "--turns",
        type=Path,
        help="a file that all such scripts on this GPU name, so that they take turns",
    )
    parser.add_argument("--output-json", type=Path)
    options = parser.parse_args()
    os.environ |= ENVIRONMENT
    with turn(options.turns, fcntl.LOCK_SH):
        start = time.perf_counter()
        engine = make_engine(options.model, options.batches)
        found: dict[str, Any] = {"seconds to start": time.perf_counter() - start}
        print(f"started in {found['seconds to start']:.1f} s", flush=True)
        on_models(engine, partial(seed_weights, seed=1))
        routes = Routes(engine)
    for batch in options.batches:
        with turn(options.turns, fcntl.LOCK_EX):
            found[str(batch)] = time_routes(engine, routes, batch, options)
    if options.output_json:
        options.output_json.write_text(json.dumps(found))
    os._exit(0)


if __name__ == "__main__":
    main()
