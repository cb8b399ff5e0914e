# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a CPU cannot show of the layer: real kernels, graphs, pools of real size.

``pytest -m gpu``. B12X's calls are those of the installed package; with the package
absent, or without ``run_kda_single_token``, their cases are not there.
"""

import random
from dataclasses import dataclass, replace

import pytest
import torch
import triton
from packaging.version import Version

from vllm.benchmarks.kda_decode.check import (
    NUM_SPEC,
    SCENARIOS,
    Route,
    Scenario,
    check_step,
    routes,
)
from vllm.benchmarks.kda_decode.layer import (
    Batch,
    LayerOptions,
    build_layer,
    make_pages,
)
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture
from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.mamba.gdn.kda_decode.b12x import installed_b12x
from vllm.model_executor.layers.mamba.gdn.kda_decode.routes import Call
from vllm.model_executor.layers.mamba.ops import kda_single_token

pytestmark = pytest.mark.gpu

HAS_GPU = torch.cuda.is_available()
CUDA = torch.device("cuda", 0)
ROUTES = routes(CUDA, "all") if HAS_GPU else [Route("vLLM", "triton")]
OURS = [route for route in ROUTES if route.backend != "triton"] or ROUTES
HIDDEN = 256
SLOTS = 24
QUARTER = kda_single_token._QUARTER

on_every_route = pytest.mark.parametrize("route", ROUTES, ids=lambda r: r.name)
on_our_routes = pytest.mark.parametrize("route", OURS, ids=lambda r: r.name)


def hidden(rows, seed=0):
    generator = torch.Generator(CUDA).manual_seed(seed)
    return torch.randn(
        rows, HIDDEN, generator=generator, device=CUDA, dtype=torch.bfloat16
    )


def layer_on(route, *, num_slots=SLOTS, **options):
    options.setdefault("num_heads", 8)
    # Verify steps of four requests have 16 tokens; the builder keeps no buffers for
    # graphs beyond the largest size.
    options.setdefault("capture_sizes", (1, 4, 8, 16))
    return build_layer(
        LayerOptions(backend=route.backend, **options),
        num_slots=num_slots,
        device=CUDA,
    )


def table(rows, columns=1, first=1):
    return [[first + r * columns + c for c in range(columns)] for r in range(rows)]


# --- numbers ----------------------------------------------------------------------


@on_every_route
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
def test_step_against_float64(scenario, route):
    outcome = check_step(scenario, route, 8, CUDA)
    assert outcome.passed, outcome


SIZES = [(64, 1), (64, 16), (64, 512), (32, 16), (16, 1), (16, 256), (8, 33), (8, 512)]


@on_every_route
@pytest.mark.parametrize(("num_heads", "batch"), [*SIZES, (4, 7), (2, 3)])
def test_sizes_against_float64(num_heads, batch, route):
    scenario = Scenario("decode", Batch([1] * batch, table(batch)))
    outcome = check_step(scenario, route, num_heads, CUDA)
    assert outcome.passed, outcome


@on_every_route
@pytest.mark.parametrize("state_dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("conv_layout", ("SD", "DS"))
@pytest.mark.parametrize("num_spec", (0, NUM_SPEC))
def test_layouts_and_dtypes_against_float64(route, state_dtype, conv_layout, num_spec):
    scenario = Scenario(
        "decode", Batch([1] * 5, table(5, num_spec + 1)), num_spec=num_spec
    )
    options = LayerOptions(state_dtype=state_dtype, conv_layout=conv_layout)
    outcome = check_step(scenario, route, 8, CUDA, options)
    assert outcome.passed, outcome


def one_step(route, batch, **options):
    under_test = layer_on(route, **options)
    output = under_test.run(hidden(batch.num_tokens), under_test.metadata(batch))
    return output, under_test


@on_our_routes
@pytest.mark.parametrize("state_dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("batch", (1, 5, 64))
@pytest.mark.parametrize("num_heads", (8, 16, 64))
def test_routes_agree_on_the_states(route, state_dtype, batch, num_heads):
    """Bit for bit with vLLM for the one-launch kernel, and nearly so for B12X.

    Where the projection's row stride is no multiple of 16 elements, vLLM's kernel
    sums the q and k norms in another order. The output's norm has the order that
    Triton 3.8, which vLLM 0.33.0 installs, gives to vLLM's.
    """
    step = Batch([1] * batch, table(batch))
    options = {
        "num_heads": num_heads,
        "num_slots": batch + 1,
        "max_num_seqs": 64,
        "state_dtype": state_dtype,
    }
    wanted, stock = one_step(Route("vLLM", "triton"), step, **options)
    found, ours = one_step(route, step, **options)
    assert ours.layer.last_call is not Call.VLLM
    assert torch.equal(ours.conv_state, stock.conv_state)
    same_order = batch == 1 or sum(ours.layer._projection_widths) % 16 == 0
    if route.backend == "one_launch" and same_order:
        assert torch.equal(ours.recurrent_state, stock.recurrent_state)
        if Version(triton.__version__) >= Version("3.8"):
            assert torch.equal(found, wanted)
    else:
        state, other = ours.recurrent_state.float(), stock.recurrent_state.float()
        # A few last bits of the largest value; one bit of it in bfloat16.
        bound = 2.0**-20 if state_dtype == "float32" else 2.0**-7
        assert (state - other).abs().max() <= bound * other.abs().max()
    assert (found - wanted).abs().max() <= 2e-2 * wanted.abs().max()


@on_our_routes
def test_c1_rows_beyond_the_grid_of_b12x(route):
    """1,024 requests of 64 heads: all null but the last two."""
    rows, heads = 1024, 64
    live = [[0]] * (rows - 2) + [[3], [5]]
    batch = Batch([1] * rows, live)
    under_test = layer_on(route, num_heads=heads, max_num_seqs=rows, num_slots=8)
    before = under_test.pages.clone()
    output = under_test.run(hidden(rows), under_test.metadata(batch))
    if route.backend == "b12x":
        assert under_test.layer.last_call is Call.VLLM
    else:
        assert not output[:-2].any()
    small = Batch([1, 1], [[3], [5]])
    reference = layer_on(Route("vLLM", "triton"), num_heads=heads, num_slots=8)
    wanted = reference.run(hidden(rows)[-2:], reference.metadata(small))
    assert (output[-2:] - wanted).abs().max() <= 2e-2 * wanted.abs().max()
    untouched = [slot for slot in range(8) if slot not in (3, 5)]
    assert torch.equal(under_test.pages[untouched], before[untouched])


# --- CUDA graphs ------------------------------------------------------------------


@dataclass
class Captured:
    """A FULL graph over one batch size, with the buffers that its replays read."""

    under_test: object
    graph: object
    inputs: torch.Tensor
    output: torch.Tensor

    def replay(self, batch, inputs):
        """Stage a step as vLLM's runner does, and replay."""
        self.under_test.metadata(batch)
        self.inputs[: inputs.shape[0]].copy_(inputs)
        self.graph.replay()
        return self.output


