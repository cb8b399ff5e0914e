# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The convolution weights of q, k and v as one, in step with their parameters."""

from collections.abc import Callable, Sequence
from functools import wraps
from inspect import ismethod
from typing import Any
from weakref import WeakMethod

import torch
from torch import nn


def merge_in_place(convs: Sequence[nn.Module]) -> torch.Tensor:
    """Make the weights of several convolutions views of one tensor.

    What is loaded into a parameter then is in the merged weight, at once and in a
    captured graph too.

    Args:
        convs: Modules with a ``[channels, 1, W]`` ``weight`` of one dtype.

    Returns:
        ``[sum of channels, W]``, contiguous. The parameters keep shape and strides.
    """
    merged = torch.cat([conv.weight.data for conv in convs]).squeeze(1)
    for conv, rows in zip(convs, _rows_of(convs, merged), strict=True):
        conv.weight.data = rows.unsqueeze(1)
    return merged


def is_merged(convs: Sequence[nn.Module], merged: torch.Tensor) -> bool:
    """Whether every convolution's weight still is its part of ``merged``.

    A weight offloader, and a loader that installs parameters of its own, move them.
    """
    return all(
        conv.weight.device == rows.device
        and conv.weight.data_ptr() == rows.data_ptr()
        and not rows.is_meta
        for conv, rows in zip(convs, _rows_of(convs, merged), strict=True)
    )


def keep_in_step(convs: Sequence[nn.Module], by_tap: torch.Tensor) -> None:
    """Have each convolution's weight loader write its weight to ``by_tap`` too.

    Args:
        convs: As in :func:`merge_in_place`.
        by_tap: ``[W, sum of channels]``, the merged weight transposed.
    """
    for conv, rows in zip(convs, _rows_of(convs, by_tap.t()), strict=True):
        conv.weight.weight_loader = _followed(conv.weight.weight_loader, rows)


def versions(convs: Sequence[nn.Module]) -> list[int]:
    """PyTorch's counts of in-place writes to the weights; those of ``data`` excepted.

    Reading them waits for no device. Weights made in inference mode have none.
    """
    weights = [conv.weight for conv in convs]
    return [0 if weight.is_inference() else weight._version for weight in weights]


def _rows_of(
    convs: Sequence[nn.Module], merged: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    return merged.split([conv.weight.shape[0] for conv in convs])


def _followed(loader: Callable, rows: torch.Tensor) -> Callable:
    # Weak, where it is a module's method: vLLM's reload keeps loaders for as long as
    # their module lives.
    current = WeakMethod(loader) if ismethod(loader) else lambda: loader

    @wraps(loader)
    def load(param: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = current()(param, *args, **kwargs)
        if not param.is_meta:
            rows.copy_(param.data.squeeze(1))
        return result

    return load
