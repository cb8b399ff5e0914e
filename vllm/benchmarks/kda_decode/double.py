# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A double of B12X's device entry points, for machines without a GPU.

B12X plans and prepares on a CUDA device only. The double stands in for that, for
binding and for ``run_kda`` and ``run_kda_single_token``, with their signatures and
their checks; what computes is B12X's own two KDA kernels, in Triton's interpreter,
and for the live generation B12X's own binding checks too. It needs b12x 1.5.1.
"""

from types import SimpleNamespace
from typing import Any

import torch
from b12x.sequence.gdn_decode import _impl, _kernels, _preparation
from b12x.sequence.gdn_decode._tuning import GdnConfig

from vllm.model_executor.layers.mamba.gdn.kda_decode.b12x import (
    B12xFeatures,
    probe_b12x,
)

_CONFIG = GdnConfig(backend="triton", recurrent_block_v=32)


class Caps(_impl.Caps):
    """B12X's capacity declaration, with its checks, on any device."""

    def __post_init__(self) -> None:
        device = torch.device(self.device)
        object.__setattr__(self, "device", torch.device("cuda", 0))
        super().__post_init__()
        object.__setattr__(self, "device", device)


class B12xDouble:
    """The module ``b12x.sequence.gdn_decode``, doubled.

    Attributes:
        calls: ``(entry point, arguments)`` of every call, in order.
    """

    def __init__(self, *, live: bool = True, single_token: bool = False) -> None:
        """Choose what the doubled package has.

        Args:
            live: It has ``invocation_from_tensors``: prepared plans and live
                operands. Otherwise bindings take buffers of full capacity.
            single_token: It has ``run_kda_single_token``.
        """
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.Caps = Caps
        generation = _LiveGeneration() if live else _StagedGeneration()
        self.plan = generation.plan
        self._generation = generation
        if live:
            self.invocation_from_tensors = _preparation.invocation_from_tensors
        if single_token:
            self.run_kda_single_token = self._run_kda_single_token

    def features(self) -> B12xFeatures:
        """Probe the double as an installed package is probed."""
        return probe_b12x(self, _Preparation)

    def is_supported(self, device: Any = None) -> bool:
        return True

    def bind_kda(self, plan: Any, **operands: Any) -> Any:
        self.calls.append(("bind_kda", operands))
        return self._generation.bind(plan, operands)

    def run_kda(
        self,
        binding: Any,
        *,
        lower_bound: float = -5.0,
        eps: float = 1e-6,
        scale: float | None = None,
    ) -> torch.Tensor:
        options = {"lower_bound": lower_bound, "eps": eps, "scale": scale}
        self.calls.append(("run_kda", options))
        return self._generation.run(binding, **options)

    def _run_kda_single_token(
        self,
        binding: Any,
        *,
        mixed_qkv: torch.Tensor,
        raw_g: torch.Tensor,
        raw_beta: torch.Tensor,
        z: torch.Tensor,
        state_indices: torch.Tensor,
        output: torch.Tensor,
        lower_bound: float = -5.0,
        eps: float = 1e-6,
        scale: float | None = None,
    ) -> torch.Tensor:
        live = {
            "mixed_qkv": mixed_qkv,
            "raw_g": raw_g,
            "raw_beta": raw_beta,
            "z": z,
            "state_indices": state_indices,
            "output": output,
        }
        options = {"lower_bound": lower_bound, "eps": eps, "scale": scale}
        self.calls.append(("run_kda_single_token", live | options))
        _check_single_token(self._generation.caps_of(binding), live)
        n = mixed_qkv.shape[0]
        _launch(
            self._generation.caps_of(binding),
            SimpleNamespace(
                **live,
                A_log=binding.A_log,
                dt_bias=binding.dt_bias,
                norm_weight=binding.norm_weight,
                recurrent_state=binding.recurrent_state,
                query_start_loc=torch.arange(n + 1, dtype=torch.int32),
                num_accepted_tokens=torch.ones(n, dtype=torch.int32),
                num_seqs=torch.tensor([n], dtype=torch.int32),
                num_tokens=torch.tensor([n], dtype=torch.int32),
            ),
            **options,
        )
        return output


def _check_single_token(caps: Caps, live: dict[str, torch.Tensor]) -> None:
    """The host checks of ``run_kda_single_token``."""
    n = live["mixed_qkv"].shape[0]
    if not 0 < n <= caps.max_tokens:
        raise ValueError(f"rows={n} exceed capacity {caps.max_tokens}")
    heads = (n, caps.value_heads, caps.value_head_dim)
    wants = {
        "mixed_qkv": ((n, caps.packed_qkv_width), True, (torch.bfloat16,)),
        "raw_g": (heads, True, (torch.bfloat16,)),
        "raw_beta": ((n, caps.value_heads), False, (torch.bfloat16,)),
        "z": (heads, True, (torch.bfloat16,)),
        "output": (heads, True, (torch.bfloat16,)),
        "state_indices": ((n, 1), True, (torch.int32, torch.int64)),
    }
    for name, (shape, contiguous, dtypes) in wants.items():
        _require(name, live[name], shape, contiguous, dtypes)
        if name != "output" and _impl._overlaps(live["output"], live[name]):
            raise ValueError(f"output must not overlap read-only tensor {name}")


def _require(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    contiguous: bool,
    dtypes: tuple[torch.dtype, ...],
) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} must have dtype in {dtypes}, got {tensor.dtype}")
    if contiguous and not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous")