def capture(under_test, batch, rows):
    """Warm up and capture one step, and leave the states as they were."""
    under_test.builder.use_full_cuda_graph = True
    snapshot = under_test.pages.clone()
    inputs = hidden(rows)
    metadata = under_test.metadata(batch)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        under_test.run(inputs, metadata)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = under_test.run(inputs, metadata)
    under_test.pages.copy_(snapshot)
    return Captured(under_test, graph, inputs, output)


def padded(live, rows, columns=1, **more):
    """A decode step of the requests with these slots, padded to ``rows`` rows."""
    return Batch(
        [1] * len(live),
        [[s + c for c in range(columns)] for s in live],
        padded_tokens=rows,
        padded_requests=rows,
        **more,
    )


@on_every_route
@pytest.mark.parametrize("rows", (1, 4, 8))
def test_full_graph_replays_like_eager(route, rows):
    """Other slots, fewer live rows, other values: bit for bit what eager gives."""
    graphed, eager = layer_on(route), layer_on(route)
    captured = capture(graphed, Batch([1] * rows, table(rows)), rows)
    rng = random.Random(rows)
    for seed in range(6):
        live = rng.sample(range(1, SLOTS), rng.randint(1, rows))
        batch, inputs = padded(live, rows), hidden(rows, seed)
        found = captured.replay(batch, inputs)[: len(live)].clone()
        wanted = eager.run(inputs, eager.metadata(batch))[: len(live)]
        assert torch.equal(found, wanted)
        assert torch.equal(graphed.pages, eager.pages)


