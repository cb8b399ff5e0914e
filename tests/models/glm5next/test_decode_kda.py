# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The real layer, driven through the real metadata builder, on every route.

vLLM's kernels and B12X's run in Triton's interpreter; of B12X only the device entry
points are doubled.
"""

import gc
import logging
import weakref
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

from vllm.benchmarks.kda_decode import layer as layer_module
from vllm.benchmarks.kda_decode.check import (
    NUM_SPEC,
    SCENARIOS,
    CopyCounter,
    Route,
    between_projections,
    check_step,
    routes,
)
from vllm.benchmarks.kda_decode.double import B12xDouble
from vllm.benchmarks.kda_decode.layer import (
    Batch,
    LayerOptions,
    build_layer,
    fill_weights,
    make_pages,
)
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.logger import _print_info_once
from vllm.model_executor.layers.mamba.gdn.kda_decode.b12x import (
    B12xFeatures,
    _StepTokens,
)
from vllm.model_executor.layers.mamba.gdn.kda_decode.routes import BatchKind, Call
from vllm.model_executor.layers.mamba.gdn.kda_decode.step import decode_step
from vllm.model_executor.layers.mamba.ops import kda_single_token
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.models.glm5next import decode_kda
from vllm.models.glm5next.common.kda import Glm5NextLinearAttention
from vllm.models.glm5next.decode_kda import Glm5NextDecodeLinearAttention

CPU = torch.device("cpu")
SLOTS = 24
HIDDEN = 256
DECODES = [scenario for scenario in SCENARIOS if not scenario.has_prefill]
PLAIN = Batch([1, 1, 1], [[3], [9], [5]])
VERIFY = Batch(
    [4, 1, 2],
    [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]],
    drafts=[3, 0, 1],
    accepted=[2, 1, 4],
)


NO_B12X = mock.Mock(features=B12xFeatures)
ON_EACH_BACKEND = pytest.mark.parametrize(
    ("double", "backend"),
    ((None, "triton"), (B12xDouble(single_token=True), "b12x"), (NO_B12X, None)),
    ids=("triton", "b12x", "one_launch"),
)


def hidden(rows, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, HIDDEN, generator=generator).bfloat16()


def layer_with(double=None, **options):
    features = None if double is None else double.features()
    return build_layer(LayerOptions(**options), num_slots=SLOTS, b12x=features)


def reset(under_test):
    under_test.pages.copy_(make_pages(under_test.layer, SLOTS, CPU, 0))


class Operators(CopyCounter):
    """Names the operators, views left out, that run while it is active."""

    def __init__(self):
        super().__init__()
        self.names = []

    def count(self, name, result):
        self.names.append(name)


# --- construction -----------------------------------------------------------------


def test_vllm_builds_the_replacement():
    under_test = layer_with(backend="triton")
    assert type(under_test.layer) is Glm5NextDecodeLinearAttention
    assert isinstance(under_test.layer, Glm5NextLinearAttention)
    stock = build_layer(LayerOptions(), num_slots=2, stock=True)
    assert type(stock.layer) is Glm5NextLinearAttention
    names = {name: p.shape for name, p in stock.layer.named_parameters()}
    assert {n: p.shape for n, p in under_test.layer.named_parameters()} == names
    assert set(under_test.layer.state_dict()) == set(stock.layer.state_dict())
    assert under_test.layer.get_kv_cache_spec(
        under_test.config
    ) == stock.layer.get_kv_cache_spec(stock.config)


@pytest.mark.parametrize("backend", ("native", "flashinfer", "fastest"))
def test_unknown_backend_fails_at_construction(backend):
    with pytest.raises(ValueError, match="valid values: auto, b12x"):
        layer_with(backend=backend)


def test_impossible_backend_fails_at_construction():
    with pytest.raises(RuntimeError, match="it needs a CUDA device"):
        layer_with(backend="b12x")


def test_one_log_line(caplog_vllm):
    _print_info_once.cache_clear()
    for _ in range(2):
        layer_with(B12xDouble(single_token=True))
    lines = [
        r.getMessage()
        for r in caplog_vllm.records
        if "KDA decode backend" in r.getMessage()
    ]
    assert lines == [
        "GLM-5.3 KDA decode backend: b12x (requested: auto); one-token steps: "
        "run_kda_single_token; b12x from B12xDouble"
    ]


def test_declined_b12x_is_logged_with_its_reason(caplog_vllm):
    _print_info_once.cache_clear()
    layer_with(mock.Mock(features=lambda: B12xFeatures(missing="b12x lacks plan")))
    line = "one-token steps: one_launch; b12x not used: b12x lacks plan"
    assert line in caplog_vllm.text


@pytest.fixture
def caplog_vllm(caplog):
    with caplog.at_level(logging.INFO, logger="vllm"):
        yield caplog


@pytest.mark.parametrize("requested", ("auto", "b12x"))
def test_a_plan_that_cannot_be_prepared(requested):
    double = B12xDouble()
    double.plan = mock.Mock(side_effect=RuntimeError("no compiler here"))
    if requested == "b12x":
        with pytest.raises(RuntimeError, match="no compiler here"):
            layer_with(double, backend=requested)
        return
    under_test = layer_with(double)
    assert "no compiler here" in under_test.layer.decode_resolution.declined
    found = under_test.run(hidden(3), under_test.metadata(PLAIN))
    assert under_test.layer.last_call is Call.ONE_LAUNCH
    alone = layer_with(NO_B12X)
    assert torch.equal(found, alone.run(hidden(3), alone.metadata(PLAIN)))


# --- numbers ----------------------------------------------------------------------


@pytest.mark.parametrize("route", routes(CPU, "all"))
@pytest.mark.parametrize("scenario", DECODES, ids=lambda scenario: scenario.name)
def test_step_against_float64(scenario, route):
    outcome = check_step(scenario, route, 2, CPU)
    assert outcome.passed, outcome


@pytest.mark.parametrize("num_heads", (1, 4, 8))
def test_c8_head_splits(num_heads):
    route = Route("B12X", "b12x", lambda: B12xDouble(single_token=True).features())
    outcome = check_step(DECODES[0], route, num_heads, CPU)
    assert outcome.passed and "run_kda_single_token" in outcome.calls, outcome


def test_c8_each_head_has_its_own_decay():
    under_test = layer_with(B12xDouble(single_token=True))
    metadata = under_test.metadata(PLAIN)
    under_test.run(hidden(3), metadata)
    before = under_test.recurrent_state.clone()
    reset(under_test)
    with torch.no_grad():
        a_log = under_test.layer.A_log
        a_log.copy_(a_log.flip(2))
    under_test.run(hidden(3), metadata)
    assert not torch.equal(under_test.recurrent_state[3], before[3])


def test_both_b12x_calls_leave_the_same_bits():
    results = []
    for single_token in (False, True):
        under_test = layer_with(B12xDouble(single_token=single_token))
        output = under_test.run(hidden(3), under_test.metadata(PLAIN))
        results.append((output, under_test.pages))
    assert under_test.layer.last_call is Call.RUN_KDA_SINGLE_TOKEN
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("scenario", DECODES, ids=lambda scenario: scenario.name)
def test_without_b12x_bits_are_vllms(scenario):
    batch = scenario.batch
    rows = batch.padded_tokens or batch.num_tokens
    results = []
    for stock in (False, True):
        under_test = build_layer(
            LayerOptions(num_spec=scenario.num_spec, backend="triton"),
            num_slots=SLOTS,
            stock=stock,
        )
        output = under_test.run(hidden(rows), under_test.metadata(batch))
        results.append((output[: batch.num_tokens], under_test.pages))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_plain_decode_between_verify_steps():
    """Steps on different calls share the states: verify, plain, verify."""
    plain = Batch([1, 1, 1], VERIFY.slots)
    results = []
    for double in (B12xDouble(single_token=True), None):
        under_test = layer_with(
            double, num_spec=NUM_SPEC, backend=None if double else "triton"
        )
        under_test.builder.use_full_cuda_graph = True
        calls = []
        for seed, batch in enumerate((VERIFY, plain, VERIFY)):
            under_test.run(hidden(batch.num_tokens, seed), under_test.metadata(batch))
            calls.append(under_test.layer.last_call)
        results.append(under_test)
        if double:
            assert calls == [Call.RUN_KDA, Call.RUN_KDA_SINGLE_TOKEN, Call.RUN_KDA]
    ours, stock = results
    assert torch.equal(ours.conv_state, stock.conv_state)
    # The two write the q/k norm and the gate differently.
    difference = (ours.recurrent_state - stock.recurrent_state).abs().max()
    assert 0 < difference < 1e-5


# --- what is handed over ----------------------------------------------------------


@pytest.mark.parametrize("live", (True, False))
def test_single_token_call_gets_the_layers_own_tensors(live):
    double = B12xDouble(live=live, single_token=True)
    under_test = layer_with(double)
    layer = under_test.layer
    metadata = under_test.metadata(PLAIN)
    own = {}
    hooks = [
        module.register_forward_hook(
            lambda _, __, result, name=name: own.__setitem__(name, result[0])
        )
        for name, module in (
            ("projected", layer.in_proj_qkvbfg_a),
            ("raw_g", layer.f_b_proj),
            ("z", layer.g_b_proj),
        )
    ]
    hooks.append(
        layer.o_proj.register_forward_pre_hook(
            lambda _, args: own.__setitem__("output", args[0])
        )
    )
    double.calls.clear()
    under_test.run(hidden(3), metadata)
    for hook in hooks:
        hook.remove()

    [(name, given)] = double.calls
    assert name == "run_kda_single_token"
    assert set(given) == {
        "mixed_qkv",
        "raw_g",
        "raw_beta",
        "z",
        "state_indices",
        "output",
        "lower_bound",
        "eps",
        "scale",
    }
    heads, dim = layer.local_num_heads, layer.head_dim
    for name in ("raw_g", "z", "output"):
        assert given[name].data_ptr() == own[name].data_ptr()
        assert given[name].stride() == (heads * dim, dim, 1)
    width = own["projected"].shape[1]
    beta = own["projected"][:, 3 * heads * dim : 3 * heads * dim + heads]
    assert given["raw_beta"].data_ptr() == beta.data_ptr()
    assert given["raw_beta"].stride() == (width, 1)
    indices = metadata.non_spec_state_indices_tensor
    assert given["state_indices"].data_ptr() == indices.data_ptr()
    assert given["state_indices"].shape == (3, 1)
    assert given["lower_bound"] == layer.kda_lower_bound
    assert given["eps"] == layer.o_norm.eps
    assert given["scale"] == dim**-0.5


def test_single_token_route_runs_no_copy_and_one_allocation():
    double = B12xDouble(single_token=True)
    under_test = layer_with(double)
    metadata = under_test.metadata(PLAIN)
    operators = Operators()
    with (
        mock.patch.object(double, "run_kda_single_token", lambda *_, **__: None),
        between_projections(under_test.layer, operators, {}),
    ):
        under_test.run(hidden(3), metadata)
    assert under_test.layer.last_call is Call.RUN_KDA_SINGLE_TOKEN
    # The output buffer, as in vLLM's own layer, and the convolution's output.
    assert operators.names == ["empty_like", "empty"]


def test_copy_counter_sees_a_clone():
    under_test = layer_with(B12xDouble(single_token=True))
    real = decode_kda.decode_step

    def cloning(*args):
        step = real(*args)
        return mock.Mock(wraps=step, **vars(step) | {"z": step.z.clone()})

    counted = []
    for patch in (real, cloning):
        counter = CopyCounter()
        with (
            mock.patch.object(decode_kda, "decode_step", patch),
            mock.patch.object(under_test.layer._decode, "run"),
            mock.patch.object(under_test.layer._decode, "refusal", return_value=None),
            between_projections(under_test.layer, counter, {}),
        ):
            under_test.run(hidden(3), under_test.metadata(PLAIN))
        counted.append(counter.bytes)
    z_bytes = 3 * 2 * 128 * 2
    assert counted == [0, z_bytes]


def test_live_packed_call_gets_live_tensors():
    double = B12xDouble()
    under_test = layer_with(double, num_spec=NUM_SPEC)
    metadata = under_test.metadata(VERIFY)
    double.calls.clear()
    under_test.run(hidden(VERIFY.num_tokens), metadata)
    [(_, given), (name, _)] = double.calls
    assert name == "run_kda"
    for mine, own in (
        ("state_indices", metadata.spec_state_indices_tensor),
        ("query_start_loc", metadata.spec_query_start_loc),
        ("num_accepted_tokens", metadata.num_accepted_tokens),
        ("recurrent_state", under_test.recurrent_state),
        ("norm_weight", under_test.layer.o_norm.weight),
        ("A_log", under_test.layer.A_log),
        ("dt_bias", under_test.layer.dt_bias),
    ):
        assert given[mine].data_ptr() == own.data_ptr(), mine
    assert int(given["num_tokens"]) == VERIFY.num_tokens
    assert int(given["num_seqs"]) == 3


def test_token_count_is_taken_once_per_step():
    under_test = layer_with(B12xDouble(), num_spec=NUM_SPEC)
    metadata = under_test.metadata(VERIFY)
    rows = torch.zeros(VERIFY.num_tokens, 1, 1)

    def step(layer_index):
        return decode_step(
            layer_index, BatchKind.PACKED, metadata, rows, rows, rows, rows, rows
        )

    first = _StepTokens.of(step(0))
    assert _StepTokens.of(step(3)) is first
    assert int(first) == VERIFY.num_tokens
    again = _StepTokens.of(step(0))
    assert again is not first, "another pass over the same metadata takes it anew"


def test_older_b12x_stages_through_one_set_of_buffers():
    layers = [layer_with(B12xDouble(live=False)) for _ in range(2)]
    first, second = (layer.layer._decode.packed._buffers for layer in layers)
    assert first["mixed_qkv"] is second["mixed_qkv"]
    live = layer_with(B12xDouble())
    assert not hasattr(live.layer._decode.packed, "_buffers")


# --- what a call does not take ----------------------------------------------------


def test_more_requests_than_capacity_go_to_vllm():
    double = B12xDouble(single_token=True)
    under_test = layer_with(double, max_num_seqs=2)
    double.calls.clear()
    under_test.run(hidden(3), under_test.metadata(PLAIN))
    assert under_test.layer.last_call is Call.VLLM and not double.calls


def test_c1_capacity_stays_within_the_grid():
    under_test = layer_with(B12xDouble(), num_heads=2, max_num_seqs=65_536)
    assert under_test.layer._decode.max_requests == 32_767


def attend(under_test, projected, raw_g, z, metadata):
    """Run what lies between the projections and ``o_proj`` on given tensors."""
    layer = under_test.layer
    mixed_qkv, raw_beta, *_ = projected.split(layer._projection_widths, dim=-1)
    output = torch.full_like(z, torch.nan)
    with (
        torch.inference_mode(),
        set_current_vllm_config(under_test.config),
        set_forward_context({layer.prefix: metadata}, under_test.config),
    ):
        layer._attend(mixed_qkv, raw_g, raw_beta, z, output)
    return output


def projections(layer, rows, pad=0, seed=11):
    """Projection rows as production has them: f_a and g_a hold NaN here."""
    heads, dim = layer.local_num_heads, layer.head_dim
    generator = torch.Generator().manual_seed(seed)
    live = 3 * heads * dim + heads
    width = live + 2 * dim + pad
    projected = torch.full((rows, width), torch.nan, dtype=torch.bfloat16)
    projected[:, :live] = torch.randn(rows, live, generator=generator)
    raw_g, z = torch.randn(2, rows, heads, dim, generator=generator).bfloat16()
    return projected[:, : live + 2 * dim], raw_g, z


@pytest.mark.parametrize("single_token", (False, True))
def test_c9_operands_at_an_odd_row(single_token):
    """With H = 4 and an odd row, raw_beta lies at an 8-byte aligned address."""
    double = B12xDouble(single_token=single_token)
    under_test = layer_with(double, num_heads=4)
    metadata = under_test.metadata(PLAIN)
    projected, raw_g, z = projections(under_test.layer, 4)
    aligned = [tensor[1:].clone() for tensor in (projected, raw_g, z)]
    wanted = attend(under_test, *aligned, metadata)
    wanted_pages = under_test.pages.clone()
    assert under_test.layer.last_call is not Call.VLLM
    reset(under_test)
    double.calls.clear()
    found = attend(under_test, projected[1:], raw_g[1:], z[1:], metadata)
    if single_token:
        assert under_test.layer.last_call is Call.RUN_KDA_SINGLE_TOKEN
        assert torch.equal(found, wanted)
        assert torch.equal(under_test.pages, wanted_pages)
    else:
        assert under_test.layer.last_call is Call.VLLM and not double.calls
        assert (found - wanted).abs().max() < 0.05


def test_c9_offset_query_start_loc_goes_to_vllm_before_a_state_is_touched():
    double = B12xDouble()
    under_test = layer_with(double, num_spec=NUM_SPEC)
    metadata = under_test.metadata(VERIFY)
    wanted = under_test.run(hidden(VERIFY.num_tokens), metadata)
    conv = under_test.conv_state.clone()
    assert under_test.layer.last_call is Call.RUN_KDA
    reset(under_test)
    starts = metadata.spec_query_start_loc
    metadata.spec_query_start_loc = torch.cat([starts[:1], starts])[1:]
    found = under_test.run(hidden(VERIFY.num_tokens), metadata)
    assert under_test.layer.last_call is Call.VLLM
    assert torch.equal(under_test.conv_state, conv)
    assert (found - wanted).abs().max() < 0.05


def test_c9_state_indices_may_lie_at_any_address():
    under_test = layer_with(B12xDouble(single_token=True))
    metadata = under_test.metadata(PLAIN)
    wanted = under_test.run(hidden(3), metadata)
    reset(under_test)
    indices = metadata.non_spec_state_indices_tensor
    metadata.non_spec_state_indices_tensor = torch.cat([indices[:1], indices])[1:]
    assert torch.equal(under_test.run(hidden(3), metadata), wanted)
    assert under_test.layer.last_call is Call.RUN_KDA_SINGLE_TOKEN


@pytest.mark.parametrize("rows", (1, 5))
def test_c4_strided_indices_are_forwarded_as_a_view(rows):
    double = B12xDouble(single_token=True)
    under_test = layer_with(double, num_spec=NUM_SPEC)
    table = [[4 * r + c + 1 for c in range(4)] for r in range(rows)]
    before = under_test.recurrent_state.clone()
    metadata = under_test.metadata(Batch([1] * rows, table))
    assert metadata.non_spec_state_indices_tensor.stride() == (4,)
    double.calls.clear()
    under_test.run(hidden(rows), metadata)
    given = double.calls[0][1]["state_indices"]
    assert given.data_ptr() == metadata.non_spec_state_indices_tensor.data_ptr()
    # torch calls a one-row view contiguous whatever its stride.
    wanted = Call.RUN_KDA if rows > 1 else Call.RUN_KDA_SINGLE_TOKEN
    assert under_test.layer.last_call is wanted
    changed = (under_test.recurrent_state != before).flatten(1).any(1)
    assert changed.nonzero().flatten().tolist() == [row[0] for row in table]


def test_c4_int64_indices():
    under_test = layer_with(B12xDouble(single_token=True))
    metadata = under_test.metadata(PLAIN)
    wanted = under_test.run(hidden(3), metadata)
    reset(under_test)
    metadata.non_spec_state_indices_tensor = (
        metadata.non_spec_state_indices_tensor.long()
    )
    assert torch.equal(under_test.run(hidden(3), metadata), wanted)
    assert under_test.layer.last_call is Call.RUN_KDA_SINGLE_TOKEN


# --- null rows, padding, tails ----------------------------------------------------


def test_c5_null_is_zero_and_nothing_else():
    double = B12xDouble(single_token=True)
    under_test = layer_with(double)
    assert double.calls[0][0] == "bind_kda"
    caps = under_test.layer._decode.caps(SLOTS)
    assert caps.null_state_index == 0


@pytest.mark.parametrize(
    "double",
    (
        B12xDouble(single_token=True),
        B12xDouble(),
        B12xDouble(live=False),
    ),
    ids=("single-token", "live", "staged"),
)
def test_null_rows_are_zero_and_touch_nothing(double):
    under_test = layer_with(double)
    layer = under_test.layer
    before = under_test.pages.clone()
    batch = Batch([1, 1, 1], [[0], [3], [0]], padded_tokens=4, padded_requests=4)
    output = attend(under_test, *projections(layer, 4), under_test.metadata(batch))
    assert layer.last_call is not Call.VLLM
    assert output[1].any() and output.isfinite().all()
    assert not output[[0, 2, 3]].any()
    untouched = [slot for slot in range(SLOTS) if slot != 3]
    assert torch.equal(under_test.pages[untouched], before[untouched])


@pytest.mark.parametrize("metadata", (None, "other layer"))
def test_c6_without_metadata_the_output_is_zero(metadata):
    under_test = layer_with(B12xDouble(single_token=True))
    before = under_test.pages.clone()
    if metadata is None:
        output = under_test.run(hidden(8), None)
    else:
        prefix, under_test.layer.prefix = under_test.layer.prefix, "elsewhere"
        with (
            torch.inference_mode(),
            set_forward_context({prefix: object()}, under_test.config),
        ):
            output = under_test.layer(hidden(8), torch.zeros(8))
    assert not output.any()
    assert torch.equal(under_test.pages, before)


@pytest.mark.parametrize("backend", ("triton", "b12x"))
def test_c6_rows_past_the_actual_tokens_are_zero(backend):
    double = B12xDouble(single_token=True) if backend == "b12x" else None
    under_test = layer_with(double, backend=backend)
    batch = Batch([1] * 5, [[s] for s in (3, 9, 5, 7, 8)])
    output = attend(
        under_test, *projections(under_test.layer, 8), under_test.metadata(batch)
    )
    assert output.isfinite().all()
    assert not output[5:].any() and output[:5].any()


def test_c6_no_rows():
    double = B12xDouble(single_token=True)
    under_test = layer_with(double)
    metadata = under_test.metadata(PLAIN)
    metadata.num_actual_tokens = 0
    double.calls.clear()
    assert under_test.run(hidden(0), metadata).shape == (0, HIDDEN)
    assert not double.calls


@pytest.mark.parametrize("lens", ([1, 1, 0], [1, 0, 1]))
def test_c13_each_live_row_among_empty_ones_gets_its_own_state(lens):
    under_test = layer_with(B12xDouble(single_token=True))
    table = [[3], [9], [5]]
    metadata = under_test.metadata(Batch(lens, table))
    before = under_test.recurrent_state.clone()
    attend(under_test, *projections(under_test.layer, 2), metadata)
    assert under_test.layer.last_call is Call.RUN_KDA
    changed = (under_test.recurrent_state != before).flatten(1).any(1)
    live = [slot for (slot,), length in zip(table, lens, strict=True) if length]
    assert changed.nonzero().flatten().tolist() == sorted(live)


def test_c12_draft_rows_behind_others_go_to_vllm_in_token_order():
    """vLLM picks the tokens of either kind from the step's own by these indices."""
    under_test = layer_with(B12xDouble(single_token=True), num_spec=3)
    [batch] = [s.batch for s in SCENARIOS if s.name == "verify behind other rows"]
    assert batch.query_lens == [1, 4, 6, 4] and batch.drafts == [-1, 3, -1, 3]
    metadata = under_test.metadata(batch)
    assert metadata.spec_token_indx.tolist() == [1, 2, 3, 4, 11, 12, 13, 14]
    assert metadata.non_spec_token_indx.tolist() == [0, 5, 6, 7, 8, 9, 10]
    assert metadata.spec_state_indices_tensor.tolist() == batch.slots[1::2]
    assert metadata.non_spec_state_indices_tensor.tolist() == [1, 9]
    layer, taken = under_test.layer, {}
    layer._forward = lambda **tensors: taken.update(tensors)
    projected, raw_g, z = projections(layer, batch.num_tokens)
    attend(under_test, projected, raw_g, z, metadata)
    assert layer.last_call is Call.VLLM
    assert torch.equal(taken["qkv_proj_states"], projected[:, : 6 * layer.head_dim])
    assert torch.equal(taken["g1"][0], raw_g)
    assert taken["core_attn_out"].shape[1] == batch.num_tokens


