# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Without a GPU the kernels run in Triton's interpreter, on CPU tensors.

Triton reads its switch when it is imported, so the environment is set here, before
any test module imports it. The tests marked ``gpu`` and ``engine`` run on a GPU and
the others without one: on a GPU machine set ``CUDA_VISIBLE_DEVICES=`` for those.
"""

import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()

# It imports the double, which only fits b12x 1.5.1; on a GPU another may be installed.
collect_ignore = ["models/glm5next/test_decode_kda.py"] if HAS_GPU else []

if not HAS_GPU:
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    from vllm.benchmarks.kda_decode.layer import use_interpreter

    use_interpreter()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        wants_gpu = item.get_closest_marker("gpu") or item.get_closest_marker("engine")
        if wants_gpu and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if not wants_gpu and HAS_GPU:
            reason = "runs in Triton's interpreter: set CUDA_VISIBLE_DEVICES= for it"
            item.add_marker(pytest.mark.skip(reason=reason))
