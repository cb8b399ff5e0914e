# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The interface a decode backend meets, and the choice of one at start-up."""

from dataclasses import dataclass
from typing import Protocol

from vllm.model_executor.layers.mamba.gdn.kda_decode.b12x import (
    INSTALL_COMMAND,
    B12xFeatures,
    b12x_unmet,
)
from vllm.model_executor.layers.mamba.gdn.kda_decode.routes import Call, Capability
from vllm.model_executor.layers.mamba.gdn.kda_decode.step import (
    DecodeStep,
    LayerGeometry,
    LayerState,
)

# What --kda-decode-backend (additional_config["kda_decode_backend"]) may name here.
DECODE_BACKENDS = ("auto", "b12x", "triton")

# The family that B12X's kernels are written and tuned for: SM120 and SM121.
_B12X_MAJOR = 12


class KDADecodeBackend(Protocol):
    """What runs the decode calls that are not vLLM's own, for one layer."""

    def bind(self, state: LayerState, raw_beta_row_stride: int) -> None:
        """Prepare everything that may compile or allocate, for these caches.

        Args:
            state: The layer's state. May be called again with other caches.
            raw_beta_row_stride: Row stride of ``raw_beta`` in elements.
        """

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
        declined: Why ``auto`` did not take B12X, or None.
    """

    requested: str
    capability: Capability
    declined: str | None = None

    @property
    def backend(self) -> str:
        return _BACKEND_OF[self.capability]


_BACKEND_OF = {
    Capability.B12X_SINGLE_TOKEN: "b12x",
    Capability.B12X_PACKED: "b12x",
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
        The choice. ``auto`` takes B12X on compute capability 12.x only.

    Raises:
        ValueError: ``requested`` is not one of :data:`DECODE_BACKENDS`.
        RuntimeError: ``b12x`` was asked for by name and cannot run; the message
            lists every unmet requirement.
    """
    if requested not in DECODE_BACKENDS:
        raise ValueError(
            f"kda_decode_backend={requested!r} is not available for GLM-5.3's KDA "
            f"layers; valid values: {', '.join(DECODE_BACKENDS)}"
        )
    if requested == "triton":
        return Resolution(requested, Capability.VLLM)
    unmet = b12x_unmet(b12x, compute_capability, geometry)
    if requested == "b12x" and unmet:
        raise RuntimeError(
            "kda_decode_backend='b12x' was asked for and cannot run here: "
            + "; ".join(unmet)
            + f". Install B12X with: {INSTALL_COMMAND}; or choose "
            "kda_decode_backend='auto'."
        )
    if requested == "auto" and not unmet and compute_capability[0] != _B12X_MAJOR:
        major, minor = compute_capability
        unmet = [
            f"B12X is written for compute capability {_B12X_MAJOR}.x and this device "
            f"has {major}.{minor} (kda_decode_backend='b12x' takes it all the same)"
        ]
    if unmet:
        return Resolution(requested, Capability.VLLM, declined=unmet[0])
    return Resolution(
        requested,
        Capability.B12X_SINGLE_TOKEN if b12x.single_token else Capability.B12X_PACKED,
    )
