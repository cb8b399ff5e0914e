# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A real GLM-5.3 KDA layer outside an engine, for tests, checks and benchmarks.

The layer is built by vLLM from a real ``VllmConfig``, its metadata by vLLM's own
builder, and its kernels are the ones that serve: on a machine without a GPU they
run in Triton's interpreter (:func:`use_interpreter` must come first).
"""

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import torch

# The checkpoint's own numbers; a tensor-parallel share divides the heads.
GLM53_HEADS = 64
HEAD_DIM = 128

_INTERPRETER_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}


def interpreter_environment() -> dict[str, str]:
    """Variables that put Triton in its interpreter, for a machine without a GPU.

    They must be set before Triton is imported.
    """
    return dict(_INTERPRETER_ENVIRONMENT)


def use_interpreter() -> None:
    """Mend what keeps vLLM's KDA kernels from running in Triton's interpreter.

    Without a driver pinned memory cannot be had, and the recurrence's ``exp`` is a
    device function that the interpreter cannot call. Call this before vLLM's
    utilities are imported: they look for pinned memory once.

    Raises:
        RuntimeError: The variables of :func:`interpreter_environment` are not set.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(
            "Triton's interpreter was asked for without TRITON_INTERPRET=1 in the "
            "environment; set it, and CUDA_VISIBLE_DEVICES to nothing, before Python "
            "starts"
        )
    from vllm.platforms.interface import Platform

    Platform.is_pin_memory_available = classmethod(lambda cls: False)

    from vllm.models.glm5next.nvidia.ops.third_party.kda import fused_recurrent
    from vllm.triton_utils import tl

    fused_recurrent.exp = lambda x: tl.exp(x)


@dataclass(frozen=True)
class LayerOptions:
    """What a layer under test is built with.

    Attributes:
        num_heads: Local heads; the layer is one rank's share.
        hidden_size: Width of the residual stream.
        num_spec: Draft tokens; 0 configures no speculation.
        backend: ``kda_decode_backend``, or None to leave it unset.
        max_num_seqs: The scheduler's limit on requests in a step.
        state_dtype: ``mamba_ssm_cache_dtype``: auto, float32 or bfloat16.
        capture_sizes: CUDA graph sizes that the configuration announces.
        conv_layout: ``VLLM_SSM_CONV_STATE_LAYOUT``: SD or DS.
    """

    num_heads: int = 2
    hidden_size: int = 256
    num_spec: int = 0
    backend: str | None = None
    max_num_seqs: int = 16
    state_dtype: str = "auto"
    capture_sizes: tuple[int, ...] = ()
    conv_layout: str = "SD"


def _model_config(options: LayerOptions, folder: Path) -> Any:
    from transformers import Glm5NextTextConfig

    from vllm.config import ModelConfig

    heads = options.num_heads
    text = Glm5NextTextConfig(
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        mlp_layer_types=["dense"],
        indexer_types=["full"],
        n_routed_experts=1,
        hidden_size=options.hidden_size,
        linear_num_heads=heads,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=128,
        moe_intermediate_size=128,
        vocab_size=512,
        pad_token_id=0,
    ).to_dict()
    text.pop("transformers_version", None)
    # Keys that vLLM reads and the transformers class does not declare.
    text |= {
        "architectures": ["Glm5NextForCausalLM"],
        "dtype": "bfloat16",
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "mla_use_nope": True,
        "indexer_rope_interleave": True,
        "mhc": False,
        "max_position_embeddings": 65536,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(text))
    return ModelConfig(
        model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", seed=0
    )


