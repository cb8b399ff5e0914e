# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Entry point ``glm5next_kda`` of the group ``vllm.general_plugins``.

vLLM calls :func:`register` in every process it starts (API server, engine core,
workers), so it only names a module for GLM-5.3's architectures. That module is
imported when the model is, and replaces the KDA layer then.
"""

import importlib.metadata

from vllm.logger import init_logger

logger = init_logger(__name__)

SUPPORTED_VLLM = "0.33.0"
ARCHITECTURES = {
    "Glm5NextForCausalLM": "Glm5NextForCausalLM",
    "Glm5NextForConditionalGeneration": "Glm5NextForConditionalGeneration",
    "Glm5NextMTPModel": "Glm5NextMTP",
}
MODEL_MODULE = "vllm.models.glm5next.decode_kda"


def _installed_vllm() -> str:
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return "unknown (no package metadata)"


def register() -> None:
    """Point GLM-5.3's architectures at the model with the KDA decode layer.

    Safe to call any number of times. On another vLLM version than
    :data:`SUPPORTED_VLLM` it warns once and leaves vLLM as it is. It imports no
    model and touches no device.
    """
    installed = _installed_vllm()
    # A build's local part (0.33.0+cu130) does not change the Python sources.
    if installed.partition("+")[0] != SUPPORTED_VLLM:
        logger.warning_once(
            "The GLM-5.3 KDA decode plugin supports vLLM %s and found vLLM %s: it "
            "stands down, and vLLM runs its own KDA layer. Install vllm==%s, or "
            "uninstall vllm-glm5next-kda.",
            SUPPORTED_VLLM,
            installed,
            SUPPORTED_VLLM,
            scope="process",
        )
        return

    from vllm.model_executor.models import ModelRegistry

    for architecture, class_name in ARCHITECTURES.items():
        known = ModelRegistry.models.get(architecture)
        if getattr(known, "module_name", None) != MODEL_MODULE:
            ModelRegistry.register_model(architecture, f"{MODEL_MODULE}:{class_name}")
