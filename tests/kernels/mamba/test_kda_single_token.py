# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The one-launch KDA decode op against float64 and against vLLM's own kernels.

Operands are shaped as the layer has them: column slices of one merged projection
whose other columns are NaN, caches with an odd slot stride, a padded output. vLLM's
convolution, recurrence and gated norm run on clones of the same caches, in
Triton's interpreter here and as compiled kernels in the tests marked ``gpu``.
"""

from collections.abc import Iterator
from functools import cache

import pytest
import torch

from vllm.model_executor.layers.mamba.ops import kda_single_token as op
from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update
from vllm.models.glm5next.nvidia.ops.third_party.kda import fused_recurrent_kda
from vllm.third_party.flash_linear_attention.ops.kda import rms_norm_gated
from vllm.triton_utils import triton

D = 128
CONSTANTS = {"lower_bound": -5.0, "eps": 1e-5}
# Of output and state, relative. The interpreter truncates to bf16 where a GPU
# rounds, so there q, k, v and the output may each be one bf16 step off.
TOLERANCE = 5e-3 if torch.cuda.is_available() else 1e-2


def make_case(
    n: int,
    heads: int,
    *,
    indices: torch.Tensor | None = None,
    slots: int | None = None,
    dim_first: bool = False,
    num_spec: int = 0,
    state_dtype: torch.dtype = torch.float32,
    tail: int = 0,
    row_padding: int = 0,
    device: str = "cpu",
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Operands of ``kda_single_token`` for n rows, in its own argument names."""
    generator = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    channels = 3 * heads * D
    slots = slots or n + 2
    projection = randn(n, channels + heads + 2 * D + row_padding).bfloat16()
    projection[:, channels + heads :] = float("nan")
    conv_shape = (slots, 3 + num_spec, channels)
    conv = randn(*conv_shape).bfloat16().transpose(1, 2)
    state_size = heads * D * D
    page = randn(slots, state_size + 256).mul_(0.3).to(state_dtype)
    if indices is None:
        order = torch.randperm(slots - 1, generator=generator, device=device)
        indices = (order[:n] + 1).int()
    return {
        "mixed_qkv": projection[:, :channels],
        "conv_state": conv.contiguous() if dim_first else conv,
        "conv_weight": randn(4, channels).mul_(0.5).t(),
        "raw_g": randn(n, heads, D).bfloat16(),
        "raw_beta": projection[:, channels : channels + heads],
        "z": randn(n, heads, D).bfloat16(),
        "A_log": randn(1, 1, heads, 1).mul_(0.5),
        "dt_bias": randn(heads * D).mul_(0.5),
        "norm_weight": (1 + 0.1 * randn(D)).bfloat16(),
        "recurrent_state": page[:, :state_size].unflatten(1, (heads, D, D)),
        "state_indices": indices.to(device),
        "output": torch.full(
            (n + tail, heads, D), float("nan"), dtype=torch.bfloat16, device=device
        ),
    }


def with_own_caches(case: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The case with its written tensors cloned, strides and all."""
    clones = {}
    for name in ("conv_state", "recurrent_state", "output"):
        tensor = case[name]
        clones[name] = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        ).copy_(tensor)
    return case | clones


@cache
def counters(device: torch.device) -> torch.Tensor:
    return op.arrival_counters(device)


def run_ours(case: dict[str, torch.Tensor], **constants: float) -> None:
    """The op over the case's caches and output."""
    arrivals = {"arrivals": counters(case["output"].device)}
    op.kda_single_token(**arrivals | case, **constants or CONSTANTS)


def run_vllm(case: dict[str, torch.Tensor]) -> None:
    """vLLM's three launches over the case's caches and output."""
    x, heads = case["mixed_qkv"], case["raw_g"].shape[1]
    n, output = x.shape[0], case["output"]
    qkv = causal_conv1d_update(
        x,
        case["conv_state"],
        case["conv_weight"],
        activation="silu",
        conv_state_indices=case["state_indices"],
        out=torch.empty(x.shape, dtype=x.dtype, device=x.device),
    )
    q, k, v = (t.reshape(1, n, heads, D) for t in qkv.split(heads * D, dim=-1))
    output.zero_()
    fused_recurrent_kda(
        q=q,
        k=k,
        v=v,
        g=case["raw_g"][None],
        beta=case["raw_beta"][None],
        initial_state=case["recurrent_state"],
        cu_seqlens=torch.arange(n + 1, dtype=torch.int32, device=x.device),
        ssm_state_indices=case["state_indices"],
        out=output[None, :n],
        sigmoid_beta=True,
        a_log=case["A_log"],
        g_bias=case["dt_bias"],
        compute_gate=True,
        lower_bound=CONSTANTS["lower_bound"],
    )
    rms_norm_gated(
        output[:n],
        case["z"],
        case["norm_weight"],
        None,
        activation="sigmoid",
        eps=CONSTANTS["eps"],
    )


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.double() - wanted).norm() / wanted.norm()).item()


