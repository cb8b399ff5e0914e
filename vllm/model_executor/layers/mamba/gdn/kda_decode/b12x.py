# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""B12X as a decode backend: what the package offers, plans, bindings, calls.

B12X's packed ``run_kda`` exists in two generations, told apart by whether the
package has ``invocation_from_tensors``:

* with it, a plan is prepared for exact strides, alignments and slot count, and a
  binding takes live tensors (:class:`LivePacked`);
* without it, a binding takes buffers of full capacity, which the operands are
  staged through (:class:`StagedPacked`).

``run_kda_single_token`` takes live tensors in both.

Preconditions that B12X does not check and vLLM's metadata builder keeps: accepted
counts are at least 1, live state indices are in range and unique, and a row without
a request has state index 0.
"""

import importlib
import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from vllm.model_executor.layers.mamba.gdn.kda_decode.routes import BatchKind, Call
from vllm.model_executor.layers.mamba.gdn.kda_decode.step import (
    DecodeStep,
    LayerGeometry,
    LayerState,
    advance_conv,
)
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID

INSTALL_COMMAND = 'pip install "vllm[b12x]==0.33.0"'

_HEAD_DIM = 128
_MAX_COLUMNS = 8
# Requests x heads is a grid axis of B12X's recurrence, and CUDA caps all but the
# first axis here.
_MAX_GRID = 65_535
_ENTRY_POINTS = ("Caps", "plan", "bind_kda", "run_kda")


@dataclass(frozen=True)
class B12xFeatures:
    """What an installed B12X offers, found by looking and stored.

    Attributes:
        api: The module ``b12x.sequence.gdn_decode``, or None.
        missing: Why ``api`` cannot be used, or None.
        single_token: It has ``run_kda_single_token``.
        preparation: The module ``b12x.preparation`` where a packed binding takes
            live tensors (the package has ``invocation_from_tensors``), else None.
    """

    api: Any = None
    missing: str | None = "b12x is not installed"
    single_token: bool = False
    preparation: Any = None

    @property
    def origin(self) -> str:
        """Where ``api`` was found: FlashInfer's wheel carries a copy of B12X."""
        return getattr(self.api, "__file__", None) or type(self.api).__name__


@cache
def installed_b12x() -> B12xFeatures:
    """Import the optional package, once per process, and probe it."""
    try:
        api = importlib.import_module("b12x.sequence.gdn_decode")
    except ModuleNotFoundError as error:
        return B12xFeatures(missing=f"b12x is not installed ({error})")
    except Exception as error:
        return B12xFeatures(
            missing=f"b12x does not import ({type(error).__name__}: {error})"
        )
    return probe_b12x(api)


def probe_b12x(api: Any, preparation: Any = None) -> B12xFeatures:
    """Detect the features of a B12X module; never compares versions.

    Args:
        api: A module, or anything with the attributes of one.
        preparation: What prepares its plans; ``b12x.preparation`` if None. Used
            only where ``api`` has ``invocation_from_tensors``.

    Returns:
        The features; ``missing`` says what makes it unusable. A probe that raises
        makes it unusable too.
    """
    try:
        absent = [name for name in _ENTRY_POINTS if not hasattr(api, name)]
        if absent:
            return B12xFeatures(missing=f"b12x lacks {', '.join(absent)}")
        if not getattr(api, "is_supported", lambda: True)():
            return B12xFeatures(missing="b12x.is_supported() says no here")
        if not hasattr(api, "invocation_from_tensors"):
            preparation = None
        elif preparation is None:
            preparation = importlib.import_module("b12x.preparation")
        return B12xFeatures(
            api=api,
            missing=None,
            single_token=hasattr(api, "run_kda_single_token"),
            preparation=preparation,
        )
    except Exception as error:
        return B12xFeatures(
            missing=f"b12x cannot be probed ({type(error).__name__}: {error})"
        )


