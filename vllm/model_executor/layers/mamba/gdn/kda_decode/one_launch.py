# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The in-tree one-launch kernel as a decode backend."""

import torch

from vllm.model_executor.layers.mamba.gdn.kda_decode.routes import Call
from vllm.model_executor.layers.mamba.gdn.kda_decode.step import (
    DecodeStep,
    LayerGeometry,
    LayerState,
)
from vllm.model_executor.layers.mamba.ops.kda_single_token import (
    arrival_counters,
    kda_single_token,
    kda_single_token_unsupported,
    warmup_kda_single_token,
)

# Triton compiles the kernel for these; older devices lack bfloat16 arithmetic.
MIN_COMPUTE_CAPABILITY = (8, 0)


def one_launch_unmet(
    compute_capability: tuple[int, int] | None, geometry: LayerGeometry
) -> list[str]:
    """List what keeps the one-launch kernel from running this layer.

    Args:
        compute_capability: Of the CUDA device, or None without one.
        geometry: The layer's geometry and dtypes.

    Returns:
        One line for each unmet requirement; empty if it can run.
    """
    unmet = []
    if compute_capability is None:
        unmet.append("it needs a CUDA device and found none")
    elif compute_capability < MIN_COMPUTE_CAPABILITY:
        major, minor = compute_capability
        unmet.append(f"it needs compute capability 8.0 and found {major}.{minor}")
    if geometry.lower_bound is None:
        unmet.append("it needs a bounded gate and found none")
    reason = kda_single_token_unsupported(
        geometry.num_heads,
        geometry.head_dim,
        geometry.conv_width,
        geometry.model_dtype,
        geometry.conv_dtype,
        geometry.state_dtype,
    )
    return unmet if reason is None else [*unmet, reason]


class OneLaunchDecode:
    """Plain one-token decode in one launch, convolution included, for one layer."""

    def __init__(self, device: torch.device) -> None:
        """Take what must outlive the caches.

        Args:
            device: The layer's device.
        """
        self.constants = {"arrivals": arrival_counters(device)}
        self._state: LayerState | None = None

    def bind(self, state: LayerState, projection_width: int) -> None:
        """See :class:`~.backend.KDADecodeBackend`."""
        self._state = state
        warmup_kda_single_token(
            state.conv_state,
            state.conv_weight,
            state.A_log,
            state.dt_bias,
            state.norm_weight,
            state.recurrent_state,
            row_stride=projection_width,
            lower_bound=state.lower_bound,
            eps=state.eps,
            scale=state.scale,
            arrivals=self.constants["arrivals"],
        )

    def unbind(self) -> None:
        """See :class:`~.backend.KDADecodeBackend`."""
        self._state = None

    def refusal(self, call: Call, step: DecodeStep) -> str | None:
        """See :class:`~.backend.KDADecodeBackend`."""
        for name in ("mixed_qkv", "raw_beta"):
            if getattr(step, name).stride(1) != 1:
                return f"{name} is not contiguous within a row"
        inner = (step.output.shape[2], 1)
        for name in ("raw_g", "z", "output"):
            if getattr(step, name).stride()[1:] != inner:
                return f"{name} is not contiguous within a row"
        return None

    def run(self, call: Call, step: DecodeStep) -> None:
        """See :class:`~.backend.KDADecodeBackend`."""
        state = self._state
        kda_single_token(
            step.mixed_qkv,
            state.conv_state,
            state.conv_weight,
            step.raw_g,
            step.raw_beta,
            step.z,
            state.A_log,
            state.dt_bias,
            state.norm_weight,
            state.recurrent_state,
            step.state_indices[:, 0],
            step.output,
            lower_bound=state.lower_bound,
            eps=state.eps,
            scale=state.scale,
            arrivals=self.constants["arrivals"],
        )