def check_against_both(case: dict[str, torch.Tensor]) -> None:
    """Run the op and compare output and both states with float64 and vLLM."""
    ours, theirs = with_own_caches(case), with_own_caches(case)
    expected, conv, state = op.reference_kda_single_token(**case, **CONSTANTS)
    run_ours(ours)
    run_vllm(theirs)
    assert relative_error(ours["output"], expected) < TOLERANCE
    assert relative_error(ours["recurrent_state"], state) < TOLERANCE
    assert torch.equal(ours["conv_state"], conv)
    n = case["raw_g"].shape[0]
    dead = torch.ones(len(case["output"]), dtype=torch.bool)
    dead[:n] = case["state_indices"].cpu() <= 0
    assert not ours["output"][dead].any()  # nor NaN, which is true
    assert torch.equal(ours["conv_state"], theirs["conv_state"])
    assert torch.equal(ours["recurrent_state"], theirs["recurrent_state"])


# Without a GPU there is nothing to prefetch, so two variants are the same there.
VARIANTS = [v for v in op._VARIANTS if torch.cuda.is_available() or v != op._WHOLE]


@pytest.fixture(params=VARIANTS, ids=lambda v: "-".join(map(str, v)))
def variant(request, monkeypatch) -> Iterator[op._Variant]:
    monkeypatch.setattr(op, "_select_variant", lambda units, num_sms: request.param)
    # The table keeps heads that are shared to fewer; here every batch has to share.
    monkeypatch.setattr(op, "_MAX_SHARED_HEADS", 1024)
    counters.cache_clear()
    yield request.param
    counters.cache_clear()


def forbid_launch(monkeypatch) -> None:
    def launched(*args, **kwargs):
        raise AssertionError("launched")

    monkeypatch.setattr(op, "_launch", launched)


# --------------------------------------------------------------------------- #
# Numbers
# --------------------------------------------------------------------------- #


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_every_variant_matches_reference_and_vllm(variant, state_dtype):
    indices = torch.tensor([2, 0, 4], dtype=torch.int32)
    check_against_both(
        make_case(3, 2, indices=indices, slots=5, state_dtype=state_dtype, tail=2)
    )


@pytest.mark.parametrize("heads", [1, 4, 8])
def test_head_splits(heads):
    check_against_both(make_case(1, heads))


def test_gate_speed_belongs_to_its_head():
    case = make_case(1, 2, seed=3)
    swapped = case | {"A_log": case["A_log"].flip(2).contiguous()}
    plain, other = with_own_caches(case), with_own_caches(swapped)
    run_ours(plain)
    check_against_both(swapped)
    run_ours(other)
    assert not torch.equal(plain["recurrent_state"], other["recurrent_state"])


def test_scale_and_bf16_weights_reach_the_numbers():
    case = make_case(1, 1)
    case["conv_weight"] = case["conv_weight"].bfloat16()
    case["norm_weight"] = case["norm_weight"].float()
    ours = with_own_caches(case)
    # Through the norm the scale shows only beside eps.
    constants = {"lower_bound": -3.0, "eps": 0.5, "scale": 2.0}
    expected, _, state = op.reference_kda_single_token(**case, **constants)
    run_ours(ours, **constants)
    assert relative_error(ours["output"], expected) < TOLERANCE
    assert relative_error(ours["recurrent_state"], state) < TOLERANCE


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gate", [-60.0, 60.0], ids=["open", "closed"])
def test_steps_in_a_row_stay_with_vllm(gate, state_dtype):
    case = make_case(1, 1, state_dtype=state_dtype)
    case["raw_g"].fill_(gate)
    ours, theirs = with_own_caches(case), with_own_caches(case)
    for step in range(6):
        live = make_case(1, 1, seed=step)
        step_inputs = {"mixed_qkv": live["mixed_qkv"], "z": live["z"]}
        run_ours(ours | step_inputs)
        run_vllm(theirs | step_inputs)
        assert ours["output"].isfinite().all()
        assert torch.equal(ours["recurrent_state"], theirs["recurrent_state"])
        assert torch.equal(ours["conv_state"], theirs["conv_state"])


