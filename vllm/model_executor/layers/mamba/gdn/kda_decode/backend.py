# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The interface a decode backend meets, and the choice of one at start-up."""

from dataclasses import dataclass
from typing import Protocol

import torch

from vllm.model_executor.layers.mamba.gdn.kda_decode.b12x import (
    INSTALL_COMMAND,
    B12xDecode,
    B12xFeatures,
    b12x_unmet,
)
from vllm.model_executor.layers.mamba.gdn.kda_decode.one_launch import (
    OneLaunchDecode,
    one_launch_unmet,
)
from vllm.model_executor.layers.mamba.gdn.kda_decode.routes import Call, Capability
from vllm.model_executor.layers.mamba.gdn.kda_decode.step import (
    DecodeStep,
    LayerGeometry,
    LayerState,
)

# What --kda-decode-backend (additional_config["kda_decode_backend"]) may name here.
DECODE_BACKENDS = ("auto", "b12x", "one_launch", "triton")

# The family that B12X's kernels are written and tuned for: SM120 and SM121.
_B12X_MAJOR = 12


class KDADecodeBackend(Protocol):
    """What runs the decode calls that are not vLLM's own, for one layer.

    Attributes:
        constants: Device tensors that must outlive the caches, by name.
    """

    constants: dict[str, torch.Tensor]

    def bind(self, state: LayerState, projection_width: int) -> None:
        """Prepare everything that may compile or allocate, for these caches.

        Args:
            state: The layer's state. May be called again with other caches.
            projection_width: Row stride, in elements, of the merged projection
                whose columns ``mixed_qkv`` and ``raw_beta`` are.
        """

    def unbind(self) -> None:
        """Let go of the caches; :meth:`bind` comes before the next step."""

    def refusal(self, call: Call, step: DecodeStep) -> str | None:
        """Say why this step cannot go to ``call``, or None if it can.

        Reads host values only and changes nothing.
        """

    def run(self, call: Call, step: DecodeStep) -> None:
        """Advance both states by ``step`` and write ``step.output``."""


@dataclass(frozen=True)
class Resolution:
    """The backend choice, made once when a layer is built.

    Attributes:
        requested: The configured name.
        capability: The row of the routing table that this install has.
        declined: Why ``auto`` did not take its first choice, or None.
    """

    requested: str
    capability: Capability
    declined: str | None = None

    @property
    def backend(self) -> str:
        """The name in :data:`DECODE_BACKENDS` of what was chosen."""
        return _BACKEND_OF[self.capability]


_BACKEND_OF = {
    Capability.B12X_SINGLE_TOKEN: "b12x",
    Capability.B12X_PACKED: "b12x",
    Capability.ONE_LAUNCH: "one_launch",
    Capability.VLLM: "triton",
}


def resolve_kda_decode_backend(
    requested: str,
    *,
    b12x: B12xFeatures,
    compute_capability: tuple[int, int] | None,
    geometry: LayerGeometry,
) -> Resolution:
    """Choose the decode backend from plain values.

    Args:
        requested: ``additional_config["kda_decode_backend"]``, or ``"auto"``.
        b12x: What the optional package offers.
        compute_capability: Of the CUDA device, or None without one.
        geometry: The layer's geometry and dtypes.

    Returns:
        The choice. ``auto`` takes B12X on compute capability 12.x, else the
        one-launch kernel where it runs, else vLLM's own path.

    Raises:
        ValueError: ``requested`` is not one of :data:`DECODE_BACKENDS`.
        RuntimeError: A backend was asked for by name and cannot run; the message
            lists every unmet requirement.
    """
    if requested not in DECODE_BACKENDS:
        raise ValueError(
            f"kda_decode_backend={requested!r} is not available for GLM-5.3's KDA "
            f"layers; valid values: {', '.join(DECODE_BACKENDS)}"
        )
    if requested == "triton":
        return Resolution(requested, Capability.VLLM)
    if requested == "one_launch":
        unmet = one_launch_unmet(compute_capability, geometry)
        _require(requested, unmet)
        return Resolution(requested, Capability.ONE_LAUNCH)

    unmet = b12x_unmet(b12x, compute_capability, geometry)
    with_b12x = (
        Capability.B12X_SINGLE_TOKEN if b12x.single_token else Capability.B12X_PACKED
    )
    if requested == "b12x":
        remedy = f" Install B12X with: {INSTALL_COMMAND}." if b12x.missing else ""
        _require(requested, unmet, remedy)
        return Resolution(requested, with_b12x)
    if not unmet and compute_capability[0] == _B12X_MAJOR:
        return Resolution(requested, with_b12x)
    if not unmet:
        major, minor = compute_capability
        unmet = [
            f"it is written for compute capability {_B12X_MAJOR}.x and this device "
            f"has {major}.{minor} (kda_decode_backend='b12x' takes it all the same)"
        ]
    return without_b12x(unmet[0], compute_capability, geometry)


def without_b12x(
    declined: str, compute_capability: tuple[int, int] | None, geometry: LayerGeometry
) -> Resolution:
    """What ``auto`` takes where B12X is not used.

    Args:
        declined: Why it is not.
        compute_capability: Of the CUDA device, or None without one.
        geometry: The layer's geometry and dtypes.

    Returns:
        The choice, with every reason on the way to it.
    """
    declined = f"b12x not used: {declined}"
    unmet = one_launch_unmet(compute_capability, geometry)
    if not unmet:
        return Resolution("auto", Capability.ONE_LAUNCH, declined)
    return Resolution(
        "auto", Capability.VLLM, f"{declined}; one_launch not used: {unmet[0]}"
    )


def _require(requested: str, unmet: list[str], remedy: str = "") -> None:
    if unmet:
        raise RuntimeError(
            f"kda_decode_backend={requested!r} was asked for and cannot run here: "
            f"{'; '.join(unmet)}.{remedy} Or choose kda_decode_backend='auto'."
        )


def make_backend(
    resolution: Resolution,
    *,
    b12x: B12xFeatures,
    geometry: LayerGeometry,
    device: torch.device,
    capture_sizes: tuple[int, ...],
) -> KDADecodeBackend | None:
    """Build what a resolution names, for one layer.

    Args:
        resolution: The choice.
        b12x: What the optional package offers.
        geometry: The layer's geometry and dtypes.
        device: The layer's device.
        capture_sizes: Batch sizes that will be captured.

    Returns:
        The backend, or None for vLLM's own path.
    """
    if resolution.backend == "b12x":
        return B12xDecode(b12x, geometry, device, capture_sizes)
    if resolution.backend == "one_launch":
        return OneLaunchDecode(device)
    return None