@on_our_routes
def test_padded_rows_of_a_full_graph_are_zero(route):
    captured = capture(layer_on(route), Batch([1] * 8, table(8)), 8)
    output = captured.replay(padded([3, 5], 8), hidden(8))
    assert output[:2].any() and not output[2:].any()


@on_every_route
def test_full_graph_of_verify_steps_replays_like_eager(route):
    columns, rows = NUM_SPEC + 1, 4
    options = {"num_spec": NUM_SPEC, "num_slots": 32}
    graphed, eager = layer_on(route, **options), layer_on(route, **options)
    eager.builder.use_full_cuda_graph = True
    full = Batch(
        [columns] * rows,
        table(rows, columns),
        drafts=[NUM_SPEC] * rows,
        accepted=[1] * rows,
    )
    captured = capture(graphed, full, rows * columns)
    rng = random.Random(1)
    for seed in range(6):
        live = rng.randint(1, rows)
        batch = Batch(
            [columns] * live,
            table(live, columns, first=1 + rng.randint(0, 8)),
            drafts=[NUM_SPEC] * live,
            accepted=[rng.randint(1, columns) for _ in range(live)],
            padded_tokens=rows * columns,
            padded_requests=rows,
        )
        tokens = live * columns
        inputs = hidden(rows * columns, seed)
        found = captured.replay(batch, inputs)[:tokens].clone()
        wanted = eager.run(inputs, eager.metadata(batch))[:tokens]
        assert torch.equal(found, wanted)
        assert torch.equal(graphed.pages, eager.pages)


@on_every_route
@pytest.mark.skipif(
    not hasattr(torch.ops._C, "weak_ref_tensor"),
    reason="breakable graphs need vLLM's compiled ops, and this build has none",
)
def test_breakable_graph_replays_every_batch_kind(route):
    """PIECEWISE mode captures once, on a dummy run, and replays for any step."""
    rows = 8
    options = {"num_spec": NUM_SPEC, "num_slots": 32}
    graphed, eager = layer_on(route, **options), layer_on(route, **options)
    inputs = hidden(rows)
    context = {
        "vllm_config": graphed.config,
        "cudagraph_runtime_mode": CUDAGraphMode.PIECEWISE,
    }
    positions = torch.zeros(rows, dtype=torch.long, device=CUDA)

    def run(metadata, call):
        by_layer = None if metadata is None else {graphed.layer.prefix: metadata}
        with (
            torch.inference_mode(),
            set_current_vllm_config(graphed.config),
            set_forward_context(by_layer, **context),
        ):
            return call()

    graphed.run(inputs, None)
    recording = BreakableCUDAGraphCapture()

    def record():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), recording:
            return graphed.layer(inputs, positions)

    output = run(None, record)
    assert recording.num_eager_breaks == 1
    slots = table(2, NUM_SPEC + 1)
    steps = (
        Batch([1, 1], slots),
        Batch([4, 2], slots, drafts=[3, 1], accepted=[1, 2]),
        Batch([1, 1], slots, drafts=[0, 0], accepted=[3, 1]),
        Batch([3, 5], slots, computed=[0, 0], prefilling=[True, True]),
        Batch([1, 6], slots, computed=[9, 0], prefilling=[False, True]),
        Batch([1, 4], slots, drafts=[-1, 3], accepted=[1, 1]),
    )
    for seed, batch in enumerate(steps):
        fresh = hidden(rows, seed)
        inputs.copy_(fresh)
        run(graphed.metadata(batch), recording.replay)
        wanted = eager.run(fresh, eager.metadata(batch))
        tokens = batch.num_tokens
        assert torch.equal(output[:tokens], wanted[:tokens]), batch
        assert torch.equal(graphed.pages, eager.pages), batch
        assert not output[tokens:].any()


