# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How a KDA decode step is routed and run: batch kinds, backends, operands."""
