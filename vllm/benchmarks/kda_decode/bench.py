# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""``glm5next-kda bench``: microseconds per layer of each decode path.

What is timed is everything between the projections and ``o_proj``, for plain decode
steps of the 34 KDA layers of GLM-5.3-Flash in one CUDA graph, each layer with its own
state pool; small steps are repeated over other slots, so that the states that a
replay reads do not fit in a cache. The floor is what moving as many state bytes
takes, timed the same way: the faster of copying the states and of scaling them in
place.

What was tried for the one-launch kernel, on one H200 (132 multiprocessors, torch
2.11, triton 3.6); a number is time over the time of the variant that was kept, at
that size. Up to about 132 rows x heads the floor is launch and dependent loads
(index, then state and window); beyond, bytes: at 64 heads a step takes 5 us + 2.16 us
a row, and that slope is 96% of a copy's.

Kept: a quarter head per program with a last arriver for norm and window, up to 33
rows x heads (a whole head: 1.17); a whole head with its state prefetched to L2 before
the programmatic-launch wait, up to 132 (without the prefetch: 1.14); a whole head, up
to 264 (in chunks: 1.06); a whole head in four chunks, the next one loading, beyond
(whole: 1.11 at 288, 1.04 at 384, 1.08 at 512, 1.09 at 4,096). Every warp holds q, k
and the decay, which also makes the bits vLLM's. Convolution weight with the rows of a
tap adjacent (taps adjacent: 1.49 at 8 heads, batch 1).

What the hardware counters say (Nsight Compute, 64 heads, batch 16, 64, 256): 64%, 78%
and 83% of peak DRAM throughput in 1.9, 7.8 and 31 waves, where scaling the states of
batch 64 in place has 84%. Issue slots are 25% busy, 24% of the warps fit (127
registers), and warps wait for global loads (8.6 of 14 stall cycles an instruction)
and at barriers (2.4). So the rate is memory's once many waves run, and what is left at
batch 16 and 64 is the first loads of a launch and the last wave's end.

Lost at 64 heads, batch 16 / 64 / 256: a persistent grid with the next head's first
chunk in registers over the boundary, 1.04 / 1.04 / 1.03, on 512 programs 1.06 / 1.04 /
1.04, with a work counter 1.11 / 1.06 / 1.03; the states through tensor descriptors
and shared memory (Gluon), two to four buffers, 1.08 to 1.26 / 1.06 to 1.25 / 1.04 to
1.24; half heads, 1.08 / 1.05 / 1.05, quarter heads, 1.23 / 1.24 / 1.25; 8 chunks with
two or three ahead, 1.00 to 1.02 / 1.01 to 1.02 / 1.00 to 1.02; the first wave's chunks
prefetched to L2 before the wait, 1.02 to 1.10 / 1.00 to 1.03 / 1.00 to 1.01; a chunk as
one run of 16 KB, 1.01 / 1.02 / 1.02; rows of a head adjacent in the grid, 1.01 / 1.02 /
1.03; cache hints (.cg loads 1.00, .cs stores 1.01, evict-first 1.02 to 1.04); 8 warps,
1.10. Lost elsewhere: 8 or 16 warps, 1.07 to 1.27; 8 tiles per head, 1.06 to 1.13; 2
tiles, 1.12 to 1.16; a loop with asynchronous copies to shared memory, 1.01 to 1.13,
1.3 to 1.9 on small grids; one or two warps, 1.02 to 1.16; a register cap of 168, 1.11
to 1.20, of 96, 1.08; clusters (num_ctas) do not compile in triton 3.6. Reading the
index and the state before the wait is unsafe and no faster than prefetching them.