def test_packed_reference_follows_vllm_speculation():
    """Two requests verify drafts; the second resumes two accepted tokens on."""
    heads, columns = 1, 4
    case = make_case(7, heads, slots=9, num_spec=columns - 1)
    table = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]], dtype=torch.int32)
    starts = torch.tensor([0, 4, 7], dtype=torch.int32)
    accepted = torch.tensor([1, 3], dtype=torch.int32)
    theirs = with_own_caches(case)
    inputs = {k: v for k, v in case.items() if k not in ("output", "state_indices")}
    expected, conv, state = op.reference_kda_decode(
        **inputs,
        state_indices=table,
        query_start_loc=starts,
        num_accepted_tokens=accepted,
        **CONSTANTS,
    )
    qkv = causal_conv1d_update(
        case["mixed_qkv"],
        theirs["conv_state"],
        case["conv_weight"],
        activation="silu",
        conv_state_indices=table[:, 0],
        num_accepted_tokens=accepted,
        query_start_loc=starts,
        max_query_len=columns,
        out=torch.empty(7, 3 * heads * D, dtype=torch.bfloat16),
    )
    q, k, v = (t.reshape(1, 7, heads, D) for t in qkv.split(heads * D, dim=-1))
    fused_recurrent_kda(
        q=q,
        k=k,
        v=v,
        g=case["raw_g"][None],
        beta=case["raw_beta"][None],
        initial_state=theirs["recurrent_state"],
        cu_seqlens=starts,
        ssm_state_indices=table,
        num_accepted_tokens=accepted,
        out=theirs["output"][None],
        sigmoid_beta=True,
        a_log=case["A_log"],
        g_bias=case["dt_bias"],
        compute_gate=True,
        lower_bound=CONSTANTS["lower_bound"],
    )
    norm = (case["z"], case["norm_weight"], None)
    rms_norm_gated(theirs["output"], *norm, activation="sigmoid", eps=1e-5)
    assert torch.equal(conv, theirs["conv_state"])
    assert relative_error(theirs["recurrent_state"], state) < TOLERANCE
    assert relative_error(theirs["output"], expected) < TOLERANCE


@pytest.mark.parametrize("count", [0, 5])
def test_packed_reference_refuses_impossible_accepted_counts(count):
    case = make_case(1, 1, num_spec=3)
    del case["output"]
    case["state_indices"] = torch.tensor([[1, 2, 1, 2]])
    with pytest.raises(ValueError, match=rf"\[0\] is {count}, .* 1\.\.4"):
        op.reference_kda_decode(
            **case,
            query_start_loc=torch.tensor([0, 1]),
            num_accepted_tokens=torch.tensor([count]),
            **CONSTANTS,
        )


# --------------------------------------------------------------------------- #
# Slots and layouts
# --------------------------------------------------------------------------- #


def test_only_live_slots_change(variant):
    indices = torch.tensor([0, 3, -1, 5], dtype=torch.int32)
    case = make_case(4, 1, indices=indices, slots=7)
    fill = torch.arange(1.0, 8.0)
    case["recurrent_state"].copy_(fill[:, None, None, None].expand(7, 1, D, D))
    case["conv_state"].copy_(fill[:, None, None].expand(7, 3 * D, 3))
    ours = with_own_caches(case)
    run_ours(ours)
    for name in ("recurrent_state", "conv_state"):
        same = (ours[name] == case[name]).flatten(1).all(dim=1)
        assert same.tolist() == [True, True, True, False, True, False, True], name
    zero = ~ours["output"].flatten(1).any(dim=1)
    assert zero.tolist() == [True, False, True, False]