@on_our_routes
def test_replay_allocates_and_compiles_nothing(route):
    captured = capture(layer_on(route), Batch([1] * 4, table(4)), 4)
    batch, inputs = padded([3, 5], 4), hidden(4)
    captured.replay(batch, inputs)
    compiled = []
    before = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = lambda **kw: compiled.append(kw)
    torch.cuda.synchronize()
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
    try:
        for _ in range(3):
            captured.graph.replay()
        torch.cuda.synchronize()
    finally:
        triton.knobs.runtime.jit_post_compile_hook = before
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocations
    assert not compiled


@on_our_routes
def test_nothing_compiles_after_the_caches_are_bound(route):
    """No live count is in a compile key, so serving never waits for a compiler."""
    under_test = layer_on(route, num_heads=4, capture_sizes=(1, 2, 8))
    first = under_test.metadata(Batch([1] * 2, table(2)))
    under_test.run(hidden(2), first)  # vLLM's own convolution compiles here
    compiled = []
    before = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = lambda **kw: compiled.append(
        kw["fn"].name
    )
    single_token = installed_b12x().single_token and route.backend == "b12x"
    try:
        for rows in (1, 2, 8) if single_token else (1, 2, 3, 5, 8, 16):
            batch = Batch([1] * rows, table(rows))
            under_test.run(hidden(rows), under_test.metadata(batch))
    finally:
        triton.knobs.runtime.jit_post_compile_hook = before
    assert [n for n in compiled if "conv1d" not in n] == []


# --- kernels, copies, synchronization ---------------------------------------------


def kernels_between_projections(under_test, batch):
    """Names of the kernels between the last projection and ``o_proj``."""
    from torch.profiler import ProfilerActivity, profile, record_function

    inputs, metadata = hidden(batch.num_tokens), under_test.metadata(batch)
    layer, spans = under_test.layer, []

    def enter(*_):
        spans.append(record_function("between projections"))
        spans[-1].__enter__()

    def leave(*_):
        spans.pop().__exit__(None, None, None)

    under_test.run(inputs, metadata)
    handles = [
        layer.g_b_proj.register_forward_hook(enter),
        layer.o_proj.register_forward_pre_hook(leave),
    ]
    torch.cuda.synchronize()
    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True
    ) as profiler:
        under_test.run(inputs, metadata)
        torch.cuda.synchronize()
    for handle in handles:
        handle.remove()
    events = profiler.events()
    [span] = [
        e
        for e in events
        if e.name == "between projections"
        and e.device_type == torch.autograd.DeviceType.CUDA
    ]
    return [
        e.name
        for e in sorted(events, key=lambda e: e.time_range.start)
        if e.device_type == torch.autograd.DeviceType.CUDA
        and e is not span
        and span.time_range.start <= e.time_range.start < span.time_range.end
    ]


def test_plain_decode_launches_these_kernels_and_nothing_else():
    conv = "_causal_conv1d_update_kernel"
    b12x = [conv, "_packed_sequential_kda_decode_kernel", "_gated_rmsnorm_kernel"]
    wanted = {
        "triton": [
            conv,
            "fused_recurrent_gated_delta_rule_fwd_kernel",
            "layer_norm_gated_fwd_kernel",
        ],
        "one_launch": ["_kda_single_token_kernel"],
        "b12x": b12x,
    }
    for route in ROUTES:
        under_test = layer_on(route, capture_sizes=(4,))
        found = kernels_between_projections(under_test, Batch([1] * 4, table(4)))
        assert found == wanted[route.backend], route.name


STEPS = (
    Batch([1] * 4, table(4, NUM_SPEC + 1)),
    Batch([1, 1], table(2, NUM_SPEC + 1), padded_tokens=4, padded_requests=4),
    Batch([4, 1, 2], table(3, NUM_SPEC + 1), drafts=[3, 0, 1], accepted=[4, 1, 2]),
    Batch([4, 4], table(2, NUM_SPEC + 1), drafts=[3, 3], accepted=[2, 1]),
)


@on_every_route
@pytest.mark.parametrize("batch", STEPS, ids=("plain", "padded", "ragged", "verify"))
def test_c11_no_host_read_of_a_device_tensor(route, batch):
    under_test = layer_on(route, num_spec=NUM_SPEC)
    under_test.builder.use_full_cuda_graph = True
    rows = batch.padded_tokens or batch.num_tokens
    inputs, metadata = hidden(rows), under_test.metadata(batch)
    under_test.run(inputs, metadata)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        under_test.run(inputs, metadata)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- state safety -----------------------------------------------------------------