In a graph of 34 real layers, projections and other kernels between them (8 heads,
triton 3.8), programmatic launch gains nothing: 4.4 us a layer less than vLLM's path
with it and 4.6 without at batch 1, 4.7 and 6.1 at batch 8.
"""

import json
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tqdm import tqdm

from vllm.benchmarks.kda_decode.layer import HEAD_DIM
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.gdn.kda_decode.b12x import (
    B12xDecode,
    B12xFeatures,
    StagedPacked,
    installed_b12x,
    staging_buffers,
)
from vllm.model_executor.layers.mamba.gdn.kda_decode.one_launch import OneLaunchDecode
from vllm.model_executor.layers.mamba.gdn.kda_decode.routes import BatchKind, Call
from vllm.model_executor.layers.mamba.gdn.kda_decode.step import (
    DecodeStep,
    LayerGeometry,
    LayerState,
    advance_conv,
)
from vllm.platforms import current_platform

LAYERS = 34
BASELINE = "vllm"
FLOOR = "floor"
# The heads of vLLM's compiled one-launch op, which GLM-5.3 has at no TP size.
COMPILED_HEADS = (12, 24, 48, 96)
_LOWER_BOUND, _EPS = -5.0, 1e-5
# Well over the L2 of any GPU; a graph of 34 layers need not be longer than this.
_BYTES_A_REPLAY = 200_000_000
_MAX_ROUNDS = 12


# Convolution and recurrent states of one layer.
Caches = tuple[torch.Tensor, torch.Tensor]


def state_pools(
    num_heads: int,
    num_slots: int,
    block_bytes: int | None = None,
    device: str = "cuda",
) -> list[Caches]:
    """Make caches as vLLM does: a slot's states in a page, pages in a block.

    Args:
        num_heads: Local heads.
        num_slots: Slots of a layer.
        block_bytes: Bytes of a block, which is the distance of a layer's slots. It
            holds pages of as many layers as fit; None is one layer's page, dense.
        device: Where they go.

    Returns:
        For each of the 34 layers its convolution states, ``[slots, 3 * H * D, 3]``
        bf16, and its recurrent states, ``[slots, H, D, D]`` fp32.

    Raises:
        RuntimeError: A block does not hold a page, or would not keep its alignment.
    """
    shapes = ((3, 3 * num_heads * HEAD_DIM), (num_heads, HEAD_DIM, HEAD_DIM))
    dtypes = (torch.bfloat16, torch.float32)
    page = sum(prod(s) * d.itemsize for s, d in zip(shapes, dtypes, strict=True))
    block_bytes = page if block_bytes is None else block_bytes
    if block_bytes < page or block_bytes % 16:
        raise RuntimeError(
            f"blocks of {block_bytes} bytes do not fit {num_heads} heads: they need a "
            f"multiple of 16 from {page} on (--block-bytes)"
        )
    # What vLLM's layers ask themselves when they split a page into states.
    layer = SimpleNamespace(
        get_state_shape=lambda: shapes, get_state_dtype=lambda: dtypes
    )
    per_block = block_bytes // page
    caches: list[Caches] = []
    while len(caches) < LAYERS:
        blocks = torch.empty(
            num_slots, 1, 1, block_bytes, dtype=torch.int8, device=device
        )
        for pages in blocks[..., : per_block * page].split(page, dim=-1):
            MambaBase.bind_kv_cache(layer, pages)
            conv, state = layer.kv_cache
            caches.append((conv.normal_().transpose(1, 2), state.normal_(std=0.3)))
    return caches[:LAYERS]


def _layer_state(num_heads: int, caches: Caches) -> LayerState:
    channels = 3 * num_heads * HEAD_DIM

    def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=dtype)

    conv_state, recurrent_state = caches
    return LayerState(
        conv_weight=randn(4, channels).t().mul_(0.5),
        A_log=randn(num_heads).abs_().log_(),
        dt_bias=randn(num_heads, HEAD_DIM),
        norm_weight=randn(HEAD_DIM, dtype=torch.bfloat16),
        conv_state=conv_state,
        recurrent_state=recurrent_state,
        lower_bound=_LOWER_BOUND,
        eps=_EPS,
        scale=HEAD_DIM**-0.5,
    )


def _step(num_heads: int, batch: int, first_slot: int) -> DecodeStep:
    channels = 3 * num_heads * HEAD_DIM
    width = channels + num_heads + 2 * HEAD_DIM
    projected = torch.randn(batch, width, device="cuda", dtype=torch.bfloat16)
    raw_g, z, output = torch.randn(
        3, batch, num_heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16
    )
    slots = torch.randperm(batch, device="cuda", dtype=torch.int32) + first_slot
    return DecodeStep(
        layer_index=0,
        metadata=None,
        kind=BatchKind.SINGLE_TOKEN,
        mixed_qkv=projected[:, :channels],
        raw_g=raw_g,
        raw_beta=projected[:, channels : channels + num_heads],
        z=z,
        output=output,
        state_indices=slots[:, None],
        query_start_loc=None,
        num_accepted_tokens=None,
    )


# Prepares a path for one layer and returns what runs it.
MakeRun = Callable[[LayerState, DecodeStep], Callable[[], None]]


def _vllm(state: LayerState, step: DecodeStep) -> Callable[[], None]:
    """vLLM's three launches, with the arguments that its layer gives them."""
    from vllm.models.glm5next.nvidia.ops.third_party.kda import fused_recurrent_kda
    from vllm.third_party.flash_linear_attention.ops.kda import rms_norm_gated

    starts = torch.arange(step.num_tokens + 1, device="cuda", dtype=torch.int32)
    state = replace(state, conv_weight=state.conv_weight.contiguous())

    def run() -> None:
        qkv = advance_conv(step, state)
        q, k, v = qkv.view(1, step.num_tokens, 3, -1, HEAD_DIM).unbind(2)
        fused_recurrent_kda(
            q=q,
            k=k,
            v=v,
            g=step.raw_g[None],
            beta=step.raw_beta[None],
            initial_state=state.recurrent_state,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=starts,
            ssm_state_indices=step.state_indices[:, 0],
            out=step.output[None],
            sigmoid_beta=True,
            a_log=state.A_log,
            g_bias=state.dt_bias,
            compute_gate=True,
            lower_bound=state.lower_bound,
        )
        rms_norm_gated(
            step.output, step.z, state.norm_weight, None, "sigmoid", eps=state.eps
        )

    return run