def make_config(options: LayerOptions, device: torch.device) -> Any:
    """Build the ``VllmConfig`` of a one-layer GLM-5.3 text model.

    Args:
        options: The layer's options.
        device: Where the layer will live.

    Returns:
        A validated ``VllmConfig``.
    """
    from vllm.config import (
        CacheConfig,
        CompilationConfig,
        DeviceConfig,
        ParallelConfig,
        SchedulerConfig,
        SpeculativeConfig,
        VllmConfig,
    )

    with tempfile.TemporaryDirectory() as folder:
        model = _model_config(options, Path(folder))
        parallel = ParallelConfig()
        speculation = None
        if options.num_spec:
            speculation = SpeculativeConfig(
                method="ngram",
                num_speculative_tokens=options.num_spec,
                prompt_lookup_max=2,
                target_model_config=model,
                target_parallel_config=parallel,
            )
        sizes = {"cudagraph_capture_sizes": list(options.capture_sizes)}
        config = VllmConfig(
            model_config=model,
            cache_config=CacheConfig(
                enable_prefix_caching=False, mamba_ssm_cache_dtype=options.state_dtype
            ),
            parallel_config=parallel,
            scheduler_config=SchedulerConfig(
                max_num_seqs=options.max_num_seqs,
                max_num_batched_tokens=max(2048, options.max_num_seqs),
                max_model_len=model.max_model_len,
                is_encoder_decoder=False,
            ),
            device_config=DeviceConfig(device.type),
            compilation_config=CompilationConfig(
                **sizes if options.capture_sizes else {}
            ),
            speculative_config=speculation,
            additional_config={}
            if options.backend is None
            else {"kda_decode_backend": options.backend},
        )
    return config


def init_single_process(config: Any, device: torch.device) -> None:
    """Start what an engine's worker starts, with a world of one, once per process.

    Args:
        config: A ``VllmConfig`` to start it under.
        device: Where layers will run; prefill takes its workspace there.
    """
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        init_distributed_environment,
        initialize_model_parallel,
        model_parallel_is_initialized,
    )
    from vllm.v1.worker.workspace import (
        init_workspace_manager,
        is_workspace_manager_initialized,
    )

    if not is_workspace_manager_initialized():
        init_workspace_manager(device)
    if model_parallel_is_initialized():
        return
    store = Path(tempfile.mkdtemp()) / "store"
    with set_current_vllm_config(config):
        init_distributed_environment(
            world_size=1,
            rank=0,
            distributed_init_method=f"file://{store}",
            local_rank=0,
            backend="gloo",
        )
        initialize_model_parallel(1)


@contextmanager
def vllm_own_layer() -> Iterator[None]:
    """Let vLLM build its own KDA layer here, not the replacement."""
    from vllm.model_executor.custom_op import op_registry_oot

    name = "Glm5NextLinearAttention"
    replacement = op_registry_oot.pop(name, None)
    try:
        yield
    finally:
        if replacement is not None:
            op_registry_oot[name] = replacement


@dataclass
class Batch:
    """One scheduler step, in the terms of vLLM's ``CommonAttentionMetadata``.

    Attributes:
        query_lens: Tokens of each request in this step.
        slots: ``[requests, columns]`` state slots; 0 is the null slot.
        computed: Tokens of each request before this step.
        drafts: Draft tokens of each request, -1 for a request that does not
            speculate; None for a step without speculation.
        accepted: Tokens of each request's last step that were kept.
        prefilling: Requests still in their prompt.
        padded_tokens: Tokens that the step is padded to, as FULL graphs do.
        padded_requests: Rows that the step is padded to.
    """

    query_lens: Sequence[int]
    slots: Sequence[Sequence[int]]
    computed: Sequence[int] | None = None
    drafts: Sequence[int] | None = None
    accepted: Sequence[int] | None = None
    prefilling: Sequence[bool] | None = None
    padded_tokens: int | None = None
    padded_requests: int | None = None

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)