@pytest.mark.parametrize("n", [5, 1])
@pytest.mark.parametrize("kind", ["column", "offset", "int64", "int64 column"])
def test_indices_of_any_stride_dtype_and_alignment(n, kind):
    dtype = torch.int64 if "int64" in kind else torch.int32
    table = torch.arange(1, 21).reshape(4, 5).t().contiguous().to(dtype)  # 5 x 4
    if "column" in kind:
        indices = table[:n, 0]
        assert indices.stride() == (4,)
    elif kind == "offset":
        indices = torch.cat([table[:1, 3], table[:n, 0]])[1:]
        assert indices.data_ptr() % 8 == 4
    else:
        indices = table[:n, 0].contiguous()
    case = make_case(n, 1, indices=indices, slots=21)
    ours, plain = with_own_caches(case), with_own_caches(case)
    run_ours(ours)
    plain["state_indices"] = indices.int().contiguous()
    run_vllm(plain)
    # Also the slots of columns 1 to 3, which nothing may touch.
    assert torch.equal(ours["recurrent_state"], plain["recurrent_state"])
    assert torch.equal(ours["conv_state"], plain["conv_state"])
    assert relative_error(ours["output"], plain["output"].double()) < TOLERANCE


def test_conv_layouts_agree_and_columns_past_the_third_stay(variant):
    channels_last = make_case(2, 1, num_spec=3)
    dim_first = make_case(2, 1, num_spec=3, dim_first=True)
    before = channels_last["conv_state"].clone()
    assert channels_last["conv_state"].stride(1) == 1
    assert dim_first["conv_state"].stride(2) == 1
    run_ours(channels_last)
    run_ours(dim_first)
    for name in ("output", "conv_state", "recurrent_state"):
        assert torch.equal(channels_last[name], dim_first[name]), name
    assert torch.equal(channels_last["conv_state"][:, :, 3:], before[:, :, 3:])
    slot = channels_last["state_indices"][0]
    window = channels_last["conv_state"][slot]
    assert torch.equal(window[:, :2], before[slot, :, 1:3])
    assert torch.equal(window[:, 2], channels_last["mixed_qkv"][0])


@pytest.mark.parametrize("n", [1, 7])
def test_projection_views_are_read_in_place(n):
    case = make_case(n, 2, row_padding=37)  # rows on 2-byte boundaries
    projection = case["mixed_qkv"].as_strided(
        (n, case["mixed_qkv"].stride(0)), (case["mixed_qkv"].stride(0), 1)
    )
    assert projection.isnan().any()
    before = projection.clone()
    check_against_both(case)
    assert torch.equal(projection.view(torch.int16), before.view(torch.int16))


def test_rows_on_eight_bytes_match_contiguous_rows():
    case = make_case(4, 4)
    odd = {k: case[k][1:] for k in ("mixed_qkv", "raw_g", "raw_beta", "z")}
    odd |= {"state_indices": case["state_indices"][1:], "output": case["output"][1:]}
    assert odd["mixed_qkv"].data_ptr() % 16 == 8
    copied = {k: v.clone() for k, v in odd.items()}
    ours, plain = with_own_caches(case | odd), with_own_caches(case | copied)
    run_ours(ours)
    run_ours(plain)
    assert torch.equal(ours["output"], plain["output"])
    assert torch.equal(ours["recurrent_state"], plain["recurrent_state"])


def test_slot_offsets_past_two_to_the_31():
    """Pages a gigabyte of elements apart; only the touched ones become real."""
    case = make_case(1, 1, indices=torch.tensor([3], dtype=torch.int32), slots=4)
    stride, ours = 2**30 + 2**14, with_own_caches(case)
    for name in ("recurrent_state", "conv_state"):
        small = case[name]
        pages = torch.empty(3 * stride + small[0].numel(), dtype=small.dtype)
        inner = small.stride()[1:]
        far = pages.as_strided(small.shape, (stride, *inner))
        far[3] = small[3]
        ours[name] = far
    run_ours(ours)
    plain = with_own_caches(case)
    run_ours(plain)
    for name in ("recurrent_state", "conv_state"):
        assert torch.equal(ours[name][3], plain[name][3]), name


# --------------------------------------------------------------------------- #
# Launches
# --------------------------------------------------------------------------- #


def test_no_rows(monkeypatch):
    empty = make_case(0, 2, tail=2)
    run_ours(empty)
    assert not empty["output"].any()
    forbid_launch(monkeypatch)
    run_ours(make_case(0, 2))


def test_arrival_counters_return_to_zero(monkeypatch):
    monkeypatch.setattr(op, "_select_variant", lambda units, num_sms: op._QUARTER)
    check_against_both(make_case(2, 1))
    assert not counters(torch.device("cpu")).any()
    check_against_both(make_case(2, 1, seed=1))


