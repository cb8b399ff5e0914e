# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""One KDA (Kimi Delta Attention) decode step, one token per row, in one launch.

``kda_single_token`` does what a KDA layer does between its input projections
and its output projection when every request decodes exactly one token: causal
convolution with SiLU, q/k normalization, gate, delta-rule recurrence and gated
RMS norm. It reads the projections as they lie and updates the paged
convolution and recurrent states in place.

``reference_kda_single_token`` is the same step in float64 and the
specification; ``reference_kda_decode`` extends it to packed requests of
several tokens (speculative verification).
"""

from functools import cache
from typing import NamedTuple

import torch

from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton

HEAD_DIM = 128
CONV_WIDTH = 4
# Added to the squared norms of q and k before the square root.
QK_NORM_EPS = 1e-6


# --------------------------------------------------------------------------- #
# Specification
# --------------------------------------------------------------------------- #


def _round_bf16(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).double()


def _reference_conv(
    window: torch.Tensor, token: torch.Tensor, conv_weight: torch.Tensor
) -> torch.Tensor:
    """Convolve one token's channels with their last three inputs.

    Args:
        window: [3*H*D, 3] the three inputs before the token, oldest first.
        token: [3*H*D] the token's input.
        conv_weight: [3*H*D, 4].

    Returns:
        [3*H*D] float64 SiLU of the sum over taps, rounded to bf16.
    """
    taps = torch.cat([window, token[:, None]], dim=1).double()
    return _round_bf16(
        torch.nn.functional.silu((taps * conv_weight.double()).sum(dim=1))
    )


def _reference_recurrence(
    state: torch.Tensor,
    qkv: torch.Tensor,
    raw_g: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advance all heads of one request by one token.

    Args:
        state: [H, D, D] float64, (value, key).
        qkv: [3*H*D] float64, q, k and v after the convolution.
        raw_g: [H, D] gate logits, one per key channel.
        raw_beta: [H] write-strength logits.
        A_log: H elements.
        dt_bias: H*D elements.
        lower_bound: Log decay of a fully closed gate, negative.
        scale: Factor on the normalized q.

    Returns:
        The new state [H, D, D] and the attention output [H, D], float64.
    """
    heads, dim = raw_g.shape
    q, k, v = qkv.view(3, heads, dim)
    q = q / (q.square().sum(-1, keepdim=True) + QK_NORM_EPS).sqrt() * scale
    k = k / (k.square().sum(-1, keepdim=True) + QK_NORM_EPS).sqrt()
    speed = A_log.double().view(heads, 1).exp()
    log_decay = lower_bound * torch.sigmoid(
        speed * (raw_g.double() + dt_bias.double().view(heads, dim))
    )
    beta = torch.sigmoid(raw_beta.double())

    decayed = state * log_decay.exp()[:, None, :]
    # The delta rule: write only what the decayed state does not already recall.
    recalled = torch.einsum("hvk,hk->hv", decayed, k)
    state = decayed + torch.einsum("hv,hk->hvk", beta[:, None] * (v - recalled), k)
    return state, torch.einsum("hvk,hk->hv", state, q)


