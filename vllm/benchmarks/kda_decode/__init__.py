# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Check and time GLM-5.3's KDA decode: ``glm5next-kda check``."""