@ON_EACH_BACKEND
def test_c14_slots_are_those_of_the_steps_own_block(double, backend):
    """Align mode: a request moves to its next block as it grows past the last."""
    under_test = layer_with(double, backend=backend)
    builder = under_test.builder
    builder.kv_cache_spec = replace(builder.kv_cache_spec, block_size=7_168)
    under_test.config.cache_config.mamba_cache_mode = "align"
    for computed, slot in ((14_335, 5), (14_336, 9), (14_337, 9)):
        batch = Batch([1], [[3, 5, 9]], computed=[computed])
        before = under_test.recurrent_state.clone()
        under_test.run(hidden(1), under_test.metadata(batch))
        changed = (under_test.recurrent_state != before).flatten(1).any(1)
        assert changed.nonzero().flatten().tolist() == [slot]


@pytest.mark.parametrize("rows", (1, 7))
def test_c10_live_views_of_a_padded_projection(rows):
    double = B12xDouble(single_token=True)
    under_test = layer_with(double)
    batch = Batch([1] * rows, [[slot + 1] for slot in range(rows)])
    metadata = under_test.metadata(batch)
    dense, raw_g, z = projections(under_test.layer, rows)
    wanted = attend(under_test, dense.contiguous(), raw_g, z, metadata)
    reset(under_test)
    padded, _, _ = projections(under_test.layer, rows, pad=64)
    before = padded.clone()
    found = attend(under_test, padded, raw_g, z, metadata)
    assert under_test.layer.last_call is Call.RUN_KDA_SINGLE_TOKEN
    assert torch.equal(found, wanted)
    assert torch.equal(padded.view(torch.int16), before.view(torch.int16))