@dataclass
class LayerUnderTest:
    """A bound layer with what is needed to drive it.

    Attributes:
        layer: The layer; vLLM's own or its replacement.
        config: Its ``VllmConfig``.
        builder: vLLM's metadata builder for it.
        pages: ``[slots, 1, 1, bytes]`` int8, what ``bind_kv_cache`` got.
        device: Where it lives.
        seen: The last step's tensors, by the names of the decode reference.
    """

    layer: Any
    config: Any
    builder: Any
    device: torch.device
    pages: torch.Tensor
    seen: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def conv_state(self) -> torch.Tensor:
        """``[slots, 3 * H * D, columns]``, whatever the memory layout."""
        conv = self.layer.kv_cache[0]
        return conv if self.layer._conv_state_dim_first else conv.transpose(-1, -2)

    @property
    def recurrent_state(self) -> torch.Tensor:
        """``[slots, H, D, D]``."""
        return self.layer.kv_cache[1]

    def metadata(self, batch: Batch) -> Any:
        """Build a step's metadata with vLLM's builder."""
        return self.builder.build(
            0, common_metadata(batch, self.device), **speculation(batch, self.device)
        )

    def run(self, hidden_states: torch.Tensor, metadata: Any) -> torch.Tensor:
        """Run the layer's forward pass in a forward context.

        Args:
            hidden_states: ``[N, hidden]``.
            metadata: From :meth:`metadata`, or None for a dummy run.

        Returns:
            ``[N, hidden]``.
        """
        from vllm.config import set_current_vllm_config
        from vllm.forward_context import set_forward_context

        by_layer = None if metadata is None else {self.layer.prefix: metadata}
        positions = torch.zeros(
            hidden_states.shape[0], dtype=torch.long, device=self.device
        )
        with (
            torch.inference_mode(),
            set_current_vllm_config(self.config),
            set_forward_context(by_layer, self.config),
        ):
            return self.layer(hidden_states, positions)


def common_metadata(batch: Batch, device: torch.device) -> Any:
    """Turn a batch into vLLM's ``CommonAttentionMetadata``.

    Args:
        batch: The step.
        device: Where its tensors go.

    Returns:
        The metadata, padded as the batch says.
    """
    from vllm.v1.attention.backend import CommonAttentionMetadata

    rows = batch.padded_requests or len(batch.query_lens)
    padding = rows - len(batch.query_lens)
    lens = torch.tensor([*batch.query_lens] + [0] * padding, dtype=torch.int32)
    computed = torch.tensor(
        [*(batch.computed or [1] * len(batch.query_lens))] + [0] * padding,
        dtype=torch.int32,
    )
    starts = torch.zeros(rows + 1, dtype=torch.int32)
    torch.cumsum(lens, 0, out=starts[1:])
    slots = torch.tensor(batch.slots, dtype=torch.int32)
    table = torch.zeros(rows, slots.shape[1], dtype=torch.int32)
    table[: slots.shape[0]] = slots
    prefilling = torch.zeros(rows, dtype=torch.bool)
    if batch.prefilling is not None:
        prefilling[: len(batch.prefilling)] = torch.tensor(batch.prefilling)
    tokens = batch.padded_tokens or batch.num_tokens
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=(computed + lens).to(device),
        seq_lens_cpu_upper_bound=computed + lens,
        num_reqs=rows,
        num_actual_tokens=tokens,
        max_query_len=int(lens.max()) if rows else 0,
        max_seq_len=int((computed + lens).max()) if rows else 0,
        block_table_tensor=table.to(device),
        slot_mapping=torch.zeros(tokens, dtype=torch.long, device=device),
        is_prefilling=prefilling,
    )


def speculation(batch: Batch, device: torch.device) -> dict[str, torch.Tensor]:
    """What the builder is told of a batch's drafts, by argument name; empty if none.

    Args:
        batch: The step.
        device: Where its tensors go.
    """
    if batch.drafts is None:
        return {}
    rows = batch.padded_requests or len(batch.query_lens)
    drafts = torch.full((rows,), -1, dtype=torch.int32)
    drafts[: len(batch.drafts)] = torch.tensor(batch.drafts, dtype=torch.int32)
    accepted = torch.ones(rows, dtype=torch.int32)
    if batch.accepted is not None:
        accepted[: len(batch.accepted)] = torch.tensor(batch.accepted)
    return {
        "num_accepted_tokens": accepted.to(device),
        "num_decode_draft_tokens_cpu": drafts,
    }