@on_our_routes
def test_null_rows_and_other_slots_keep_their_bytes(route):
    under_test = layer_on(route)
    before = under_test.pages.clone()
    batch = Batch([1] * 4, [[0], [7], [0], [9]])
    output = under_test.run(hidden(4), under_test.metadata(batch))
    assert not output[[0, 2]].any() and output[[1, 3]].any()
    untouched = [slot for slot in range(SLOTS) if slot not in (7, 9)]
    assert torch.equal(under_test.pages[untouched], before[untouched])


# Rows and heads whose programs fit the GPU at once, and many times over.
ONE_WAVE, MANY_WAVES = (2, 16), (64, 64)


@on_our_routes
@pytest.mark.parametrize(("batch", "num_heads"), ((1, 8), ONE_WAVE, MANY_WAVES))
def test_repetition_from_a_snapshot_gives_the_same_bits(route, batch, num_heads):
    """A race between programs shows in no tool, only in a result that changes."""
    under_test = layer_on(
        route, num_heads=num_heads, num_slots=batch + 1, max_num_seqs=64
    )
    inputs = hidden(batch)
    metadata = under_test.metadata(Batch([1] * batch, table(batch)))
    snapshot = under_test.pages.clone()
    wanted = under_test.run(inputs, metadata)
    after = under_test.pages.clone()
    differing = torch.zeros((), dtype=torch.int64, device=CUDA)
    for _ in range(500 if batch < 64 else 60):
        under_test.pages.copy_(snapshot)
        differing += (under_test.run(inputs, metadata) != wanted).sum()
        differing += (under_test.pages != after).sum()
    assert not differing.item()


def test_shared_heads_agree_with_whole_ones_in_many_waves(monkeypatch):
    """The last of a head's four programs finishes it, whichever that is."""
    rows, num_heads = 1, 64
    route = next((r for r in ROUTES if r.backend == "one_launch"), None)
    if route is None:
        pytest.skip("the one-launch kernel does not run here")
    batch = Batch([1] * rows, table(rows))
    whole = layer_on(route, num_heads=num_heads)
    shared = layer_on(route, num_heads=num_heads)
    snapshot = whole.pages.clone()
    inputs = hidden(rows)
    reference = whole.run(inputs, whole.metadata(batch))
    monkeypatch.setattr(kda_single_token, "_select_variant", lambda *_: QUARTER)
    metadata = shared.metadata(batch)
    wanted = shared.run(inputs, metadata)
    assert (wanted - reference).abs().max() <= 1e-2 * reference.abs().max()
    busy = torch.cuda.Stream()
    load = torch.randn(4096, 4096, device=CUDA, dtype=torch.bfloat16)
    differing = torch.zeros((), dtype=torch.int64, device=CUDA)
    for _ in range(500):
        shared.pages.copy_(snapshot)
        with torch.cuda.stream(busy):  # takes multiprocessors away from the kernel
            torch.mm(load, load)
        differing += (shared.run(inputs, metadata) != wanted).sum()
        differing += (shared.pages != whole.pages).sum()
    assert not differing.item()


@on_every_route
def test_rejected_drafts_leave_no_trace(route):
    """Verify, partial acceptance, plain decode, verify: as if token by token."""
    slots = table(1, NUM_SPEC + 1)
    under_test = layer_on(route, num_spec=NUM_SPEC)
    alone = layer_on(Route("vLLM", "triton"), num_spec=0)
    alone.conv_state.copy_(under_test.conv_state[..., :3])
    alone.recurrent_state.copy_(under_test.recurrent_state)
    tokens = hidden(16, seed=5)
    accepted, position = 1, 0
    kept = []
    for drafts, accept in ((3, 2), (0, 1), (3, 4), (3, 1), (0, 1)):
        query = tokens[position : position + drafts + 1]
        batch = Batch([drafts + 1], slots, drafts=[drafts], accepted=[accepted])
        output = under_test.run(query, under_test.metadata(batch))
        kept.append(output[:accept])
        accepted, position = accept, position + accept
    wanted = [
        alone.run(tokens[i : i + 1], alone.metadata(Batch([1], [[1]])))
        for i in range(position)
    ]
    found, wanted = torch.cat(kept), torch.cat(wanted)
    assert (found - wanted).abs().max() <= 2e-2 * wanted.abs().max()
    state = under_test.recurrent_state[slots[0][accepted - 1]]
    assert (state - alone.recurrent_state[1]).abs().max() <= 1e-5