def test_c10_a_call_that_raises_is_not_followed_by_another():
    """The window has been shifted by then: a second route would shift it again."""
    double = B12xDouble(single_token=True)
    under_test = layer_with(double)
    double.run_kda_single_token = mock.Mock(side_effect=RuntimeError("first use"))
    metadata = under_test.metadata(PLAIN)
    with (
        mock.patch.object(Glm5NextLinearAttention, "_forward") as vllm_route,
        pytest.raises(RuntimeError, match="first use"),
    ):
        under_test.run(hidden(3), metadata)
    vllm_route.assert_not_called()


@pytest.mark.parametrize("route", routes(CPU, "all"), ids=lambda route: route.name)
@pytest.mark.parametrize("num_spec", (0, NUM_SPEC))
def test_c7_conv_state_layouts_agree(route, num_spec):
    """With drafts configured a plain step keeps to the first three columns."""
    results = []
    for layout in ("SD", "DS"):
        under_test = build_layer(
            LayerOptions(num_spec=num_spec, backend=route.backend, conv_layout=layout),
            num_slots=SLOTS,
            b12x=route.features() if route.features else None,
        )
        generator = torch.Generator().manual_seed(1)
        logical = torch.randn(under_test.conv_state.shape, generator=generator)
        under_test.conv_state.copy_(logical)
        slots = [[4 * r + c + 1 for c in range(num_spec + 1)] for r in range(3)]
        output = under_test.run(hidden(3), under_test.metadata(Batch([1, 1, 1], slots)))
        after = under_test.conv_state
        assert torch.equal(after[..., 3:], logical[..., 3:].bfloat16())
        assert torch.equal(after[1, :, :2], logical[1, :, 1:3].bfloat16())
        assert under_test.layer._conv_state_dim_first == (layout == "DS")
        results.append((output, after, under_test.recurrent_state))
    for sd, ds in zip(*results, strict=True):
        assert torch.equal(sd, ds)


