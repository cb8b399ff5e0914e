# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""``python -m vllm.benchmarks.kda_decode``."""

from vllm.benchmarks.kda_decode.cli import main

main()
