# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The operands of one decode step in one layer, whatever call takes them.

Shapes use n for the step's tokens (padding included), s for its requests, H for the
layer's local heads and D for the head dimension.
"""

from dataclasses import dataclass

import torch

from vllm.model_executor.layers.mamba.gdn.kda_decode.routes import BatchKind
from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata


@dataclass(frozen=True)
class LayerGeometry:
    """What is fixed about a KDA layer when it is built.

    Attributes:
        num_heads: Local heads H, after tensor parallelism.
        head_dim: D, of keys and values alike.
        conv_width: Taps W of the causal convolution.
        num_spec: Draft tokens a request may bring besides its own; a request has
            ``num_spec + 1`` state-index columns.
        model_dtype: Dtype of the projections and of the output.
        conv_dtype: Dtype of the convolution state.
        state_dtype: Dtype of the recurrent state.
        lower_bound: Lower bound of the log decay (the bounded gate), or None for a
            layer with the unbounded gate.
        max_num_seqs: Most requests in one step.
    """

    num_heads: int
    head_dim: int
    conv_width: int
    num_spec: int
    model_dtype: torch.dtype
    conv_dtype: torch.dtype
    state_dtype: torch.dtype
    lower_bound: float | None
    max_num_seqs: int

    @property
    def columns(self) -> int:
        """State-index columns of a request."""
        return self.num_spec + 1


@dataclass(frozen=True)
class LayerState:
    """A layer's decode parameters and caches, as views of what the layer owns.

    Attributes:
        conv_weight: ``[3 * H * D, W]`` float32, rows q | k | v.
        A_log: ``[H]`` float32.
        dt_bias: ``[H, D]`` float32.
        norm_weight: ``[D]`` in the model dtype or float32.
        conv_state: ``[slots, 3 * H * D, W - 1 + num_spec]``, either memory layout.
        recurrent_state: ``[slots, H, D (value), D (key)]``, any slot stride.
        lower_bound: Lower bound of the log decay.
        eps: Epsilon of the gated output norm.
        scale: Factor on the normalized query.
    """

    conv_weight: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    norm_weight: torch.Tensor
    conv_state: torch.Tensor
    recurrent_state: torch.Tensor
    lower_bound: float
    eps: float
    scale: float


@dataclass(frozen=True)
class DecodeStep:
    """One layer's live tensors in one decode step: views, never copies.

    Attributes:
        layer_index: The layer's place in the model; grows within a forward pass.
        metadata: The step's metadata, shared by the layers of a KV-cache group.
        kind: SINGLE_TOKEN or PACKED.
        mixed_qkv: ``[n, 3 * H * D]`` projections q | k | v before the convolution.
        raw_g: ``[n, H, D]`` forget-gate logits.
        raw_beta: ``[n, H]`` update-gate logits, rows strided.
        z: ``[n, H, D]`` output-gate logits.
        output: ``[n, H, D]``, written in place.
        state_indices: ``[s, columns]`` view of the scheduler's slots.
        query_start_loc: ``[s + 1]`` int32, or None where row r is request r.
        num_accepted_tokens: ``[s]`` int32, or None outside speculation.
    """

    layer_index: int
    metadata: GDNAttentionMetadata
    kind: BatchKind
    mixed_qkv: torch.Tensor
    raw_g: torch.Tensor
    raw_beta: torch.Tensor
    z: torch.Tensor
    output: torch.Tensor
    state_indices: torch.Tensor
    query_start_loc: torch.Tensor | None
    num_accepted_tokens: torch.Tensor | None

    @property
    def num_tokens(self) -> int:
        return self.output.shape[0]

    @property
    def num_requests(self) -> int:
        return self.state_indices.shape[0]


def decode_step(
    layer_index: int,
    kind: BatchKind,
    metadata: GDNAttentionMetadata,
    mixed_qkv: torch.Tensor,
    raw_g: torch.Tensor,
    raw_beta: torch.Tensor,
    z: torch.Tensor,
    output: torch.Tensor,
) -> DecodeStep:
    """Cut a layer's tensors and the scheduler's metadata to one decode step.

    Args:
        layer_index: The layer's place in the model.
        kind: The batch kind of ``metadata``; not :attr:`BatchKind.OTHER`.
        metadata: The step's metadata.
        mixed_qkv: ``[N, 3 * H * D]``, with ``N >= metadata.num_actual_tokens``.
        raw_g: ``[N, H, D]``.
        raw_beta: ``[N, H]``.
        z: ``[N, H, D]``.
        output: ``[N, H, D]``.

    Returns:
        The step; every tensor in it is a view of an argument.
    """
    n = metadata.num_actual_tokens
    query_start_loc = accepted = None
    if metadata.num_spec_decodes > 0:
        state_indices = metadata.spec_state_indices_tensor
        requests = state_indices.shape[0]
        query_start_loc = metadata.spec_query_start_loc[: requests + 1]
        accepted = metadata.num_accepted_tokens[:requests]
    else:
        requests = metadata.num_decodes
        state_indices = metadata.non_spec_state_indices_tensor[:requests, None]
        if kind is BatchKind.PACKED:
            query_start_loc = metadata.non_spec_query_start_loc[: requests + 1]
    return DecodeStep(
        layer_index=layer_index,
        metadata=metadata,
        kind=kind,
        mixed_qkv=mixed_qkv[:n],
        raw_g=raw_g[:n],
        raw_beta=raw_beta[:n],
        z=z[:n],
        output=output[:n],
        state_indices=state_indices,
        query_start_loc=query_start_loc,
        num_accepted_tokens=accepted,
    )


def advance_conv(
    step: DecodeStep, state: LayerState, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Run the causal convolution and SiLU, and shift each request's window.

    Args:
        step: The step. ``step.mixed_qkv`` is only read.
        state: The layer's state; ``state.conv_state`` is updated in place.
        out: ``[n, 3 * H * D]`` to write to; allocated if None.

    Returns:
        The convolved projections. Rows that belong to no request, and rows whose
        state index is null, keep what the memory held.
    """
    if out is None:
        out = torch.empty(
            step.mixed_qkv.shape,
            dtype=step.mixed_qkv.dtype,
            device=step.mixed_qkv.device,
        )
    packed = step.query_start_loc is not None
    return causal_conv1d_update(
        step.mixed_qkv,
        state.conv_state,
        state.conv_weight,
        activation="silu",
        conv_state_indices=step.state_indices[:, 0],
        num_accepted_tokens=step.num_accepted_tokens,
        query_start_loc=step.query_start_loc,
        max_query_len=step.state_indices.shape[1] if packed else -1,
        out=out,
    )