# --- prefill ----------------------------------------------------------------------


def test_prefill_reaches_vllms_method_with_the_original_tensors():
    double = B12xDouble(single_token=True)
    under_test = layer_with(double)
    layer = under_test.layer
    batch = Batch([5, 3], [[3], [9]], computed=[0, 0], prefilling=[True, True])
    metadata = under_test.metadata(batch)
    projected, raw_g, z = projections(layer, 10)
    norm_inputs = []
    given = {}
    norm = layer.o_norm.register_forward_hook(
        lambda _, args, __: norm_inputs.append(args)
    )
    double.calls.clear()

    def fake_prefill(self, **tensors):
        given.update(tensors)
        tensors["core_attn_out"][:, : batch.num_tokens] = 1.0

    with mock.patch.object(Glm5NextLinearAttention, "_forward", fake_prefill):
        output = attend(under_test, projected, raw_g, z, metadata)
    norm.remove()
    assert not double.calls
    heads, dim = layer.local_num_heads, layer.head_dim
    assert given["qkv_proj_states"].data_ptr() == projected.data_ptr()
    assert given["qkv_proj_states"].stride() == (projected.stride(0), 1)
    assert given["g1"].data_ptr() == raw_g.data_ptr()
    assert given["g1"].shape == (1, 10, heads, dim)
    beta = projected[:, 3 * heads * dim :]
    assert given["beta"].data_ptr() == beta.data_ptr()
    assert given["core_attn_out"].data_ptr() == output.data_ptr()
    [(normed, gate)] = norm_inputs
    assert normed.data_ptr() == output.data_ptr()
    assert gate.data_ptr() == z.data_ptr() and gate.shape[0] == batch.num_tokens


