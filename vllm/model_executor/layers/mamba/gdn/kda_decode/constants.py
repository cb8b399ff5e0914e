# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Device tensors that a decode backend keeps for as long as its layer lives."""

from collections.abc import Mapping

import torch
from torch import nn


class DecodeConstants(nn.Module):
    """Holds them where an engine that sleeps or reloads leaves them whole.

    At its second level a sleeping engine saves a model's buffers and drops all else
    that was allocated with the weights, so they are buffers. A reload writes anew
    every buffer of a module that loads a weight, so they are buffers of a module that
    loads none.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Register the tensors, outside any checkpoint.

        Args:
            tensors: By name.
        """
        super().__init__()
        for name, tensor in tensors.items():
            # Nothing to load: else a reload warns that it was not.
            tensor.weight_loader_numel = 0
            self.register_buffer(name, tensor, persistent=False)