def _compiled(state: LayerState, step: DecodeStep) -> Callable[[], None]:
    """vLLM's compiled one-launch op, in the full build."""
    from vllm._custom_ops import fused_kda_decode

    weight = state.conv_weight.t().view(4, 3, -1).transpose(0, 1).contiguous()
    norm_weight = state.norm_weight.float()

    def run() -> None:
        fused_kda_decode(
            step.mixed_qkv,
            weight,
            None,
            state.conv_state,
            step.raw_g[None],
            step.raw_beta[None],
            state.A_log,
            state.dt_bias,
            step.state_indices[:, 0],
            state.recurrent_state,
            out=step.output[None],
            lower_bound=state.lower_bound,
            output_gate=step.z,
            norm_weight=norm_weight,
            norm_eps=state.eps,
        )

    return run


def _states_of(state: LayerState, step: DecodeStep) -> torch.Tensor:
    first = int(step.state_indices.min())
    return state.recurrent_state[first : first + step.num_tokens]


def _copy(state: LayerState, step: DecodeStep) -> Callable[[], None]:
    source = _states_of(state, step)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _scale(state: LayerState, step: DecodeStep) -> Callable[[], None]:
    states = _states_of(state, step)
    return lambda: states.mul_(0.999)


def _geometry(state: LayerState, batch: int) -> LayerGeometry:
    return LayerGeometry(
        num_heads=state.A_log.numel(),
        head_dim=HEAD_DIM,
        conv_width=state.conv_weight.shape[1],
        num_spec=0,
        model_dtype=torch.bfloat16,
        conv_dtype=state.conv_state.dtype,
        state_dtype=state.recurrent_state.dtype,
        lower_bound=state.lower_bound,
        max_num_seqs=batch,
    )


def _one_launch(state: LayerState, step: DecodeStep) -> Callable[[], None]:
    backend = OneLaunchDecode(torch.device("cuda"))
    backend.bind(state, step.mixed_qkv.stride(0))
    return lambda: backend.run(Call.ONE_LAUNCH, step)