def test_decomposed_norm_also_ends_in_the_callers_buffer():
    """custom_ops can select the form that returns a new tensor."""
    under_test = layer_with(backend="triton")
    metadata = under_test.metadata(PLAIN)
    wanted = under_test.run(hidden(3), metadata)
    reset(under_test)
    norm = under_test.layer.o_norm
    with mock.patch.object(norm, "_forward_method", norm.forward_native):
        found = under_test.run(hidden(3), metadata)
    assert found.any() and (found - wanted).abs().max() < 0.05


# --- rebinding and reloading ------------------------------------------------------


@pytest.mark.parametrize("live", (True, False))
def test_caches_can_be_bound_again(live):
    under_test = layer_with(B12xDouble(live=live, single_token=True))
    wanted = under_test.run(hidden(3), under_test.metadata(PLAIN))
    old_pages = under_test.pages.clone()
    pages = make_pages(under_test.layer, SLOTS + 8, CPU, 0)
    pages[:SLOTS] = make_pages(under_test.layer, SLOTS, CPU, 0)
    fresh, under_test.pages = under_test.pages, pages
    under_test.layer.bind_kv_cache(pages)
    found = under_test.run(hidden(3), under_test.metadata(PLAIN))
    assert torch.equal(found, wanted)
    assert torch.equal(fresh, old_pages), "the caches bound before stay as they were"


