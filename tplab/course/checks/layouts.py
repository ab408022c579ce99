"""Preserve the memory layouts of tensors that a check sends to a rank.

Without this module, every tensor would be contiguous when it arrives on the rank. `packed` and `unpacked` make sure
that the strides stay the same:

    unpacked(*packed({"x": x}))["x"].stride() == x.stride()
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

Strides = list[tuple[int, ...] | None]


def packed(value: Any) -> tuple[Any, Strides]:
    """Return the value, and the strides of each non-contiguous tensor in the value, even in nested containers."""
    leaves, _ = tree_flatten(value)
    return value, [leaf.stride() if isinstance(leaf, Tensor) and not leaf.is_contiguous() else None for leaf in leaves]


def unpacked(value: Any, strides: Strides) -> Any:
    """Give the tensors in a value these strides, and return the value. Tensors whose strides are None stay the same."""
    leaves, spec = tree_flatten(value)
    return tree_unflatten([_laid_out(leaf, stride) for leaf, stride in zip(leaves, strides, strict=True)], spec)


def spread_out(value: Any) -> Any:
    """Return the value with its tensors in a different memory layout. Vectors, scalars, and numbers stay the same.

    Matrices are given gaps in memory, like those in a slice of a larger matrix. In tensors with more than two
    dimensions, the first two dimensions are swapped in memory, as when a [b, s, h] tensor is viewed as [s, b, h].
    Elementwise operators preserve swapped dimensions, so tensors that the learner's code computes from such a tensor
    aren't contiguous either.
    """
    return tree_map(_spread_out, value)


def _spread_out(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dim() > 2:
        return value.transpose(0, 1).contiguous().transpose(0, 1)
    if not isinstance(value, Tensor) or value.dim() < 2 or not value.is_contiguous():
        return value
    wide = value.new_zeros((*value.shape[:-1], 2 * value.shape[-1]))
    wide[..., ::2] = value
    return wide[..., ::2]


def _laid_out(value: Any, strides: tuple[int, ...] | None) -> Any:
    if strides is None:
        return value
    span = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, strides, strict=True))
    home = torch.zeros(max(span, 0), dtype=value.dtype, device=value.device).as_strided(value.shape, strides)
    return home.copy_(value)