def _b12x(call: Call) -> MakeRun:
    def make(state: LayerState, step: DecodeStep) -> Callable[[], None]:
        device = torch.device("cuda", torch.cuda.current_device())
        batch = step.num_tokens
        backend = B12xDecode(
            installed_b12x(), _geometry(state, batch), device, (batch,)
        )
        backend.bind(state, step.raw_beta.stride(0))
        return lambda: backend.run(call, step)

    return make


def _b12x_staged(state: LayerState, step: DecodeStep) -> Callable[[], None]:
    """``run_kda`` through staging buffers, whatever the installed B12X takes.

    Five tensors and five metadata buffers are written per layer, as they must be for
    a B12X without live operands.
    """
    features = installed_b12x()
    device = torch.device("cuda", torch.cuda.current_device())
    geometry = _geometry(state, step.num_tokens)
    backend = B12xDecode(features, geometry, device)
    backend.bind(state, step.raw_beta.stride(0))
    if features.preparation is None:
        return lambda: backend.run(Call.RUN_KDA, step)
    staged = LiveThroughBuffers(backend, geometry, device)
    return lambda: staged.run(step)


class LiveThroughBuffers(StagedPacked):
    """The staging of an older B12X in front of one that takes live operands."""

    def __init__(
        self, backend: B12xDecode, geometry: LayerGeometry, device: torch.device
    ) -> None:
        self._backend = backend
        self._buffers = staging_buffers(geometry, backend.max_requests, device)
        self.binding = None
        # A plan is prepared for the stride of the buffer, not of the projection.
        backend.bind(backend.state, self._buffers["raw_beta"].stride(0))
        live = backend.packed
        self.binding = backend.features.api.bind_kda(
            live.plan, scratch=live.scratch, **self._buffers, **live.layer
        )


def paths(num_heads: int, features: B12xFeatures) -> dict[str, MakeRun]:
    """The paths that this machine can time at a head count, the baseline first.

    Args:
        num_heads: Local heads.
        features: What the installed B12X offers.

    Returns:
        What prepares each, by the name that the table gives it.
    """
    found: dict[str, MakeRun] = {BASELINE: _vllm}
    if num_heads in COMPILED_HEADS and hasattr(torch.ops._C, "fused_kda_decode"):
        found["compiled"] = _compiled
    if features.missing is None and num_heads not in COMPILED_HEADS:
        found["b12x staged"] = _b12x_staged
        if features.preparation is not None:
            found["b12x live"] = _b12x(Call.RUN_KDA)
        if features.single_token:
            found["b12x single"] = _b12x(Call.RUN_KDA_SINGLE_TOKEN)
    return found | {"one launch": _one_launch}


def _microseconds(runs: Sequence[Callable[[], None]], replays: int) -> float:
    """Median time of one of ``runs``, replayed together in a CUDA graph."""
    for run in runs[:2]:
        run()
    torch.accelerator.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(runs))
    return statistics.median(times)