@ON_EACH_BACKEND
def test_reloaded_conv_weights_take_effect(double, backend):
    """vLLM's own layer keeps the convolution weights that it merged first."""
    under_test = layer_with(double, backend=backend)
    metadata = under_test.metadata(PLAIN)
    under_test.run(hidden(3), metadata)
    generator = torch.Generator().manual_seed(8)
    loaded = {}
    for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
        weight = getattr(under_test.layer, name).weight
        loaded[name] = torch.randn(weight.shape, generator=generator)
        weight.weight_loader(weight, loaded[name])
    reset(under_test)
    found = under_test.run(hidden(3), metadata)
    fresh = layer_with(double, backend=backend)
    for name, value in loaded.items():
        getattr(fresh.layer, name).weight.data.copy_(value)
    reset(fresh)
    fresh.layer.bind_kv_cache(fresh.pages)
    assert torch.equal(found, fresh.run(hidden(3), fresh.metadata(PLAIN)))


@ON_EACH_BACKEND
def test_vllms_layerwise_reload(double, backend, caplog_vllm):
    """vLLM moves a layer's tensors to the meta device, loads, and copies back."""
    under_test = layer_with(double, backend=backend)
    layer = under_test.layer
    metadata = under_test.metadata(PLAIN)
    addresses = {n: t.data_ptr() for n, t in layer.state_dict().items()}
    generator = torch.Generator().manual_seed(9)
    weights = {
        name: torch.randn(parameter.shape, generator=generator) * 0.1
        for name, parameter in layer.named_parameters()
    }
    layerwise_reload(under_test, weights)
    assert {n: t.data_ptr() for n, t in layer.state_dict().items()} == addresses
    assert "Failed to load" not in caplog_vllm.text
    found = under_test.run(hidden(3), metadata)

    fresh = layer_with(double, backend=backend)
    fresh.layer.load_state_dict(layer.state_dict())
    fresh.layer.bind_kv_cache(fresh.pages)
    assert torch.equal(found, fresh.run(hidden(3), fresh.metadata(PLAIN)))
    assert torch.equal(under_test.pages, fresh.pages)