@on_every_route
def test_recycled_slots_start_from_nothing(route):
    """A new request's first chunk ignores what its slot held before."""
    outputs = []
    for fill in (7.0, 0.0):
        under_test = layer_on(route)
        under_test.recurrent_state[5] = fill
        under_test.conv_state[5] = fill
        first = Batch([6], [[5]], computed=[0], prefilling=[True])
        under_test.run(hidden(6), under_test.metadata(first))
        step = Batch([1], [[5]], computed=[6])
        outputs.append(under_test.run(hidden(1, 9), under_test.metadata(step)))
    assert torch.equal(*outputs)


@on_every_route
def test_slots_beyond_two_to_the_31_elements(route):
    heads = 8
    small = layer_on(route, num_heads=heads)
    page = small.pages.shape[-1]
    # The convolution view counts bfloat16 elements, the recurrent one float32.
    num_slots = 2**31 * 4 // page + 64
    under_test = layer_on(route, num_heads=heads, num_slots=2)
    pool = torch.zeros(num_slots, 1, 1, page, dtype=torch.int8, device=CUDA)
    high = [num_slots - 1, num_slots - 9]
    pool[high] = small.pages[[3, 5]]
    canaries = [num_slots - 2, num_slots - 10, 1]
    pool[canaries] = 77
    with set_current_vllm_config(under_test.config):
        under_test.layer.bind_kv_cache(pool)
    conv, state = under_test.layer.kv_cache
    assert high[1] * state.stride(0) > 2**31
    assert high[1] * conv.stride(0) > 2**31
    batch = Batch([1, 1], [[slot] for slot in high])
    found = under_test.run(hidden(2), under_test.metadata(batch))
    wanted = small.run(hidden(2), small.metadata(Batch([1, 1], [[3], [5]])))
    assert under_test.layer.last_call is small.layer.last_call
    assert torch.equal(found, wanted)
    assert torch.equal(pool[high], small.pages[[3, 5]])
    assert bool((pool[canaries] == 77).all())
    assert int(pool.view(torch.int64).ne(0).flatten(1).any(1).sum()) == 5


# --- the long run -----------------------------------------------------------------


@dataclass
class Request:
    """One request of the soak: its slots, and what it has been fed."""

    slots: list[int]
    computed: int
    accepted: int
    left: int
    steps: list[tuple[Batch, torch.Tensor, torch.Tensor]]


