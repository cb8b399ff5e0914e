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
from vllm.model_executor.layers.mamba.gdn.kda_decode.b12x import (
    B12xFeatures,
    installed_b12x,
)
from vllm.model_executor.layers.mamba.gdn.kda_decode.backend import (
    Resolution,
    make_backend,
    resolve_kda_decode_backend,
    without_b12x,
)
from vllm.model_executor.layers.mamba.gdn.kda_decode.constants import DecodeConstants
from vllm.model_executor.layers.mamba.gdn.kda_decode.conv_weight import (
    is_merged,
    keep_in_step,
    merge_in_place,
    versions,
)
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
        self._convs = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        self._merged_conv_weight = merge_in_place(self._convs)
        self.last_call: Call | None = None
        self._b12x = installed_b12x()
        self._compute_capability = _compute_capability()
        self._geometry = self._layer_geometry(vllm_config)
        self._capture_sizes = tuple(
            vllm_config.compilation_config.cudagraph_capture_sizes or ()
        )
        # Some loaders build the model on the meta device and replace what it holds.
        self._device = torch.empty(0, device=vllm_config.device_config.device).device
        options = vllm_config.additional_config
        requested = "auto"
        if isinstance(options, dict):
            requested = options.get("kda_decode_backend", requested)
        self._take(
            resolve_kda_decode_backend(
                requested,
                b12x=self._b12x,
                compute_capability=self._compute_capability,
                geometry=self._geometry,
            )
        )

        if self._decode is not None:
            merged = self._merged_conv_weight.t()
            by_tap = torch.empty(merged.shape, dtype=merged.dtype, device=self._device)
            self.conv_weight_by_tap = DecodeConstants({"weight": by_tap})
            keep_in_step(self._convs, by_tap)

    def _take(self, resolution: Resolution) -> None:
        """Build the backend that a resolution names, and say so."""
        self.decode_resolution = resolution
        self._decode = make_backend(
            resolution,
            b12x=self._b12x,
            geometry=self._geometry,
            device=self._device,
            capture_sizes=self._capture_sizes,
        )
        if self._decode is not None:
            self.decode_constants = DecodeConstants(self._decode.constants)
        _log_resolution(resolution, self._b12x)

    def _layer_geometry(self, vllm_config: VllmConfig) -> LayerGeometry:
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

    @property
    def kv_cache(self) -> tuple[torch.Tensor, ...]:
        """Convolution and recurrent states; empty where no cache is bound."""
        return self._kv_cache

    @kv_cache.setter
    def kv_cache(self, caches: tuple[torch.Tensor, ...]) -> None:
        """Take caches, or let go of those that vLLM takes back to free them."""
        self._kv_cache = caches
        backend = getattr(self, "_decode", None)
        if not len(caches) and backend is not None:
            backend.unbind()

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """Take the caches, and prepare the decode backend for them.

        Everything that compiles does so here: graphs may be captured right after.

        Args:
            kv_cache: ``[slots, 1, 1, bytes]`` int8 pages, one per slot.

        Raises:
            RuntimeError: The backend cannot be prepared, or not with weights that are
                offloaded. Where ``auto`` chose B12X, another takes its place instead.
        """
        super().bind_kv_cache(kv_cache)
        merged = self._merged_conv_weight
        if merged is None or not is_merged(self._convs, merged):
            self._leave_moved_weights_to_vllm()
        if self._decode is None:
            return
        try:
            self._bind_decode()
        except Exception as error:
            self._decline(error)

    def _bind_decode(self) -> None:
        self._conv_versions = None
        self._follow_conv_weight()
        conv_weight = self.conv_weight_by_tap.weight.t()
        self._decode.bind(self._layer_state(conv_weight), sum(self._projection_widths))

    def _follow_conv_weight(self) -> None:
        """Take convolution weights that were written past their loaders.

        A prefill step asks: a request decodes with new weights only after one.
        """
        found = versions(self._convs)
        if found != self._conv_versions:
            self._conv_versions = found
            self.conv_weight_by_tap.weight.copy_(self._merged_conv_weight.t())

    def _leave_moved_weights_to_vllm(self) -> None:
        """Run vLLM's own path where the convolution weights are not this layer's.

        vLLM then merges them itself at its first step.
        """
        requested = self.decode_resolution.requested
        reason = "the weights were moved after the layer was built (weight offload)"
        if requested not in ("auto", "triton"):
            raise RuntimeError(
                f"kda_decode_backend={requested!r} cannot run in {self.prefix}: "
                f"{reason}. Choose kda_decode_backend='triton', or do not offload."
            )
        self._merged_conv_weight = None
        if self._decode is not None:
            self._take(Resolution(requested, Capability.VLLM, f"not used: {reason}"))

    def _decline(self, error: Exception) -> None:
        """Do without a B12X that cannot be prepared, if ``auto`` chose it.

        Preparing is the last part of probing the optional package: no state was
        touched yet.
        """
        resolution = self.decode_resolution
        if resolution.requested != "auto" or resolution.backend != "b12x":
            raise RuntimeError(
                f"kda_decode_backend={resolution.requested!r} chose "
                f"{resolution.backend}, which cannot be prepared for {self.prefix}: "
                f"{error}. Choose kda_decode_backend='triton'."
            ) from error
        reason = f"preparing it failed ({type(error).__name__}: {error})"
        logger.warning_once("KDA decode does without b12x: %s", reason, scope="process")
        self._take(without_b12x(reason, self._compute_capability, self._geometry))
        if self._decode is not None:
            self._bind_decode()

    def _layer_state(self, conv_weight: torch.Tensor) -> LayerState:
        conv_state, recurrent_state = self.kv_cache
        if not self._conv_state_dim_first:
            conv_state = conv_state.transpose(-1, -2)
        return LayerState(
            conv_weight=conv_weight,
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
        calls = ROUTES[self.decode_resolution.capability, kind]
        call, step = Call.VLLM, None
        if calls[0] is not Call.VLLM:
            step = decode_step(
                self.layer_idx, kind, metadata, mixed_qkv, raw_g, raw_beta, z, output
            )
            call = self._first_that_takes(step, calls)
        self.last_call = call
        if call is not Call.VLLM:
            self._decode.run(call, step)
            return
        if self._decode is not None and kind is BatchKind.OTHER:
            self._follow_conv_weight()
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

    def _first_that_takes(self, step: DecodeStep, calls: tuple[Call, ...]) -> Call:
        """The first of ``calls`` whose requirements ``step`` meets."""
        for call in calls:
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
                scope="process",
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


def _log_resolution(resolution: Resolution, b12x: B12xFeatures) -> None:
    single_token = ROUTES[resolution.capability, BatchKind.SINGLE_TOKEN][0]
    more = f"; {resolution.declined}" if resolution.declined else ""
    if resolution.backend == "b12x":
        more = f"; b12x from {b12x.origin}"
    logger.info_once(
        "GLM-5.3 KDA decode backend: %s (requested: %s); one-token steps: %s%s",
        resolution.backend,
        resolution.requested,
        single_token.value,
        more,
        scope="process",
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