def layerwise_reload(under_test, weights):
    """Load ``weights``, by parameter, through vLLM's own reload."""
    layer = under_test.layer
    record_metadata_for_reloading(layer)
    initialize_layerwise_reload(layer)
    for name, parameter in list(layer.named_parameters()):
        if "in_proj" in name:
            for shard, rows in enumerate(weights[name].split(layer_shards(layer))):
                parameter.weight_loader(parameter, rows, shard)
        else:
            parameter.weight_loader(parameter, weights[name])
    finalize_layerwise_reload(layer, under_test.config.model_config)


def layer_shards(layer):
    part = layer.local_projection_size
    return [part, part, part, layer.local_num_heads, layer.head_dim, layer.head_dim]


def tensors():
    return {id(x): x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)}


@pytest.mark.parametrize(
    ("double", "backend"),
    (
        (None, "triton"),
        (B12xDouble(), "b12x"),
        (B12xDouble(live=False), "b12x"),
        (NO_B12X, None),
    ),
    ids=("triton", "b12x live", "b12x staged", "one_launch"),
)
def test_sleep_at_level_2_loses_nothing(double, backend, monkeypatch):
    """vLLM drops all memory that was taken while the model was built.

    It saves the buffers and has the weights loaded again.
    """
    # On many, the one-launch kernel counts the programs that share a head.
    monkeypatch.setattr(kda_single_token, "_num_sms", lambda device: 132)
    made = []
    build = Glm5NextDecodeLinearAttention.__init__

    def watched(*args, **kwargs):
        before = tensors()
        build(*args, **kwargs)
        made.extend(x for key, x in tensors().items() if key not in before)

    with mock.patch.object(Glm5NextDecodeLinearAttention, "__init__", watched):
        under_test = layer_with(double, backend=backend)
    layer = under_test.layer
    wanted = under_test.run(hidden(3), under_test.metadata(PLAIN))
    states = under_test.pages.clone()

    buffers = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    weights = {name: weight.clone() for name, weight in layer.named_parameters()}
    assert {id(weight) for weight in layer.parameters()} <= {id(x) for x in made}
    for tensor in made:
        tensor.untyped_storage().fill_(255)
    for name, buffer in layer.named_buffers():
        buffer.copy_(buffers[name])
    layerwise_reload(under_test, weights)

    reset(under_test)
    found = under_test.run(hidden(3), under_test.metadata(PLAIN))
    assert torch.equal(found, wanted)
    assert torch.equal(under_test.pages, states)