class Soak:
    """A seeded scheduler over a layer; every request is replayed alone at its end."""

    COLUMNS = NUM_SPEC + 1
    REQUESTS = 12

    def __init__(self, route, seed):
        self.rng = random.Random(seed)
        slots = 1 + self.REQUESTS * self.COLUMNS
        options = {"num_spec": NUM_SPEC, "num_slots": slots, "num_heads": 2}
        self.layer = layer_on(route, **options)
        self.layer.builder.use_full_cuda_graph = True
        self.alone = layer_on(route, **options)
        self.alone.builder.use_full_cuda_graph = True
        self.free = [
            list(range(first, first + self.COLUMNS))
            for first in range(1, slots, self.COLUMNS)
        ]
        self.running: list[Request] = []
        self.finished = 0
        self.generator = torch.Generator(CUDA).manual_seed(seed)

    def projections(self, rows):
        layer = self.layer.layer
        heads, dim = layer.local_num_heads, layer.head_dim
        projected = torch.randn(
            rows,
            sum(layer._projection_widths),
            generator=self.generator,
            device=CUDA,
            dtype=torch.bfloat16,
        )
        raw_g, z = torch.randn(
            2,
            rows,
            heads,
            dim,
            generator=self.generator,
            device=CUDA,
            dtype=torch.bfloat16,
        )
        return projected, raw_g, z

    @staticmethod
    def attend(under_test, batch, projections):
        layer = under_test.layer
        projected, raw_g, z = projections
        mixed_qkv, raw_beta, *_ = projected.split(layer._projection_widths, dim=-1)
        output = torch.full_like(z, torch.nan)
        metadata = under_test.metadata(batch)
        with (
            torch.inference_mode(),
            set_current_vllm_config(under_test.config),
            set_forward_context({layer.prefix: metadata}, under_test.config),
        ):
            # vLLM's own convolution writes over the projections.
            layer._attend(mixed_qkv.clone(), raw_g, raw_beta, z, output)
        return output

    def join(self):
        self.running.append(
            Request(self.free.pop(), 0, 1, self.rng.randint(5, 400), [])
        )

    def step(self):
        if self.free and (not self.running or self.rng.random() < 0.1):
            self.join()
        fresh = [r for r in self.running if r.computed == 0]
        speculate = self.rng.random() < 0.4 and not fresh
        if fresh:
            batch, rows = self.first_chunk(fresh[0])
        elif speculate:
            batch, rows = self.verify()
        else:
            batch, rows = self.plain()
        tokens = batch.num_tokens
        projections = self.projections(batch.padded_tokens or tokens)
        output = self.attend(self.layer, batch, projections)
        start = 0
        for request, length in zip(rows, batch.query_lens, strict=True):
            part = slice(start, start + length)
            self.record(request, batch, rows.index(request), part, projections, output)
            start += length

    def first_chunk(self, request):
        length = self.rng.randint(1, 9)
        return (
            Batch([length], [request.slots], computed=[0], prefilling=[True]),
            [request],
        )

    def plain(self):
        """Requests whose last step kept more than one token must verify next."""
        rows = [r for r in self.running if r.accepted == 1]
        if not rows:
            return self.verify()
        batch = Batch([1] * len(rows), [r.slots for r in rows])
        if self.rng.random() < 0.5:
            batch.padded_requests = batch.padded_tokens = self.REQUESTS
        return batch, rows

    def verify(self):
        rows = self.rng.sample(self.running, self.rng.randint(1, len(self.running)))
        drafts = [self.rng.randint(0, NUM_SPEC) for _ in rows]
        return (
            Batch(
                [d + 1 for d in drafts],
                [r.slots for r in rows],
                drafts=drafts,
                accepted=[r.accepted for r in rows],
            ),
            rows,
        )

    def record(self, request, batch, row, part, projections, output):
        mine = replace(
            batch,
            query_lens=[batch.query_lens[row]],
            slots=[request.slots],
            computed=None if batch.computed is None else [batch.computed[row]],
            drafts=None if batch.drafts is None else [batch.drafts[row]],
            accepted=None if batch.accepted is None else [batch.accepted[row]],
            padded_tokens=None,
            padded_requests=None,
        )
        inputs = tuple(tensor[part].clone() for tensor in projections)
        request.steps.append((mine, inputs, output[part].clone()))
        length = part.stop - part.start
        request.computed += length
        speculative = batch.drafts is not None
        request.accepted = self.rng.randint(1, length) if speculative else 1
        request.left -= 1
        if request.left <= 0:
            self.leave(request)

    def leave(self, request):
        """Replay the request alone, from recycled slots, and compare every step."""
        for number, (batch, inputs, output) in enumerate(request.steps):
            found = self.attend(self.alone, batch, inputs)
            assert torch.equal(found, output), (
                f"request with slots {request.slots}: its step {number} of "
                f"{len(request.steps)} ({batch}) differs alone"
            )
        slot = request.slots[0]
        assert torch.equal(
            self.alone.recurrent_state[slot], self.layer.recurrent_state[slot]
        )
        self.running.remove(request)
        self.free.append(request.slots)
        self.finished += 1


@on_every_route
def test_soak(route):
    steps, seed = 20_000 // len(ROUTES), 11
    soak = Soak(route, seed)
    for step in range(steps):
        try:
            soak.step()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, step {step}: {error}") from error
    assert soak.finished > 50


def test_slots_are_reset_between_tests():
    """The generator of the pages is deterministic, or comparisons mean nothing."""
    under_test = layer_on(ROUTES[0])
    again = make_pages(under_test.layer, SLOTS, CUDA, 0)
    assert torch.equal(under_test.pages, again)