@pytest.mark.parametrize("rows", [1023, 1024])
def test_rows_times_heads_lie_on_the_wide_grid_axis(rows, monkeypatch):
    grids = []

    class Recorder:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *args, **kwargs: None

    monkeypatch.setattr(op, "_kda_single_token_kernel", Recorder())
    indices = torch.zeros(rows, dtype=torch.int32)
    run_ours(make_case(rows, 64, indices=indices, slots=1))
    assert grids == [(rows * 64,)]


def test_table_covers_every_variant_and_counters_suffice():
    chosen = [op._select_variant(units, 132) for units in range(1, 1000)]
    assert list(dict.fromkeys(chosen)) == list(op._VARIANTS)
    for num_sms in (1, 46, 132, 188, 10_000):
        for units in range(1, 2000):
            if op._select_variant(units, num_sms) is op._QUARTER:
                assert units <= op._MAX_SHARED_HEADS


def test_warmup_touches_no_cache():
    case = make_case(1, 1)
    ours = with_own_caches(case)
    fixed = ("conv_state", "conv_weight", "A_log", "dt_bias", "norm_weight")
    op.warmup_kda_single_token(
        **{name: ours[name] for name in (*fixed, "recurrent_state")},
        row_stride=case["mixed_qkv"].stride(0),
        arrivals=counters(case["output"].device),
        index_dtypes=(torch.int32, torch.int64),
        **CONSTANTS,
    )
    for name in ("conv_state", "recurrent_state"):
        assert torch.equal(ours[name], case[name]), name


BAD_OPERANDS = {
    "head dim": ("raw_g", lambda t: t[:, :, :64], ValueError, "128"),
    "dtype": ("z", lambda t: t.half(), TypeError, "z must have dtype"),
    "state dtype": ("recurrent_state", lambda t: t.half(), TypeError, "float32 or"),
    "index dtype": ("state_indices", lambda t: t.short(), TypeError, "int32 or"),
    "rows": ("state_indices", lambda t: t[:1], ValueError, r"\[2\], got \[1\]"),
    "channels": ("mixed_qkv", lambda t: t[:, :-1], ValueError, "mixed_qkv must have"),
    "inner stride": (
        "mixed_qkv",
        lambda t: t.t().contiguous().t(),
        ValueError,
        "inner strides",
    ),
    "columns": ("conv_state", lambda t: t[:, :, :2], ValueError, "3 columns or more"),
    "layout": ("conv_state", lambda t: t.mT, ValueError, "conv_state must have shape"),
    "slots": ("conv_state", lambda t: t[1:], ValueError, "conv_state must have shape"),
    "A_log": ("A_log", lambda t: t.repeat(1, 1, 2, 1), ValueError, "A_log"),
    "arrivals": (
        "arrivals",
        lambda t: t[:8],
        ValueError,
        r"arrivals must have shape \[64\]",
    ),
    "short output": ("output", lambda t: t[:1], ValueError, "output must have a row"),
}


@pytest.mark.parametrize("problem", BAD_OPERANDS)
def test_refuses_before_any_launch(problem, monkeypatch):
    name, spoil, error, message = BAD_OPERANDS[problem]
    case = make_case(2, 1) | {"arrivals": counters(torch.device("cpu"))}
    case[name] = spoil(case[name])
    forbid_launch(monkeypatch)
    with pytest.raises(error, match=message):
        run_ours(case)


SUPPORTED = {
    "num_heads": 64,
    "head_dim": 128,
    "conv_width": 4,
    "input_dtype": torch.bfloat16,
    "conv_dtype": torch.bfloat16,
    "state_dtype": torch.float32,
}


@pytest.mark.parametrize(
    ("argument", "value", "reason"),
    [
        ("num_heads", 3, None),
        ("state_dtype", torch.bfloat16, None),
        ("num_heads", 0, "local head"),
        ("head_dim", 64, "head dim 128, got 64"),
        ("conv_width", 3, "width 4, got 3"),
        ("input_dtype", torch.float16, "bfloat16 projections"),
        ("conv_dtype", torch.float32, "bfloat16 convolution state"),
        ("state_dtype", torch.float16, "recurrent state"),
    ],
)
def test_unsupported_names_the_requirement(argument, value, reason):
    found = op.kda_single_token_unsupported(**SUPPORTED | {argument: value})
    assert found is None if reason is None else reason in found