@ON_EACH_BACKEND
def test_conv_weights_written_past_their_loaders_take_effect(double, backend):
    """vLLM's reload of weights in kernel format copies into the parameters."""
    under_test = layer_with(double, backend=backend)
    layer = under_test.layer
    first = Batch([1], [[5]], computed=[0], prefilling=[True])
    with torch.inference_mode():
        for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
            weight = getattr(layer, name).weight
            weight.copy_(torch.full_like(weight, 0.25))
    with mock.patch.object(Glm5NextLinearAttention, "_forward"):
        under_test.run(hidden(1), under_test.metadata(first))
    found = under_test.run(hidden(3), under_test.metadata(PLAIN))

    fresh = layer_with(double, backend=backend)
    fresh.layer.load_state_dict(layer.state_dict())
    fresh.layer.bind_kv_cache(fresh.pages)
    assert torch.equal(found, fresh.run(hidden(3), fresh.metadata(PLAIN)))


@ON_EACH_BACKEND
def test_every_parameter_is_contiguous(double, backend):
    """Sharded checkpoints view a parameter flat, at loading and at saving."""
    state = layer_with(double, backend=backend).layer.state_dict()
    assert all(tensor.is_contiguous() for tensor in state.values())


@ON_EACH_BACKEND
def test_offloaded_weights_go_to_vllms_path(double, backend):
    """An offloader gives each parameter new storage, before weights are loaded."""
    stock = build_layer(LayerOptions(backend="triton"), num_slots=SLOTS, stock=True)
    options = LayerOptions(backend=None if backend == "b12x" else backend)

    def offload(layer, seed):
        for parameter in layer.parameters():
            parameter.data = torch.full_like(parameter.data, torch.nan)
        fill_weights(layer, seed)

    with mock.patch.object(layer_module, "fill_weights", offload):
        under_test = build_layer(
            options,
            num_slots=SLOTS,
            b12x=None if double is None else double.features(),
        )
    # vLLM binds a temporary cache before the real one, and may bind again later.
    under_test.layer.bind_kv_cache(under_test.pages)
    found = under_test.run(hidden(3), under_test.metadata(PLAIN))
    assert under_test.layer.last_call is Call.VLLM
    assert torch.equal(found, stock.run(hidden(3), stock.metadata(PLAIN)))
    under_test.layer.bind_kv_cache(under_test.pages)
    assert under_test.run(hidden(3), under_test.metadata(PLAIN)).isfinite().all()


def test_offloaded_weights_refuse_an_explicit_backend():
    def offload(layer, seed):
        for parameter in layer.parameters():
            parameter.data = parameter.data.clone()

    with (
        mock.patch.object(layer_module, "fill_weights", offload),
        pytest.raises(RuntimeError, match="weight offload"),
    ):
        layer_with(B12xDouble(), backend="b12x")


@pytest.mark.parametrize(
    ("double", "backend"),
    (
        (None, "triton"),
        (NO_B12X, None),
        (B12xDouble(single_token=True), None),
        (B12xDouble(live=False), None),
    ),
    ids=("triton", "one_launch", "live", "staged"),
)
def test_a_cache_that_vllm_takes_back_is_let_go(double, backend):
    """vLLM profiles on a temporary cache, and frees it before it makes the real one."""
    under_test = layer_with(double, backend=backend)
    memory = np.zeros(under_test.pages.numel(), dtype=np.int8)
    alive = weakref.ref(memory)
    under_test.layer.bind_kv_cache(torch.from_numpy(memory).view_as(under_test.pages))
    del memory
    if isinstance(double, B12xDouble):
        double.calls.clear()
    assert alive() is not None
    under_test.layer.kv_cache = []
    gc.collect()
    assert alive() is None
    reset(under_test)
    under_test.layer.bind_kv_cache(under_test.pages)
    assert under_test.run(hidden(3), under_test.metadata(PLAIN)).any()


def test_single_token_call_is_warmed_for_the_capture_sizes():
    double = B12xDouble(single_token=True)
    under_test = layer_with(double, capture_sizes=(1, 2, 4, 32), max_num_seqs=4)
    warmed = [c["mixed_qkv"].shape[0] for n, c in double.calls if "single" in n]
    assert warmed == [1, 2, 4]
    assert torch.equal(under_test.pages, make_pages(under_test.layer, SLOTS, CPU, 0))