def time_case(
    num_heads: int, batch: int, replays: int, block_bytes: int | None = None
) -> dict[str, float]:
    """Time every path at one size.

    Args:
        num_heads: Local heads.
        batch: Requests, one token each.
        replays: Graph replays that the median is taken over.
        block_bytes: Of :func:`state_pools`.

    Returns:
        Microseconds per layer, by path.
    """
    state_bytes = LAYERS * batch * num_heads * HEAD_DIM**2 * 4
    rounds = min(_MAX_ROUNDS, -(-_BYTES_A_REPLAY // state_bytes))
    pools = state_pools(num_heads, rounds * batch + 1, block_bytes)
    states = [_layer_state(num_heads, caches) for caches in pools]
    steps = [_step(num_heads, batch, 1 + r * batch) for r in range(rounds)]

    def timed(make: MakeRun) -> float:
        runs = [make(state, step) for step in steps for state in states]
        return _microseconds(runs, replays)

    made = paths(num_heads, installed_b12x())
    result = {name: timed(make) for name, make in made.items()}
    result[FLOOR] = min(timed(_copy), timed(_scale))
    return result


def _row(num_heads: int, batch: int, times: dict[str, float]) -> dict[str, Any]:
    baseline, floor = times[BASELINE], times[FLOOR]
    return {
        "heads": num_heads,
        "batch": batch,
        "microseconds": times,
        "ratio": {name: baseline / time for name, time in times.items()},
        "percent_of_floor": {name: 100 * floor / time for name, time in times.items()},
    }


def environment() -> dict[str, str]:
    """What the numbers were taken on."""
    packages = ("vllm", "torch", "triton", "b12x")
    found = {"gpu": torch.cuda.get_device_name(), "python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except ImportError:
            found[package] = "absent"
    return found


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """Print microseconds per layer, and the ratio to vLLM's path behind each."""
    names = sorted({n for row in rows for n in row["microseconds"]}, key=_order)
    head = ["heads", "batch", *names, "one launch, % of floor"]
    table = [head]
    for row in rows:
        cells = [str(row["heads"]), str(row["batch"])]
        for name in names:
            time = row["microseconds"].get(name)
            ratio = row["ratio"].get(name)
            cells.append("" if time is None else f"{time:.1f} ({ratio:.2f}x)")
        cells.append(f"{row['percent_of_floor']['one launch']:.0f}")
        table.append(cells)
    widths = [max(len(line[i]) for line in table) for i in range(len(head))]
    for line in table:
        print("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)))


_ORDER = (
    BASELINE,
    "compiled",
    "b12x staged",
    "b12x live",
    "b12x single",
    "one launch",
    FLOOR,
)


def _order(name: str) -> int:
    return _ORDER.index(name)


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw speed relative to vLLM's path over the batch, a panel per head count.

    Args:
        rows: From :func:`run_bench`.
        path: Where the picture goes; the ending names the format.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise RuntimeError(
            'a plot needs matplotlib: pip install "vllm-glm5next-kda[plot]"'
        ) from error
    heads = sorted({row["heads"] for row in rows})
    figure = Figure(figsize=(4 * len(heads), 3.5), layout="constrained")
    for axes, count in zip(
        figure.subplots(1, len(heads), squeeze=False)[0], heads, strict=True
    ):
        mine = [row for row in rows if row["heads"] == count]
        for name in _ORDER[1:-1]:
            points = [
                (r["batch"], r["ratio"][name]) for r in mine if name in r["ratio"]
            ]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=name)
        axes.axhline(1.0, color="gray", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set(title=f"{count} heads", xlabel="batch", ylabel="speed-up over vLLM")
        axes.legend(fontsize="small")
    figure.savefig(path)


def run_bench(
    heads: Sequence[int],
    batches: Sequence[int],
    replays: int,
    output_json: Path | None,
    picture: Path | None,
    block_bytes: int | None = None,
) -> None:
    """Time every size, print the table, and write what was asked for.

    Args:
        heads: Local head counts.
        batches: Batch sizes.
        replays: Graph replays that each median is taken over.
        output_json: Where the figures go, or None.
        picture: Where the plot goes, or None.
        block_bytes: Of :func:`state_pools`.

    Raises:
        RuntimeError: There is no CUDA device, no matplotlib for a plot, or a block
            does not hold a page.
    """
    if not current_platform.is_cuda():
        raise RuntimeError("bench needs a CUDA device and found none")
    print(", ".join(f"{name} {value}" for name, value in environment().items()))
    sizes = [(h, b) for h in heads for b in batches]
    rows = []
    for num_heads, batch in tqdm(sizes, desc="glm5next-kda bench", unit="size"):
        times = time_case(num_heads, batch, replays, block_bytes)
        rows.append(_row(num_heads, batch, times))
    print("microseconds per layer (speed-up over vLLM's path)")
    print_rows(rows)
    if output_json is not None:
        output_json.write_text(
            json.dumps({"on": environment(), "rows": rows}, indent=1)
        )
    if picture is not None:
        plot(rows, picture)