# --------------------------------------------------------------------------- #
# Compiled kernels
# --------------------------------------------------------------------------- #


@pytest.mark.gpu
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "heads"), [(1, 8), (3, 16), (40, 12), (5, 64)])
def test_compiled_variants_match_vllm_bit_for_bit(variant, n, heads, state_dtype):
    case = make_case(n, heads, state_dtype=state_dtype, tail=1, device="cuda")
    case["state_indices"][n // 2 + 1 :: 3] = 0
    check_against_both(case)


@pytest.mark.gpu
def test_compiled_dim_first_windows_stay_within_rounding_of_vllm(variant):
    case = make_case(9, 8, dim_first=True, num_spec=2, device="cuda")
    ours, theirs = with_own_caches(case), with_own_caches(case)
    run_ours(ours)
    run_vllm(theirs)
    assert torch.equal(ours["conv_state"], theirs["conv_state"])
    difference = ours["recurrent_state"] - theirs["recurrent_state"]
    assert difference.abs().max() < 1e-6


@pytest.mark.gpu
def test_tiles_of_a_head_do_not_race():
    """Many launches from one snapshot, back to back, must all leave the same bits."""
    case = make_case(4, 8, device="cuda")
    runs = [with_own_caches(case) for _ in range(50)]
    for _ in range(20):
        for run in runs:
            for name in ("conv_state", "recurrent_state"):
                run[name].copy_(case[name])
            run["output"].fill_(float("nan"))
        for run in runs:
            run_ours(run)
        for run in runs[1:]:
            for name in ("output", "conv_state", "recurrent_state"):
                assert torch.equal(run[name], runs[0][name]), name


@pytest.mark.gpu
def test_warmed_up_op_never_compiles_and_replays_in_a_graph(monkeypatch):
    heads = 4
    case = make_case(600, heads, device="cuda")
    fixed = ("conv_state", "conv_weight", "A_log", "dt_bias", "norm_weight")
    op.warmup_kda_single_token(
        **{name: case[name] for name in (*fixed, "recurrent_state")},
        row_stride=case["mixed_qkv"].stride(0),
        arrivals=counters(case["output"].device),
        **CONSTANTS,
    )
    compiled = []

    def record(**event):
        compiled.append(event)

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", record)
    live = ("mixed_qkv", "raw_g", "raw_beta", "z", "state_indices", "output")
    for n in (1, 2, 3, 16, 33, 34, 66, 67, 599):
        for start in (0, 1):
            rows = {name: case[name][start : start + n] for name in live}
            run_ours(case | rows)
    table = torch.zeros(600, 4, dtype=torch.int32, device="cuda")
    table[:, 0] = case["state_indices"]
    run_ours(case | {"state_indices": table[:, 0]})
    assert not compiled

    graph, replayed = torch.cuda.CUDAGraph(), with_own_caches(case)
    with torch.cuda.graph(graph):
        run_ours(replayed)
    expected = with_own_caches(case)
    for seed in (5, 6):
        fresh = make_case(600, heads, device="cuda", seed=seed)
        replayed["mixed_qkv"].copy_(fresh["mixed_qkv"])
        replayed["raw_beta"].copy_(fresh["raw_beta"])
        graph.replay()
        run_ours(expected)
        for name in ("output", "conv_state", "recurrent_state"):
            assert torch.equal(replayed[name], expected[name]), name
    assert not compiled


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1023, 1024])
def test_wide_grid_runs(rows):
    indices = torch.zeros(rows, dtype=torch.int32)
    indices[-2:] = torch.tensor([1, 2])
    check_against_both(make_case(rows, 64, indices=indices, slots=3, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gate", [-60.0, 60.0], ids=["open", "closed"])
def test_twenty_thousand_steps_stay_with_vllm(gate, state_dtype):
    case = make_case(1, 1, state_dtype=state_dtype, device="cuda")
    case["raw_g"].fill_(gate)
    ours, theirs = with_own_caches(case), with_own_caches(case)
    inputs = [make_case(1, 1, seed=s, device="cuda") for s in range(64)]
    for step in range(20_000):
        live = {name: inputs[step % 64][name] for name in ("mixed_qkv", "z")}
        run_ours(ours | live)
        run_vllm(theirs | live)
        if step + 1 in (1, 100, 1_000, 10_000, 20_000):
            assert ours["output"].isfinite().all()
            assert torch.equal(ours["recurrent_state"], theirs["recurrent_state"])