def _reference_gated_norm(
    attended: torch.Tensor, z: torch.Tensor, norm_weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """RMS norm over D with a sigmoid output gate, [H, D] float64."""
    x = _round_bf16(attended)
    x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return x * norm_weight.double() * torch.sigmoid(z.double())


def reference_kda_decode(
    mixed_qkv: torch.Tensor,
    conv_state: torch.Tensor,
    conv_weight: torch.Tensor,
    raw_g: torch.Tensor,
    raw_beta: torch.Tensor,
    z: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    recurrent_state: torch.Tensor,
    state_indices: torch.Tensor,
    *,
    query_start_loc: torch.Tensor,
    num_accepted_tokens: torch.Tensor | None = None,
    lower_bound: float,
    eps: float,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Decode packed requests in float64. Writes none of its arguments.

    Gate, delta rule and gated norm are those of Kimi Linear
    (https://arxiv.org/abs/2510.26692) with the bounded gate
    ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))``. Values that vLLM
    stores in bf16 between its kernels (q, k, v after the convolution, and the
    attention output before the norm) are rounded to bf16 here too. Within a
    request the state is not rounded to the cache's dtype between tokens: the
    kernels keep it in registers.

    The paging follows vLLM's speculative decoding. Request r owns the slots
    ``state_indices[r]``. It resumes from the recurrent state in column
    ``accepted - 1`` and leaves the state after its i-th token in column i. Its
    convolution window lies in the slot of column 0 and starts there at column
    ``accepted - 1``; afterwards the slot holds, from column 0 on, the last two
    inputs of that window and the request's tokens.

    Args:
        mixed_qkv: [t, 3*H*D] bf16, q | k | v of every token before the
            convolution.
        conv_state: [slots, 3*H*D, >= 3] bf16, any strides.
        conv_weight: [3*H*D, 4] fp32 or bf16, oldest tap first.
        raw_g: [t, H, D] gate logits.
        raw_beta: [t, H] write-strength logits.
        z: [t, H, D] output-gate logits.
        A_log: H elements, any shape.
        dt_bias: H*D elements, any shape.
        norm_weight: [D].
        recurrent_state: [slots, H, D, D] fp32 or bf16, (value, key).
        state_indices: [s, columns] integers; <= 0 is no slot.
        query_start_loc: [s + 1] integers, the first token of each request.
        num_accepted_tokens: [s] integers in 1..columns, or None for a plain
            decode, which is the same as all ones.
        lower_bound: Log decay of a fully closed gate.
        eps: Added to the mean square in the output norm.
        scale: Factor on q; None means D ** -0.5.

    Returns:
        Output [t, H, D] float64, the new conv state (dtype of the old one) and
        the new recurrent state (float64). Tokens of a request without a slot have
        zero output.

    Raises:
        ValueError: If an accepted count lies outside 1..columns, or a request
            has more tokens than it has columns.
    """
    scale = recurrent_state.shape[-1] ** -0.5 if scale is None else scale
    columns = state_indices.shape[1]
    starts = query_start_loc.tolist()
    slots = state_indices.tolist()
    accepted = (
        [1] * len(slots)
        if num_accepted_tokens is None
        else num_accepted_tokens.tolist()
    )
    output = torch.zeros(z.shape, dtype=torch.float64, device=z.device)
    new_conv = conv_state.clone()
    new_state = recurrent_state.double()
    for row, (begin, end) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        first = accepted[row] - 1
        if begin == end or slots[row][0] <= 0:
            continue
        if not 0 <= first < columns:
            raise ValueError(
                f"num_accepted_tokens[{row}] is {accepted[row]}, but must lie in "
                f"1..{columns}, the number of state index columns"
            )
        if end - begin > columns:
            raise ValueError(
                f"request {row} has {end - begin} tokens but state_indices has only "
                f"{columns} columns to keep their states in"
            )
        history = conv_state[slots[row][0], :, first : first + CONV_WIDTH - 1]
        inputs = torch.cat([history, mixed_qkv[begin:end].mT.to(history.dtype)], dim=1)
        new_conv[slots[row][0], :, : inputs.shape[1] - 1] = inputs[:, 1:]
        if slots[row][first] <= 0:
            continue
        state = recurrent_state[slots[row][first]].double()
        for i, token in enumerate(range(begin, end)):
            qkv = _reference_conv(inputs[:, i : i + 3], inputs[:, i + 3], conv_weight)
            state, attended = _reference_recurrence(
                state,
                qkv,
                raw_g[token],
                raw_beta[token],
                A_log,
                dt_bias,
                lower_bound,
                scale,
            )
            output[token] = _reference_gated_norm(attended, z[token], norm_weight, eps)
            if slots[row][i] > 0:
                new_state[slots[row][i]] = state
    return output, new_conv, new_state


def reference_kda_single_token(
    mixed_qkv: torch.Tensor,
    conv_state: torch.Tensor,
    conv_weight: torch.Tensor,
    raw_g: torch.Tensor,
    raw_beta: torch.Tensor,
    z: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    recurrent_state: torch.Tensor,
    state_indices: torch.Tensor,
    output: torch.Tensor,
    *,
    lower_bound: float,
    eps: float,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The specification of ``kda_single_token``, in float64.

    Takes the same arguments and writes none of them. ``output`` only gives the
    number of rows.

    Returns:
        Output [m, H, D] float64 with zeros in null rows and in the tail, the new
        conv state (dtype of the old one) and the new recurrent state (float64).
    """
    n = mixed_qkv.shape[0]
    result, conv, state = reference_kda_decode(
        mixed_qkv,
        conv_state,
        conv_weight,
        raw_g,
        raw_beta,
        z[:n],
        A_log,
        dt_bias,
        norm_weight,
        recurrent_state,
        state_indices[:, None],
        query_start_loc=torch.arange(n + 1),
        lower_bound=lower_bound,
        eps=eps,
        scale=scale,
    )
    tail = result.new_zeros(output.shape[0] - n, *result.shape[1:])
    return torch.cat([result, tail]), conv, state


# --------------------------------------------------------------------------- #
# Kernel
# --------------------------------------------------------------------------- #


@triton.jit
def _prefetch(ptrs):
    """Ask for the cache lines of ``ptrs`` in L2. Reads nothing."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [ptrs],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _prefetch_head(
    weight_ptr,
    weight_stride_channel,
    weight_stride_tap,
    conv_ptr,
    conv_stride_channel,
    conv_stride_tap,
    head,
    part_size,
    D: tl.constexpr,
):
    """Prefetch one head's convolution weights and window."""
    part = tl.minimum(tl.arange(0, 4), 2)[:, None] * part_size + head * D
    # A 128-byte line holds eight channels' weights or more.
    channel = part + tl.arange(0, D // 8)[None, :] * 8
    weight_ptr += channel * weight_stride_channel
    conv_ptr += channel * conv_stride_channel
    for tap in tl.static_range(4):
        _prefetch(weight_ptr + tap * weight_stride_tap)
    for tap in tl.static_range(3):
        _prefetch(conv_ptr + tap * conv_stride_tap)


@triton.jit
def _load_weights(ptrs, stride):
    return (
        tl.load(ptrs).to(tl.float32),
        tl.load(ptrs + stride).to(tl.float32),
        tl.load(ptrs + 2 * stride).to(tl.float32),
        tl.load(ptrs + 3 * stride).to(tl.float32),
    )


@triton.jit
def _load_window(ptrs, stride):
    return tl.load(ptrs), tl.load(ptrs + stride), tl.load(ptrs + 2 * stride)


@triton.jit
def _shift_window(ptrs, stride, window, x):
    tl.store(ptrs, window[1])
    tl.store(ptrs + stride, window[2])
    tl.store(ptrs + 2 * stride, x.to(ptrs.dtype.element_ty))


@triton.jit
def _conv_silu(window, x, weights):
    """SiLU of the convolution, through bf16 as vLLM stores it.

    Explicit fma: where the window's layout differs from the weights' the
    compiler would move a product between threads and round it.
    """
    acc = tl.zeros(weights[0].shape, tl.float32)
    acc = tl.fma(window[0].to(tl.float32), weights[0], acc)
    acc = tl.fma(window[1].to(tl.float32), weights[1], acc)
    acc = tl.fma(window[2].to(tl.float32), weights[2], acc)
    acc = tl.fma(x.to(tl.float32), weights[3], acc)
    acc = acc / (1 + tl.exp(-acc))
    return acc.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _normalize(x, EPS: tl.constexpr):
    return x / tl.sqrt(tl.sum(x * x, axis=1) + EPS)[:, None]


@triton.jit
def _take_chunk(tile, i):
    """Chunk ``i`` of a [W, C, R] fp32 tile as [W, R].

    Sums the bits, since adding 0.0 would lose the sign of -0.0.
    """
    bits = tile.to(tl.int32, bitcast=True)
    index = tl.arange(0, tile.shape[1])[None, :, None]
    return tl.sum(tl.where(index == i, bits, 0), axis=1).to(tl.float32, bitcast=True)


@triton.jit
def _sum_like_norm(x):
    """Sum [D] in the order in which vLLM's norm kernel does.

    There a thread holds eight neighbours and adds them pair by pair (so Triton 3.8;
    3.6 adds one after the other), and sixteen lanes then add up halves. Here eight
    lanes hold the eight neighbours; lanes add halves first, hence the reversed bits.
    """
    EIGHTS: tl.constexpr = x.numel // 8
    x = tl.permute(tl.reshape(x, [EIGHTS, 2, 2, 2]), [0, 3, 2, 1])
    return tl.sum(tl.sum(tl.reshape(x, [EIGHTS, 8]), axis=1), axis=0)


@triton.jit
def _advance(h, q, k, v, decay, beta):
    """One delta-rule step of [W, R, D] state rows; also their output [W, R]."""
    h *= decay[:, None, :]
    delta = (v - tl.sum(h * k[:, None, :], axis=2)) * beta
    h += delta[:, :, None] * k[:, None, :]
    return h, tl.sum(h * q[:, None, :], axis=2)


# None of these may enter a compile key: they change from step to step, or (the
# strides) between an eager step and a captured one.
_LIVE_ARGUMENTS = [
    "x_ptr",
    "g_ptr",
    "beta_ptr",
    "z_ptr",
    "index_ptr",
    "output_ptr",
    "n",
    "H",
    "slots",
    "x_stride",
    "g_stride",
    "z_stride",
    "output_stride",
    "beta_stride",
    "index_stride",
]


@triton.jit(do_not_specialize=_LIVE_ARGUMENTS)
def _kda_single_token_kernel(
    x_ptr,
    conv_ptr,
    weight_ptr,
    g_ptr,
    beta_ptr,
    z_ptr,
    a_log_ptr,
    dt_bias_ptr,
    norm_weight_ptr,
    state_ptr,
    index_ptr,
    output_ptr,
    arrivals_ptr,
    n,
    H,
    slots,
    # Row strides in units of IN_ALIGN and OUT_ALIGN elements.
    x_stride,
    g_stride,
    z_stride,
    output_stride,
    # Strides in elements.
    beta_stride,
    index_stride,
    conv_stride_slot,
    conv_stride_channel,
    conv_stride_tap,
    weight_stride_channel,
    weight_stride_tap,
    state_stride_slot,
    scale,
    lower_bound,
    eps,
    D: tl.constexpr,
    TILES: tl.constexpr,
    CHUNKS: tl.constexpr,
    PREFETCH_STATE: tl.constexpr,
    W: tl.constexpr,
    IN_ALIGN: tl.constexpr,
    OUT_ALIGN: tl.constexpr,
    QK_EPS: tl.constexpr,
    launch_pdl: tl.constexpr,
):
    """One tile of value rows of one head of one row.

    The W warps own the tile's value rows in W runs, and every warp keeps all of
    q, k and the decay for itself: then sums over the key axis stay inside a
    warp, four neighbours per thread first and the lanes after, which is the
    order of vLLM's one-warp kernel.
    """
    DT: tl.constexpr = D // TILES  # value rows of this program
    R: tl.constexpr = DT // (W * CHUNKS)  # value rows of a warp in a chunk
    unit = tl.program_id(0) // TILES
    tile = tl.program_id(0) % TILES
    row = (unit // H).to(tl.int64)
    head = unit % H
    live = row < n  # the others are the output's tail
    part_size = H * D  # channels of q, of k and of v
    x_ptr = tl.multiple_of(x_ptr + row * (x_stride * IN_ALIGN), 2 * IN_ALIGN)
    g_ptr = tl.multiple_of(g_ptr + row * (g_stride * IN_ALIGN), 2 * IN_ALIGN)
    z_ptr = tl.multiple_of(z_ptr + row * (z_stride * OUT_ALIGN), 2 * OUT_ALIGN)
    output_ptr = tl.multiple_of(
        output_ptr + row * (output_stride * OUT_ALIGN), 2 * OUT_ALIGN
    )
    index_ptr += row * index_stride
    state_ptr += head * (D * D) + tile * (DT * D)

    if launch_pdl:
        # The launch before this one may still be running and may have produced
        # any operand, the index included. So nothing read here is used as a
        # value: the index, read past L1 so that no stale line stays there, only
        # says what to prefetch, and L2 is where all later writes land.
        guess = tl.load(index_ptr, mask=live, other=0, cache_modifier=".cg")
        guess = guess.to(tl.int64)
        if (guess > 0) & (guess < slots):
            _prefetch_head(
                weight_ptr,
                weight_stride_channel,
                weight_stride_tap,
                conv_ptr + guess * conv_stride_slot,
                conv_stride_channel,
                conv_stride_tap,
                head,
                part_size,
                D,
            )
            if PREFETCH_STATE:
                lines = tl.arange(0, DT * D // 32) * 32
                _prefetch(state_ptr + guess * state_stride_slot + lines)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    slot = tl.load(index_ptr, mask=live, other=0).to(tl.int64)
    key = tl.arange(0, D)
    qc = tl.zeros([W, 1], tl.int32) + head * D + key[None, :]  # once per warp
    kc = part_size + qc
    value = head * D + tile * DT + tl.arange(0, DT)
    vc = 2 * part_size + value

    # Needs no slot, so it is under way while the index arrives.
    qw = _load_weights(weight_ptr + qc * weight_stride_channel, weight_stride_tap)
    kw = _load_weights(weight_ptr + kc * weight_stride_channel, weight_stride_tap)
    vw = _load_weights(weight_ptr + vc * weight_stride_channel, weight_stride_tap)
    a_log = tl.load(a_log_ptr + head).to(tl.float32)
    bias = tl.load(dt_bias_ptr + qc).to(tl.float32)
    qx = tl.load(x_ptr + qc, mask=live, other=0)
    kx = tl.load(x_ptr + kc, mask=live, other=0)
    vx = tl.load(x_ptr + vc, mask=live, other=0)
    g = tl.load(g_ptr + qc, mask=live, other=0)
    beta = tl.load(beta_ptr + row * beta_stride + head, mask=live, other=0)
    # Where a program norms a head that others computed, each of its warps does so
    # twice, 16 lanes with eight neighbours each.
    normed = key if TILES == 1 else tl.zeros([2 * W, 1], tl.int32) + key[None, :]
    z = tl.load(z_ptr + head * D + normed, mask=live, other=0)
    norm_weight = tl.load(norm_weight_ptr + normed).to(tl.float32)

    if slot <= 0:
        tl.store(output_ptr + value, tl.zeros([DT], output_ptr.dtype.element_ty))
        return

    conv_ptr += slot * conv_stride_slot
    q_ptrs = conv_ptr + qc * conv_stride_channel
    k_ptrs = conv_ptr + kc * conv_stride_channel
    v_ptrs = conv_ptr + vc * conv_stride_channel
    q_window = _load_window(q_ptrs, conv_stride_tap)
    k_window = _load_window(k_ptrs, conv_stride_tap)
    v_window = _load_window(v_ptrs, conv_stride_tap)
    warp_rows = tl.arange(0, W)[:, None, None] * (CHUNKS * R)
    rows = warp_rows + tl.arange(0, R)[None, :, None]
    state_ptrs = state_ptr + slot * state_stride_slot + rows * D + key[None, None, :]
    # Only breaks a tie: neither of the first two axes is contiguous, Triton's
    # versions rank them differently, and the warps must lie along the first.
    state_ptrs = tl.max_contiguous(state_ptrs, [W, 1, D])
    h_next = tl.load(state_ptrs)

    q = _normalize(_conv_silu(q_window, qx, qw), QK_EPS) * scale
    k = _normalize(_conv_silu(k_window, kx, kw), QK_EPS)
    v = tl.reshape(_conv_silu(v_window, vx, vw), [W, CHUNKS, R])
    g = tl.exp(a_log) * (g.to(tl.float32) + bias)
    decay = tl.exp(lower_bound / (1.0 + tl.exp(-g)))
    beta = tl.sigmoid(beta.to(tl.float32))

    if TILES == 1:
        # As below, and early: the windows need not stay in registers.
        tl.debug_barrier()
        _shift_window(q_ptrs, conv_stride_tap, q_window, qx)
        _shift_window(k_ptrs, conv_stride_tap, k_window, kx)
        _shift_window(v_ptrs, conv_stride_tap, v_window, vx)

    o = tl.zeros([W, CHUNKS, R], tl.float32)
    chunk = tl.arange(0, CHUNKS)[None, :, None]
    for i in tl.static_range(CHUNKS):
        h = h_next.to(tl.float32)
        if i + 1 < CHUNKS:
            h_next = tl.load(state_ptrs + (i + 1) * R * D)
        h, o_chunk = _advance(h, q, k, _take_chunk(v, i), decay, beta)
        tl.store(state_ptrs + i * R * D, h.to(state_ptr.dtype.element_ty))
        o = tl.where(chunk == i, o_chunk[:, None, :], o)
    o = o.to(tl.bfloat16)

    output_ptrs = output_ptr + head * D + normed
    if TILES > 1:
        # The program that arrives last has the whole head's output before it,
        # and all others have read the window, so it norms and shifts for them.
        tl.store(output_ptr + value, tl.reshape(o, [DT]))
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals_ptr + unit, 1, sem="acq_rel", scope="gpu")
        if arrived != TILES - 1:
            return
        tl.store(arrivals_ptr + unit, 0)
        o = tl.load(output_ptrs, cache_modifier=".cg").to(tl.float32)
        square_sum = tl.sum(o * o, axis=1)[:, None]
        vc = 2 * part_size + head * D + key
        v_ptrs = conv_ptr + vc * conv_stride_channel
        v_window = _load_window(v_ptrs, conv_stride_tap)
        vx = tl.load(x_ptr + vc)
        # Every warp reads q's and k's window, so none may shift before all have.
        tl.debug_barrier()
        _shift_window(q_ptrs, conv_stride_tap, q_window, qx)
        _shift_window(k_ptrs, conv_stride_tap, k_window, kx)
        _shift_window(v_ptrs, conv_stride_tap, v_window, vx)
    else:
        o = tl.reshape(o, [D]).to(tl.float32)
        square_sum = _sum_like_norm(o * o)

    o *= 1 / tl.sqrt(square_sum / D + eps)
    y = o * norm_weight * tl.sigmoid(z.to(tl.float32))
    tl.store(output_ptrs, y.to(output_ptr.dtype.element_ty))


# --------------------------------------------------------------------------- #
# Host side
# --------------------------------------------------------------------------- #

NUM_WARPS = 4


class _Variant(NamedTuple):
    """How the work of one head of one row is laid out.

    Attributes:
        tiles: Programs that share a head.
        chunks: Pieces in which a program walks its value rows, the next one
            loading while one is computed.
        prefetch_state: Whether the state is prefetched while the launch before
            this one ends.
    """

    tiles: int
    chunks: int
    prefetch_state: bool


_QUARTER = _Variant(tiles=4, chunks=1, prefetch_state=True)
_WHOLE_AHEAD = _Variant(tiles=1, chunks=1, prefetch_state=True)
_WHOLE = _Variant(tiles=1, chunks=1, prefetch_state=False)
_CHUNKED = _Variant(tiles=1, chunks=4, prefetch_state=False)
_VARIANTS = (_QUARTER, _WHOLE_AHEAD, _WHOLE, _CHUNKED)

# Heads whose programs can count their arrivals.
_MAX_SHARED_HEADS = 64


class _Operands(NamedTuple):
    """The tensors of one call, in the kernel's order; see ``kda_single_token``."""

    mixed_qkv: torch.Tensor
    conv_state: torch.Tensor
    conv_weight: torch.Tensor
    raw_g: torch.Tensor
    raw_beta: torch.Tensor
    z: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    norm_weight: torch.Tensor
    recurrent_state: torch.Tensor
    state_indices: torch.Tensor
    output: torch.Tensor
    arrivals: torch.Tensor


def _select_variant(units: int, num_sms: int) -> _Variant:
    """The variant for ``units`` (rows x heads) on ``num_sms`` multiprocessors."""
    if units * _QUARTER.tiles <= min(num_sms, _QUARTER.tiles * _MAX_SHARED_HEADS):
        return _QUARTER
    if units <= num_sms:
        return _WHOLE_AHEAD
    return _WHOLE if units <= 2 * num_sms else _CHUNKED


@cache
def _num_sms(device: torch.device) -> int:
    if device.type == "cpu":  # Triton's interpreter
        return 1
    return current_platform.num_compute_units(device.index or 0)


def arrival_counters(device: torch.device) -> torch.Tensor:
    """Make the counters by which programs that share a head find the last of them.

    Args:
        device: Where they lie.

    Returns:
        [64] int32 zeros. A launch leaves them zero; nothing else may write them, and
        launches that may overlap need counters of their own.
    """
    return torch.zeros(_MAX_SHARED_HEADS, dtype=torch.int32, device=device)


@cache
def _launch_pdl() -> bool:
    return current_platform.is_arch_support_pdl()


def _alignment(elements: int, *rows: torch.Tensor) -> int:
    """``elements`` if every row of bf16 tensors starts on as many, else 1."""
    starts = (t.data_ptr() % (2 * elements) | t.stride(0) % elements for t in rows)
    return 1 if any(starts) else elements


def _launch(
    variant: _Variant,
    t: _Operands,
    lower_bound: float,
    eps: float,
    scale: float | None,
) -> None:
    heads, dim = t.raw_g.shape[1:]
    # Strides decide alone in practice, so one geometry needs one binary.
    in_align = _alignment(4, t.mixed_qkv, t.raw_g)
    out_align = _alignment(8, t.z, t.output)
    if variant.tiles == 1:
        t = t._replace(arrivals=None)
    _kda_single_token_kernel[(t.output.shape[0] * heads * variant.tiles,)](
        *t,
        t.mixed_qkv.shape[0],
        heads,
        t.recurrent_state.shape[0],
        t.mixed_qkv.stride(0) // in_align,
        t.raw_g.stride(0) // in_align,
        t.z.stride(0) // out_align,
        t.output.stride(0) // out_align,
        t.raw_beta.stride(0),
        t.state_indices.stride(0),
        *t.conv_state.stride(),
        *t.conv_weight.stride(),
        t.recurrent_state.stride(0),
        dim**-0.5 if scale is None else scale,
        lower_bound,
        eps,
        D=dim,
        TILES=variant.tiles,
        CHUNKS=variant.chunks,
        PREFETCH_STATE=variant.prefetch_state,
        W=NUM_WARPS,
        IN_ALIGN=in_align,
        OUT_ALIGN=out_align,
        QK_EPS=QK_NORM_EPS,
        num_warps=NUM_WARPS,
        launch_pdl=_launch_pdl(),
    )


_STATE_DTYPES = (torch.float32, torch.bfloat16)
_INDEX_DTYPES = (torch.int32, torch.int64)


def kda_single_token_unsupported(
    num_heads: int,
    head_dim: int,
    conv_width: int,
    input_dtype: torch.dtype,
    conv_dtype: torch.dtype,
    state_dtype: torch.dtype,
) -> str | None:
    """Say why a layer's geometry cannot use ``kda_single_token``.

    Args:
        num_heads: Local heads.
        head_dim: Elements of a head.
        conv_width: Taps of the convolution.
        input_dtype: Of the projections and the output.
        conv_dtype: Of the convolution state.
        state_dtype: Of the recurrent state.

    Returns:
        None where it can, else the first unmet requirement.
    """
    if num_heads < 1:
        return f"needs at least one local head, got {num_heads}"
    if head_dim != HEAD_DIM:
        return f"needs head dim {HEAD_DIM}, got {head_dim}"
    if conv_width != CONV_WIDTH:
        return f"needs convolution width {CONV_WIDTH}, got {conv_width}"
    if input_dtype != torch.bfloat16:
        return f"needs bfloat16 projections, got {input_dtype}"
    if conv_dtype != torch.bfloat16:
        return f"needs a bfloat16 convolution state, got {conv_dtype}"
    if state_dtype not in _STATE_DTYPES:
        return f"needs a float32 or bfloat16 recurrent state, got {state_dtype}"
    return None


def _check(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    inner: tuple[int, ...] = (),
) -> None:
    """Raise unless ``tensor`` has this shape, dtype, device and inner strides."""
    if tensor.dtype not in dtypes:
        raise TypeError(
            f"kda_single_token: {name} must have dtype "
            f"{' or '.join(map(str, dtypes))}, got {tensor.dtype}; convert it once, "
            "outside the step"
        )
    if tensor.device != device:
        raise ValueError(
            f"kda_single_token: {name} must be on the output's device {device}, got "
            f"{tensor.device}"
        )
    found = tuple(tensor.shape)
    if len(found) != len(shape) or any(
        want is not None and want != size
        for want, size in zip(shape, found, strict=True)
    ):
        asked = "[" + ", ".join("any" if s is None else str(s) for s in shape) + "]"
        raise ValueError(
            f"kda_single_token: {name} must have shape {asked}, got {list(found)}"
        )
    if inner and tensor.numel() and tensor.stride()[-len(inner) :] != inner:
        raise ValueError(
            f"kda_single_token: {name} must have inner strides {inner}, got strides "
            f"{tensor.stride()}; pass a view whose rows are contiguous"
        )


def _check_operands(t: _Operands) -> None:
    """Raise TypeError or ValueError for operands that the kernel cannot address."""
    if t.raw_g.dim() != 3 or t.raw_g.shape[2] != HEAD_DIM:
        raise ValueError(
            f"kda_single_token: raw_g must have shape [rows, heads, {HEAD_DIM}], got "
            f"{list(t.raw_g.shape)}; other head dims need vLLM's own kernels"
        )
    _check_step(t)
    _check_layer(t)


def _check_step(t: _Operands) -> None:
    """Check what differs from step to step."""
    n, heads, dim = t.raw_g.shape
    device, bf16, per_head = t.output.device, (torch.bfloat16,), (dim, 1)
    _check("mixed_qkv", t.mixed_qkv, (n, 3 * heads * dim), bf16, device, (1,))
    _check("raw_g", t.raw_g, (n, heads, dim), bf16, device, per_head)
    _check("raw_beta", t.raw_beta, (n, heads), bf16, device, (1,))
    _check("z", t.z, (n, heads, dim), bf16, device, per_head)
    _check("output", t.output, (None, heads, dim), bf16, device, per_head)
    _check("state_indices", t.state_indices, (n,), _INDEX_DTYPES, device)
    if t.output.shape[0] < n:
        raise ValueError(
            f"kda_single_token: output must have a row for each of the {n} tokens, got "
            f"{t.output.shape[0]}"
        )


def _check_layer(t: _Operands) -> None:
    """Check the states and weights."""
    heads, dim = t.raw_g.shape[1:]
    channels, device, params = 3 * heads * dim, t.output.device, _STATE_DTYPES
    _check("conv_weight", t.conv_weight, (channels, CONV_WIDTH), params, device)
    _check("norm_weight", t.norm_weight, (dim,), params, device, (1,))
    _check("arrivals", t.arrivals, (_MAX_SHARED_HEADS,), (torch.int32,), device, (1,))
    state, conv = t.recurrent_state, t.conv_state
    inner = (dim * dim, dim, 1)
    _check("recurrent_state", state, (None, heads, dim, dim), params, device, inner)
    slots = state.shape[0]
    _check("conv_state", conv, (slots, channels, None), (torch.bfloat16,), device)
    if conv.shape[2] < CONV_WIDTH - 1:
        raise ValueError(
            f"kda_single_token: conv_state must have {CONV_WIDTH - 1} columns or more, "
            f"got shape {list(conv.shape)}; pass the dim-first view of the cache"
        )
    for name, tensor, size in (
        ("A_log", t.A_log, heads),
        ("dt_bias", t.dt_bias, heads * dim),
    ):
        _check(name, tensor, tuple(tensor.shape), (torch.float32,), device)
        if tensor.numel() != size or not tensor.is_contiguous():
            raise ValueError(
                f"kda_single_token: {name} must be contiguous with {size} elements, "
                f"got shape {list(tensor.shape)}, strides {tensor.stride()}"
            )


def kda_single_token(
    mixed_qkv: torch.Tensor,
    conv_state: torch.Tensor,
    conv_weight: torch.Tensor,
    raw_g: torch.Tensor,
    raw_beta: torch.Tensor,
    z: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    recurrent_state: torch.Tensor,
    state_indices: torch.Tensor,
    output: torch.Tensor,
    *,
    arrivals: torch.Tensor,
    lower_bound: float,
    eps: float,
    scale: float | None = None,
) -> None:
    """Advance every row by its one token, in one launch.

    Reads each operand where it lies, allocates nothing and copies nothing. Both
    states are updated in place, once per row.

    Against vLLM's kernels as they were in 0.33.0: where the channels of the
    convolution state are adjacent and the projection's row stride, with which
    vLLM's recurrence reads, is a multiple of 16 elements (16, 32 or 64 heads, or one
    row), the new states agree bit for bit, and with Triton 3.8 so does the output
    (3.6 orders the sum of vLLM's norm otherwise). Elsewhere the states agree to 1e-6
    and the output to one rounding, since vLLM sums the q and k norms in another
    order.

    n is the number of rows, H of local heads, D = 128.

    Args:
        mixed_qkv: [n, 3*H*D] bf16, q | k | v before the convolution. Row stride
            free. Read only.
        conv_state: [slots, 3*H*D, >= 3] bf16, any strides. The first three
            columns are the last inputs, oldest first; they are shifted by one.
            Further columns (speculation) are neither read nor written.
        conv_weight: [3*H*D, 4] fp32 or bf16, oldest tap first, any strides.
            Fastest as the transpose of a contiguous [4, 3*H*D]: the channels of a
            tap are then read 16 bytes at a time.
        raw_g: [n, H, D] bf16 gate logits. Row stride free.
        raw_beta: [n, H] bf16 write-strength logits. Row stride free.
        z: [n, H, D] bf16 output-gate logits. Row stride free.
        A_log: H fp32 elements, contiguous, any shape.
        dt_bias: H*D fp32 elements, contiguous, any shape.
        norm_weight: [D] fp32 or bf16.
        recurrent_state: [slots, H, D, D] fp32 or bf16, (value, key). Slot stride
            free.
        state_indices: [n] int32 or int64, any stride. An index <= 0 is null: its
            output row becomes zero and no state is touched. Live indices must be
            unique and below ``slots``; this is not checked, since it would wait
            for the device.
        output: [m, H, D] bf16 with m >= n, overlapping no input. Row stride free.
            Rows from n on become zero.
        arrivals: From ``arrival_counters``, shared only with launches that come
            before or after this one.
        lower_bound: Log decay of a fully closed gate, negative.
        eps: Added to the mean square in the output norm.
        scale: Factor on q; None means D ** -0.5.

    Raises:
        TypeError: For a dtype other than those above.
        ValueError: For a shape, stride or device other than those above. Nothing
            has been launched or written then.
    """
    operands = _Operands(
        mixed_qkv,
        conv_state,
        conv_weight,
        raw_g,
        raw_beta,
        z,
        A_log,
        dt_bias,
        norm_weight,
        recurrent_state,
        state_indices,
        output,
        arrivals,
    )
    _check_operands(operands)
    units = output.shape[0] * raw_g.shape[1]
    if units == 0:
        return
    variant = _select_variant(units, _num_sms(output.device))
    _launch(variant, operands, lower_bound, eps, scale)


def warmup_kda_single_token(
    conv_state: torch.Tensor,
    conv_weight: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    recurrent_state: torch.Tensor,
    *,
    row_stride: int,
    arrivals: torch.Tensor,
    lower_bound: float,
    eps: float,
    scale: float | None = None,
    index_dtypes: tuple[torch.dtype, ...] = (torch.int32,),
) -> None:
    """Compile and load every variant that the launch table can pick.

    Launches each on null rows of its own, so no state is read or written. Call
    it with the very caches that will be served, once they are bound and before a
    graph is captured: their strides and alignment enter the compile key. The
    number of rows, the number of heads and the live operands' addresses do not.

    Args:
        conv_state: See ``kda_single_token``, like the other tensors.
        conv_weight: Likewise.
        A_log: Likewise.
        dt_bias: Likewise.
        norm_weight: Likewise.
        recurrent_state: Likewise.
        row_stride: Row stride of ``mixed_qkv`` in elements, the width of the
            merged projection.
        arrivals: Likewise.
        lower_bound: Likewise.
        eps: Likewise.
        scale: Likewise.
        index_dtypes: Dtypes of state indices that will be passed.

    Raises:
        TypeError: As ``kda_single_token`` does.
        ValueError: As ``kda_single_token`` does.
    """
    heads, dim = recurrent_state.shape[1:3]
    device = recurrent_state.device
    channels = 3 * heads * dim
    qkv = torch.zeros(
        2, max(row_stride, channels), dtype=torch.bfloat16, device=device
    ).as_strided((2, channels), (row_stride, 1))
    per_head = torch.zeros(2, heads, dim, dtype=torch.bfloat16, device=device)
    for dtype in index_dtypes:
        operands = _Operands(
            qkv,
            conv_state,
            conv_weight,
            per_head,
            per_head[:, :, 0].contiguous(),
            per_head,
            A_log,
            dt_bias,
            norm_weight,
            recurrent_state,
            torch.zeros(2, dtype=dtype, device=device),
            torch.empty_like(per_head),
            arrivals,
        )
        _check_operands(operands)
        for variant in _VARIANTS:
            _launch(variant, operands, lower_bound, eps, scale)