def build_layer(
    options: LayerOptions,
    *,
    num_slots: int,
    device: torch.device | str = "cpu",
    stock: bool = False,
    b12x: Any = None,
    seed: int = 0,
    page_padding: int = 256,
) -> LayerUnderTest:
    """Build a layer with random weights and bind random caches to it.

    Args:
        options: The layer's options.
        num_slots: State slots, the null slot 0 included.
        device: Where it lives.
        stock: Build vLLM's own class rather than its replacement.
        b12x: ``B12xFeatures`` that the layer is to find, on a device of B12X's
            family; None for what is installed, on the device that is there.
        seed: Seed of weights and caches; equal seeds give equal layers.
        page_padding: Bytes after each page, as a padded pool has them.

    Returns:
        The layer, ready to run.
    """
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder

    device = torch.device(device)
    config = make_config(options, device)
    init_single_process(config, device)
    with ExitStack() as stack:
        stack.enter_context(set_current_vllm_config(config))
        stack.enter_context(_conv_layout(options.conv_layout))
        layer = _construct(config, device, stock, b12x)
        fill_weights(layer, seed)
        pages = make_pages(layer, num_slots, device, seed, page_padding)
        layer.bind_kv_cache(pages)
        builder = GDNAttentionMetadataBuilder(
            layer.get_kv_cache_spec(config), [layer.prefix], config, device
        )
    return LayerUnderTest(layer, config, builder, device, pages)


@contextmanager
def _conv_layout(layout: str) -> Iterator[None]:
    """Answer for the environment variable, which vLLM reads once per process."""
    from vllm.model_executor.layers.mamba import mamba_utils

    with mock.patch.object(mamba_utils, "get_conv_state_layout", lambda: layout):
        yield


def _construct(config: Any, device: torch.device, stock: bool, b12x: Any) -> Any:
    from vllm.models.glm5next import decode_kda
    from vllm.models.glm5next.common.kda import Glm5NextLinearAttention
    from vllm.utils.torch_utils import set_default_torch_dtype

    with ExitStack() as stack:
        stack.enter_context(set_default_torch_dtype(torch.bfloat16))
        stack.enter_context(device)
        if stock:
            stack.enter_context(vllm_own_layer())
        if b12x is not None:
            found = {"installed_b12x": b12x, "_compute_capability": (12, 0)}
            for name, value in found.items():
                stack.enter_context(
                    mock.patch.object(decode_kda, name, lambda value=value: value)
                )
        return Glm5NextLinearAttention(
            config.model_config.hf_text_config, config, "model.layers.0.self_attn"
        )


@torch.no_grad()
def fill_weights(layer: torch.nn.Module, seed: int) -> None:
    """Give every parameter a value of a realistic scale, in place.

    Args:
        layer: The layer.
        seed: Equal seeds give equal weights on any device.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(layer.named_parameters()):
        value = torch.randn(parameter.shape, generator=generator)
        if name == "A_log":
            value = value.abs().log()
        elif name == "o_norm.weight":
            value = 1 + 0.1 * value
        elif "conv1d" in name:
            value = 0.5 * value
        elif name != "dt_bias":
            value = value * parameter.shape[-1] ** -0.5
        parameter.copy_(value)


def make_pages(
    layer: Any, num_slots: int, device: torch.device, seed: int, padding: int = 256
) -> torch.Tensor:
    """Make a pool of state pages with random states in it.

    Args:
        layer: The layer whose states the pages hold.
        num_slots: Pages.
        device: Where they go.
        seed: Equal seeds give equal states on devices of one type.
        padding: Bytes between a page's states and the next page.

    Returns:
        ``[num_slots, 1, 1, bytes]`` int8.
    """
    shapes = list(zip(layer.get_state_shape(), layer.get_state_dtype(), strict=True))
    size = sum(prod(shape) * dtype.itemsize for shape, dtype in shapes)
    pages = torch.zeros(
        num_slots, 1, 1, size + padding, dtype=torch.int8, device=device
    )
    generator = torch.Generator(device).manual_seed(seed + 1)
    offset = 0
    for shape, dtype in shapes:
        width = prod(shape) * dtype.itemsize
        state = torch.randn(num_slots, prod(shape), generator=generator, device=device)
        pages[:, 0, 0, offset : offset + width] = (
            state.mul_(0.3).to(dtype).view(torch.int8)
        )
        offset += width
    return pages