def b12x_unmet(
    features: B12xFeatures,
    compute_capability: tuple[int, int] | None,
    geometry: LayerGeometry,
) -> list[str]:
    """List what keeps B12X from running this layer, most basic first.

    Args:
        features: What the package offers.
        compute_capability: Of the CUDA device, or None without one.
        geometry: The layer's geometry and dtypes.

    Returns:
        One line for each unmet requirement; empty if B12X can run.
    """
    bf16_or_fp32 = (torch.bfloat16, torch.float32)
    bound = geometry.lower_bound
    requirements = (
        (features.missing is None, features.missing),
        (compute_capability is not None, "it needs a CUDA device and found none"),
        (
            geometry.head_dim == _HEAD_DIM,
            f"it needs head dimension {_HEAD_DIM} and found {geometry.head_dim}",
        ),
        (
            geometry.model_dtype == torch.bfloat16,
            f"it needs a bfloat16 model and found {geometry.model_dtype}",
        ),
        (
            geometry.conv_dtype == torch.bfloat16,
            f"it needs a bfloat16 convolution state and found {geometry.conv_dtype}",
        ),
        (
            geometry.state_dtype in bf16_or_fp32,
            "it needs a float32 or bfloat16 recurrent state and found "
            f"{geometry.state_dtype}",
        ),
        (
            bound is not None and math.isfinite(bound) and bound < 0,
            f"it needs a finite negative gate lower bound and found {bound}",
        ),
        (
            geometry.columns <= _MAX_COLUMNS,
            f"it takes at most {_MAX_COLUMNS - 1} draft tokens and found "
            f"{geometry.num_spec}",
        ),
    )
    return [reason for met, reason in requirements if not met]


