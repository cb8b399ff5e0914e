# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""GLM-5.3 with a KDA layer that routes its decode steps.

Importing this module makes vLLM build :class:`Glm5NextDecodeLinearAttention`
wherever its model builds ``Glm5NextLinearAttention``; the model classes are vLLM's
own.
"""

import torch
from transformers import Glm5NextTextConfig

from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.mamba.gdn.kda_decode.b12x import installed_b12x
from vllm.model_executor.layers.mamba.gdn.kda_decode.backend import (
    KDADecodeBackend,
    Resolution,
    make_backend,
    resolve_kda_decode_backend,
)
from vllm.model_executor.layers.mamba.gdn.kda_decode.constants import DecodeConstants
from vllm.model_executor.layers.mamba.gdn.kda_decode.routes import (
    ROUTES,
    BatchKind,
    Call,
    Capability,
    batch_kind,
)
from vllm.model_executor.layers.mamba.gdn.kda_decode.step import (
    DecodeStep,
    LayerGeometry,
    LayerState,
    decode_step,
)
from vllm.models.glm5next import (
    Glm5NextForCausalLM,
    Glm5NextForConditionalGeneration,
    Glm5NextMTP,
)
from vllm.models.glm5next.common.kda import Glm5NextLinearAttention
from vllm.platforms import current_platform
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

__all__ = [
    "Glm5NextDecodeLinearAttention",
    "Glm5NextForCausalLM",
    "Glm5NextForConditionalGeneration",
    "Glm5NextMTP",
]

logger = init_logger(__name__)


class Glm5NextDecodeLinearAttention(Glm5NextLinearAttention):
    """GLM-5.3's KDA layer, with the decode call chosen step by step.

    Weights, state shapes, KV-cache spec and prefill are the base class's. What
    differs: the gated output norm runs inside the graph break, because the fused
    decode calls apply it themselves, and a decode step goes to the call that
    :data:`~.routes.ROUTES` names.

    Attributes:
        decode_resolution: The backend choice.
        last_call: The call that took the latest step, or None before the first.
    """

    def __init__(
        self,
        config: Glm5NextTextConfig,
        vllm_config: VllmConfig,
        prefix: str = "",
    ) -> None:
        """Build the base layer and settle the decode backend.

        Args:
            config: The model's text configuration.
            vllm_config: ``additional_config["kda_decode_backend"]`` names the
                decode backend.
            prefix: The layer's name.

        Raises:
            ValueError: The configured backend name is unknown here.
            RuntimeError: The configured backend cannot run here.
        """
        super().__init__(config, vllm_config, prefix)
        self._projection_widths = [
            3 * self.local_projection_size,
            self.local_num_heads,
            self.head_dim,
            self.head_dim,
        ]
        self.last_call: Call | None = None
        self._decode: KDADecodeBackend | None = None
        self._settle_decode_backend(vllm_config)
        self._merged_conv_weight = self._merge_conv_weights()

    def _settle_decode_backend(self, vllm_config: VllmConfig) -> None:
        options = vllm_config.additional_config
        requested = "auto"
        if isinstance(options, dict):
            requested = options.get("kda_decode_backend", requested)
        geometry = self._geometry(vllm_config)
        b12x = installed_b12x()
        self.decode_resolution = resolve_kda_decode_backend(
            requested,
            b12x=b12x,
            compute_capability=_compute_capability(),
            geometry=geometry,
        )
        self._decode = make_backend(
            self.decode_resolution,
            b12x=b12x,
            geometry=geometry,
            device=self.A_log.device,
            capture_sizes=tuple(
                vllm_config.compilation_config.cudagraph_capture_sizes or ()
            ),
        )
        if self._decode is not None:
            self.decode_constants = DecodeConstants(self._decode.constants)
        _log_resolution(self.decode_resolution)

    def _geometry(self, vllm_config: VllmConfig) -> LayerGeometry:
        conv_dtype, state_dtype = self.get_state_dtype()
        return LayerGeometry(
            num_heads=self.local_num_heads,
            head_dim=self.head_dim,
            conv_width=self.conv_size,
            num_spec=self.num_spec,
            model_dtype=vllm_config.model_config.dtype,
            conv_dtype=conv_dtype,
            state_dtype=state_dtype,
            lower_bound=self.kda_lower_bound,
            max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
        )

    def _merge_conv_weights(self) -> torch.Tensor:
        """Make the q, k and v convolution weights views of one tensor.

        A loader then writes into the merged weight, so a reload needs no second
        merge, and a captured graph reads the new values.

        Returns:
            ``[3 * H * D, W]`` float32, rows q | k | v. The rows of a tap are adjacent,
            which a decode step reads fastest; on vLLM's own path the taps of a row
            are, as vLLM has them.
        """
        convs = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        merged = torch.cat([conv.weight.data for conv in convs]).squeeze(1)
        if self.decode_resolution.capability is not Capability.VLLM:
            merged = merged.t().contiguous().t()
        for conv, part in zip(convs, merged.chunk(len(convs)), strict=True):
            conv.weight.data = part.unsqueeze(1)
        return merged

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """Take the caches, and prepare the decode backend for them.

        Everything that compiles does so here: graphs may be captured right after.

        Args:
            kv_cache: ``[slots, 1, 1, bytes]`` int8 pages, one per slot.

        Raises:
            RuntimeError: The backend was asked for by name and cannot be prepared.
        """
        super().bind_kv_cache(kv_cache)
        if self._decode is None:
            return
        try:
            self._decode.bind(self._layer_state(), sum(self._projection_widths))
        except Exception as error:
            self._decline(error)

    def _decline(self, error: Exception) -> None:
        """Do without a B12X that cannot be prepared, if ``auto`` chose it.

        Preparing is the last part of probing the optional package: no state was
        touched yet.
        """
        resolution = self.decode_resolution
        if resolution.requested != "auto" or resolution.backend != "b12x":
            raise RuntimeError(
                f"kda_decode_backend={resolution.requested!r} cannot be prepared for "
                f"{self.prefix}: {error}"
            ) from error
        self._decode = None
        self.decode_resolution = Resolution(
            resolution.requested,
            Capability.VLLM,
            f"b12x not used: preparing it failed ({type(error).__name__}: {error})",
        )
        _log_resolution(self.decode_resolution)

    def _layer_state(self) -> LayerState:
        conv_state, recurrent_state = self.kv_cache
        if not self._conv_state_dim_first:
            conv_state = conv_state.transpose(-1, -2)
        return LayerState(
            conv_weight=self._merged_conv_weight,
            A_log=self.A_log.view(-1),
            dt_bias=self.dt_bias.view(-1, self.head_dim),
            norm_weight=self.o_norm.weight,
            conv_state=conv_state,
            recurrent_state=recurrent_state,
            lower_bound=self.kda_lower_bound,
            eps=self.o_norm.eps,
            scale=self.head_dim**-0.5,
        )

    def forward(
        self, hidden_states: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Run the layer.

        Args:
            hidden_states: ``[N, hidden]`` in the model dtype.
            positions: Unused; part of the attention layers' common signature.

        Returns:
            ``[N, hidden]``.
        """
        projected = self.in_proj_qkvbfg_a(hidden_states)[0]
        mixed_qkv, raw_beta, forget, gate = projected.split(
            self._projection_widths, dim=-1
        )
        heads = (-1, self.local_num_heads, self.head_dim)
        raw_g = self.f_b_proj(forget)[0].view(heads)
        z = self.g_b_proj(gate)[0].view(heads)
        output = torch.empty_like(z)
        self._attend(mixed_qkv, raw_g, raw_beta, z, output)
        return self.o_proj(output.flatten(1))[0]

    @eager_break_during_capture
    def _attend(
        self,
        mixed_qkv: torch.Tensor,
        raw_g: torch.Tensor,
        raw_beta: torch.Tensor,
        z: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Do everything between the projections and ``o_proj``, into ``output``.

        Rows past the step's tokens become zero, so that whatever the allocator left
        there goes no further.
        """
        metadata = self._step_metadata()
        n = 0 if metadata is None else metadata.num_actual_tokens
        if n < output.shape[0]:
            output[n:].zero_()
        if n == 0:
            return
        kind = batch_kind(metadata)
        call, step = Call.VLLM, None
        if self._decode is not None and kind is not BatchKind.OTHER:
            step = decode_step(
                self.layer_idx, kind, metadata, mixed_qkv, raw_g, raw_beta, z, output
            )
            call = self._choose_call(step)
        self.last_call = call
        if call is not Call.VLLM:
            self._decode.run(call, step)
            return
        self._forward(
            qkv_proj_states=mixed_qkv,
            g1=raw_g.unsqueeze(0),
            beta=raw_beta.unsqueeze(0),
            core_attn_out=output.unsqueeze(0),
        )
        self._apply_output_norm(output[:n], z[:n])

    def _step_metadata(self) -> GDNAttentionMetadata | None:
        """This layer's metadata; profile and dummy runs have none."""
        metadata = get_forward_context().attn_metadata
        return None if metadata is None else metadata.get(self.prefix)

    def _choose_call(self, step: DecodeStep) -> Call:
        """The first call of the table's row whose requirements ``step`` meets."""
        assert self._decode is not None
        for call in ROUTES[self.decode_resolution.capability, step.kind]:
            if call is Call.VLLM:
                break
            refusal = self._decode.refusal(call, step)
            if refusal is None:
                break
            logger.info_once(
                "KDA decode: %s does not take %s steps in which %s.",
                call.value,
                step.kind.value,
                refusal,
            )
        return call

    def _apply_output_norm(self, output: torch.Tensor, z: torch.Tensor) -> None:
        """Normalize and gate ``output`` in place; both ``[n, H, D]``."""
        normed = self.o_norm(output, z)
        # The fused kernel writes over its input; the decomposed form, which a user
        # can select with custom_ops, returns a new tensor.
        if normed.data_ptr() != output.data_ptr():
            output.copy_(normed)


def _compute_capability() -> tuple[int, int] | None:
    if not current_platform.is_cuda():
        return None
    capability = current_platform.get_device_capability()
    return None if capability is None else (capability.major, capability.minor)


def _log_resolution(resolution: Resolution) -> None:
    single_token = ROUTES[resolution.capability, BatchKind.SINGLE_TOKEN][0]
    declined = f"; {resolution.declined}" if resolution.declined else ""
    logger.info_once(
        "GLM-5.3 KDA decode backend: %s (requested: %s); one-token steps: %s%s",
        resolution.backend,
        resolution.requested,
        single_token.value,
        declined,
    )


def _replace_vllm_layer() -> None:
    name = Glm5NextLinearAttention.__name__
    if name not in op_registry_oot:
        Glm5NextLinearAttention.register_oot(Glm5NextDecodeLinearAttention)
    elif op_registry_oot[name] is not Glm5NextDecodeLinearAttention:
        logger.warning_once(
            "Another plugin (%s) already replaces %s: the KDA decode plugin stands "
            "down. Uninstall one of them.",
            op_registry_oot[name].__module__,
            name,
            scope="process",
        )


_replace_vllm_layer()