def _layout(caps: Caps) -> Any:
    return _preparation._scratch_layout(caps, config=_CONFIG)


def _launch(caps: Caps, operands: Any, **options: Any) -> None:
    """Launch B12X's kernels through its own prepared state, on live operands."""
    tensors = vars(operands)
    tensors = {n: t for n, t in tensors.items() if isinstance(t, torch.Tensor)}
    invocation = _preparation.invocation_from_tensors(caps, **tensors)
    state = _state(caps, invocation)
    state.run_tensors(
        *_preparation._binding_tensors(
            _impl.KdaBinding(_state=state.layout, scratch=None, **tensors)
        ),
        eps=options["eps"],
        scale=caps.key_head_dim**-0.5 if options["scale"] is None else options["scale"],
        lower_bound=options["lower_bound"],
    )


def _state(caps: Caps, invocation: Any) -> Any:
    return _preparation._GdnState(
        query=_preparation._query_from_caps(caps, invocation),
        layout=_layout(caps),
        recurrent=_kernels._packed_sequential_kda_decode_kernel,
        norm=_kernels._gated_rmsnorm_kernel,
    )


class _LivePlan:
    """A declared plan; ``prepared`` becomes true in a session."""

    _made = 0

    def __init__(self, caps: Caps, invocation: Any) -> None:
        _LivePlan._made += 1
        self.handle = _LivePlan._made
        self.caps = caps
        self.state = _state(caps, invocation)
        self.prepared = False

    def memory_requirements(self) -> Any:
        return SimpleNamespace(scratch=self.state.layout.scratch_specs())

    def request(self, *, name: str, prepare_call: Any) -> Any:
        return SimpleNamespace(name=name, plan=self, prepare_call=prepare_call)


class _Session:
    def __init__(self, *, device: Any, autotune: bool, compile_workers: int) -> None:
        if autotune:
            raise ValueError("tuning would run an in-place kernel on live states")

    def prepare(self, requests: Any) -> None:
        for request in requests:
            request.prepare_call(request.plan.state).run()
            request.plan.prepared = True


class _Preparation:
    """The module ``b12x.preparation``, doubled."""

    PreparationSession = _Session
    PreparedCall = SimpleNamespace


class _LiveGeneration:
    """Plans for exact layouts; B12X's own checks at binding and at the run."""

    def plan(self, caps: Caps, *, invocation: Any) -> _LivePlan:
        return _LivePlan(caps, invocation)

    def bind(self, plan: _LivePlan, operands: dict[str, Any]) -> Any:
        if not plan.prepared:
            raise RuntimeError("the plan is not prepared")
        return plan.state.bind_kda(_plan=plan, **operands)

    def run(self, binding: Any, **options: Any) -> torch.Tensor:
        return binding.plan.state.run(binding, **options)

    def caps_of(self, binding: Any) -> Caps:
        return binding.plan.caps


class _StagedGeneration:
    """Plans for a capacity; operands at full capacity, checked when they run."""

    def plan(self, caps: Caps) -> Any:
        return SimpleNamespace(caps=caps, scratch_specs=_layout(caps).scratch_specs)

    def bind(self, plan: Any, operands: dict[str, Any]) -> Any:
        caps, seqs, tokens = plan.caps, plan.caps.max_seqs, plan.caps.max_tokens
        heads = (tokens, caps.value_heads, 128)
        int32, bf16 = (torch.int32,), (torch.bfloat16,)
        wants = {
            "mixed_qkv": ((tokens, caps.packed_qkv_width), bf16),
            "raw_g": (heads, bf16),
            "raw_beta": (heads[:2], bf16),
            "z": (heads, bf16),
            "output": (heads, bf16),
            "query_start_loc": ((seqs + 1,), int32),
            "num_accepted_tokens": ((seqs,), int32),
            "state_indices": (
                (seqs, caps.state_index_columns),
                (torch.int32, torch.int64),
            ),
            "num_seqs": ((1,), int32),
            "num_tokens": ((1,), int32),
        }
        for name, (shape, dtypes) in wants.items():
            _require(name, operands[name], shape, True, dtypes)
        operands.pop("scratch")
        return SimpleNamespace(plan=plan, **operands)

    def run(self, binding: Any, **options: Any) -> torch.Tensor:
        if _metadata_is_malformed(binding):
            return binding.output.fill_(torch.nan)
        _launch(binding.plan.caps, binding, **options)
        return binding.output

    def caps_of(self, binding: Any) -> Caps:
        return binding.plan.caps


def _metadata_is_malformed(binding: Any) -> bool:
    """What the older generation checks on the device before it touches a state."""
    seqs, tokens = int(binding.num_seqs), int(binding.num_tokens)
    caps, starts = binding.plan.caps, binding.query_start_loc
    if not (0 <= seqs <= caps.max_seqs and 0 <= tokens <= caps.max_tokens):
        return True
    lens = starts[: seqs + 1].diff()
    accepted = binding.num_accepted_tokens[:seqs]
    columns = caps.state_index_columns
    if starts[0] != 0 or starts[seqs] != tokens or bool((lens < 0).any()):
        return True
    if bool((lens > columns).any() | (accepted < 1).any() | (accepted > columns).any()):
        return True
    slots = [
        int(slot)
        for row, length in zip(binding.state_indices[:seqs], lens, strict=True)
        for slot in row[: int(length)]
        if slot != caps.null_state_index
    ]
    return len(slots) != len(set(slots)) or any(
        not 0 <= slot < caps.max_state_slots for slot in slots
    )