def _constants(capacity: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Make the device constants of a layer.

    Counts lie 16 bytes apart, so that a one-element view of any of them has the
    alignment that a plan is prepared for.
    """
    steps = torch.arange(capacity + 1, dtype=torch.int32, device=device)
    counts = torch.zeros(capacity + 1, 4, dtype=torch.int32, device=device)
    counts[:, 0] = steps
    return {
        "counts": counts,
        "steps": steps,
        "ones": torch.ones(capacity, dtype=torch.int32, device=device),
    }


class B12xDecode:
    """B12X's decode calls for one layer."""

    def __init__(
        self,
        features: B12xFeatures,
        geometry: LayerGeometry,
        device: torch.device,
        warmup_batches: tuple[int, ...] = (),
    ) -> None:
        """Settle the capacity and take the constants.

        The constants are made here and not in :meth:`bind`: vLLM binds a temporary
        cache first, while it profiles. The layer keeps them in
        :class:`~.constants.DecodeConstants`.

        Args:
            features: A usable B12X.
            geometry: The layer's geometry and dtypes.
            device: The layer's device.
            warmup_batches: Batch sizes that will be captured; the single-token call
                compiles once for each.
        """
        self.features = features
        self.geometry = geometry
        self.device = device
        self.max_requests = min(geometry.max_num_seqs, _MAX_GRID // geometry.num_heads)
        self.max_tokens = self.max_requests * geometry.columns
        self.constants = _constants(self.max_tokens, device)
        self._warmup_batches = tuple(
            b for b in warmup_batches if b <= self.max_requests
        )
        self.state: LayerState | None = None
        self.packed: LivePacked | StagedPacked | None = None

    def bind(self, state: LayerState, projection_width: int) -> None:
        """See :class:`~.backend.KDADecodeBackend`."""
        live = self.features.preparation is not None
        self.state = state
        self.packed = (LivePacked if live else StagedPacked)(self, projection_width)
        if self.features.single_token:
            self._warm_up_single_token(projection_width)

    def unbind(self) -> None:
        """See :class:`~.backend.KDADecodeBackend`."""
        self.state = self.packed = None

    def refusal(self, call: Call, step: DecodeStep) -> str | None:
        """See :class:`~.backend.KDADecodeBackend`."""
        if step.num_requests > self.max_requests:
            return f"more than {self.max_requests} requests in a step"
        if call is Call.RUN_KDA_SINGLE_TOKEN:
            return _single_token_refusal(step)
        if step.num_tokens > step.num_requests * step.state_indices.shape[1]:
            return "more tokens than the requests' state-index columns"
        return self.packed.refusal(step)

    def run(self, call: Call, step: DecodeStep) -> None:
        """See :class:`~.backend.KDADecodeBackend`."""
        if call is Call.RUN_KDA_SINGLE_TOKEN:
            self._run_single_token(step)
        else:
            self.packed.run(step)

    def caps(self, num_slots: int) -> Any:
        """B12X's capacity declaration for a pool of ``num_slots`` states."""
        return self.features.api.Caps(
            device=self.device,
            max_tokens=self.max_tokens,
            max_seqs=self.max_requests,
            max_state_slots=num_slots,
            key_heads=self.geometry.num_heads,
            value_heads=self.geometry.num_heads,
            state_index_columns=self.geometry.columns,
            state_dtype=self.geometry.state_dtype,
            gate_activation="sigmoid",
            null_state_index=NULL_BLOCK_ID,
        )

    def options(self) -> dict[str, float]:
        """The scalar arguments of both calls."""
        state = self.state
        return {
            "lower_bound": state.lower_bound,
            "eps": state.eps,
            "scale": state.scale,
        }

    def _run_single_token(self, step: DecodeStep) -> None:
        self.features.api.run_kda_single_token(
            self.packed.binding,
            mixed_qkv=advance_conv(step, self.state),
            raw_g=step.raw_g,
            raw_beta=step.raw_beta,
            z=step.z,
            state_indices=step.state_indices,
            output=step.output,
            **self.options(),
        )

    def _warm_up_single_token(self, projection_width: int) -> None:
        """Compile the single-token call for each batch size to be captured.

        Every row is null, so no state is read or written.
        """
        for n in sorted(self._warmup_batches):
            operands = _layout_operands(self, n, projection_width)
            operands["state_indices"] = torch.full(
                (n, 1), NULL_BLOCK_ID, dtype=torch.int32, device=self.device
            )
            self.features.api.run_kda_single_token(
                self.packed.binding,
                **{name: operands[name] for name in _SINGLE_TOKEN_OPERANDS},
                **self.options(),
            )


_SINGLE_TOKEN_OPERANDS = (
    "mixed_qkv",
    "raw_g",
    "raw_beta",
    "z",
    "state_indices",
    "output",
)


def _single_token_refusal(step: DecodeStep) -> str | None:
    """What ``run_kda_single_token`` would refuse; its ``raw_beta`` is stride-free."""
    if not step.state_indices.is_contiguous():
        return "the state indices are strided"
    for name in ("raw_g", "z", "output"):
        if not getattr(step, name).is_contiguous():
            return f"{name} is not contiguous"
    return None


def _layout_operands(
    backend: B12xDecode, rows: int, projection_width: int
) -> dict[str, torch.Tensor]:
    """Tensors with the layout of a step of ``rows`` one-token requests."""
    geometry, device = backend.geometry, backend.device
    heads, dim = geometry.num_heads, geometry.head_dim
    columns = geometry.columns

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return {
        "mixed_qkv": empty(rows, 3 * heads * dim),
        "raw_g": empty(rows, heads, dim),
        "raw_beta": empty(rows, projection_width)[:, :heads],
        "z": empty(rows, heads, dim),
        "query_start_loc": empty(rows + 1, dtype=torch.int32),
        "num_accepted_tokens": empty(rows, dtype=torch.int32),
        "state_indices": empty(rows, columns, dtype=torch.int32),
        "output": empty(rows, heads, dim),
    }


def _layer_operands(state: LayerState) -> dict[str, torch.Tensor]:
    return {
        "A_log": state.A_log,
        "dt_bias": state.dt_bias,
        "norm_weight": state.norm_weight,
        "recurrent_state": state.recurrent_state,
    }


def _scratch(specs: Any) -> dict[str, torch.Tensor]:
    return {
        spec.name: torch.empty(spec.shape, dtype=spec.dtype, device=spec.device)
        for spec in specs
    }


class _StepTokens:
    """A step's token count on the device, taken by the first layer that needs it.

    It hangs on the step's metadata, which the layers of a KV-cache group share. A
    layer that is not later in the model than the last one that asked starts another
    forward pass over the same metadata (a capture after its warm-up), and takes the
    count anew: the tensor of the pass before may belong to another memory pool.
    """

    _ATTRIBUTE = "_kda_decode_step_tokens"

    def __init__(self, step: DecodeStep) -> None:
        # A tensor of its own: the last entry itself may lie at an address that no
        # plan is prepared for.
        self.count = step.query_start_loc[-1:].clone()
        self.last_layer_index = step.layer_index

    @classmethod
    def of(cls, step: DecodeStep) -> torch.Tensor:
        """``[1]`` int32: the tokens that belong to a request."""
        known = getattr(step.metadata, cls._ATTRIBUTE, None)
        if known is None or step.layer_index <= known.last_layer_index:
            known = cls(step)
            setattr(step.metadata, cls._ATTRIBUTE, known)
        known.last_layer_index = step.layer_index
        return known.count


def _packed_metadata(backend: B12xDecode, step: DecodeStep) -> dict[str, torch.Tensor]:
    """B12X's packed metadata for a step, without writing any of it.

    In plain decode the padded rows get a token too: with vLLM's own
    ``query_start_loc`` they have none, and B12X leaves their output unwritten.
    """
    constants, rows = backend.constants, step.num_requests
    accepted = step.num_accepted_tokens
    if step.kind is BatchKind.SINGLE_TOKEN:
        query_start_loc = constants["steps"][: rows + 1]
        num_tokens = constants["counts"][step.num_tokens, :1]
    else:
        query_start_loc = step.query_start_loc
        num_tokens = query_start_loc[-1:]
    return {
        "query_start_loc": query_start_loc,
        "num_accepted_tokens": constants["ones"][:rows]
        if accepted is None
        else accepted,
        "state_indices": step.state_indices,
        "num_seqs": constants["counts"][rows, :1],
        "num_tokens": num_tokens,
    }


def _alignment(tensor: torch.Tensor) -> int:
    """Largest power of two up to 16 that divides the address, in bytes."""
    address = tensor.data_ptr()
    return min(16, address & -address) if address else 16


def _layout(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], int]:
    return tensor.dtype, tensor.stride(), _alignment(tensor)


class LivePacked:
    """Packed calls on live tensors, through a prepared plan."""

    # Whose dtype, strides and alignment a plan is prepared for, of a step's tensors.
    _PREPARED_FOR = ("raw_g", "raw_beta", "output")

    def __init__(self, backend: B12xDecode, projection_width: int) -> None:
        features = backend.features
        self._backend = backend
        self.layer = _layer_operands(backend.state)
        template = _layout_operands(backend, 1, projection_width)
        count = backend.constants["counts"][1, :1]
        operands = {
            **template,
            **self.layer,
            "num_seqs": count,
            "num_tokens": count,
        }
        caps = backend.caps(backend.state.recurrent_state.shape[0])
        invocation = features.api.invocation_from_tensors(caps, **operands)
        self.plan = _prepared_plan(features, caps, invocation)
        self.scratch = _scratch(self.plan.memory_requirements().scratch)
        self._prepared = {n: _layout(template[n]) for n in self._PREPARED_FOR}
        self.binding = features.api.bind_kda(
            self.plan, scratch=self.scratch, **operands
        )

    def refusal(self, step: DecodeStep) -> str | None:
        for name, prepared in self._prepared.items():
            if _layout(getattr(step, name)) != prepared:
                return f"{name} differs in dtype, strides or alignment from the plan"
        if step.state_indices.dtype != torch.int32:
            return "the state indices are not int32"
        if step.z.stride()[1:] != step.output.stride()[1:]:
            return "z is not contiguous within a row"
        for name in ("query_start_loc", "num_accepted_tokens"):
            tensor = getattr(step, name)
            if tensor is not None and _layout(tensor) != (torch.int32, (1,), 16):
                return f"{name} is not a 16-byte aligned int32 vector"
        return None

    def run(self, step: DecodeStep) -> None:
        api = self._backend.features.api
        binding = api.bind_kda(
            self.plan,
            scratch=self.scratch,
            mixed_qkv=advance_conv(step, self._backend.state),
            raw_g=step.raw_g,
            raw_beta=step.raw_beta,
            z=step.z,
            output=step.output,
            **self.layer,
            **self._metadata(step),
        )
        api.run_kda(binding, **self._backend.options())

    def _metadata(self, step: DecodeStep) -> dict[str, torch.Tensor]:
        packed = _packed_metadata(self._backend, step)
        if step.kind is not BatchKind.SINGLE_TOKEN:
            packed["num_tokens"] = _StepTokens.of(step)
        return packed


@cache
def _prepared_plan(features: B12xFeatures, caps: Any, invocation: Any) -> Any:
    """Declare and prepare a plan; layers with equal declarations share it."""
    plan = features.api.plan(caps, invocation=invocation)
    nothing = features.preparation.PreparedCall(run=lambda: None)
    request = plan.request(
        name=f"vllm.kda_decode.{plan.handle}", prepare_call=lambda prepared: nothing
    )
    _preparation_session(features, torch.device(caps.device)).prepare((request,))
    return plan


@cache
def _preparation_session(features: B12xFeatures, device: torch.device) -> Any:
    """The process's session on a device; a plan lives as long as its session."""
    return features.preparation.PreparationSession(
        device=device, autotune=False, compile_workers=0
    )


class StagedPacked:
    """Packed calls through buffers of full capacity, for a B12X without live ones."""

    def __init__(self, backend: B12xDecode, projection_width: int) -> None:
        api = backend.features.api
        self._backend = backend
        plan = api.plan(backend.caps(backend.state.recurrent_state.shape[0]))
        self._buffers = staging_buffers(
            backend.geometry, backend.max_requests, backend.device
        )
        self.binding = api.bind_kda(
            plan,
            scratch=_staging_scratch(plan.scratch_specs()),
            **self._buffers,
            **_layer_operands(backend.state),
        )

    def refusal(self, step: DecodeStep) -> str | None:
        return None

    def run(self, step: DecodeStep) -> None:
        buffers, n = self._buffers, step.num_tokens
        for name, tensor in _packed_metadata(self._backend, step).items():
            target = buffers[name]
            if name == "state_indices":
                target = target[:, : tensor.shape[1]]
            target[: tensor.shape[0]].copy_(tensor)
        for name in ("raw_g", "raw_beta", "z"):
            buffers[name][:n].copy_(getattr(step, name))
        advance_conv(step, self._backend.state, out=buffers["mixed_qkv"][:n])
        self._backend.features.api.run_kda(self.binding, **self._backend.options())
        step.output.copy_(buffers["output"][:n])


@cache
def staging_buffers(
    geometry: LayerGeometry, max_requests: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """One set of staging buffers for all layers of a process."""
    tokens, heads, dim = max_requests * geometry.columns, geometry.num_heads, _HEAD_DIM
    shapes = {
        "mixed_qkv": ((tokens, 3 * heads * dim), torch.bfloat16),
        "raw_g": ((tokens, heads, dim), torch.bfloat16),
        "raw_beta": ((tokens, heads), torch.bfloat16),
        "z": ((tokens, heads, dim), torch.bfloat16),
        "output": ((tokens, heads, dim), torch.bfloat16),
        "query_start_loc": ((max_requests + 1,), torch.int32),
        "num_accepted_tokens": ((max_requests,), torch.int32),
        "state_indices": ((max_requests, geometry.columns), torch.int32),
        "num_seqs": ((1,), torch.int32),
        "num_tokens": ((1,), torch.int32),
    }
    return {
        name: torch.empty(shape, dtype=dtype, device=device)
        for name, (shape, dtype) in shapes.items()
    }


@cache
def _staging_scratch(specs: tuple) -> dict[str, torch.Tensor]:
    """One scratch for all layers of a process: their calls never overlap."""
    return _scratch(specs)
