"""Preserve the memory layouts of tensors that a check sends to a rank.

Without this module, every tensor would arrive on the rank as a contiguous tensor. `packed` and `unpacked` make sure
that the strides stay the same:

    unpacked(*packed({"x": x}))["x"].stride() == x.stride()
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

Strides = list[tuple[int, ...] | None]


def packed(value: Any) -> tuple[Any, Strides]:
    """Return the value, along with the strides of every non-contiguous tensor in it.

    The value may be a container, and containers may be nested.
    """
    leaves, _ = tree_flatten(value)
    return value, [leaf.stride() if isinstance(leaf, Tensor) and not leaf.is_contiguous() else None for leaf in leaves]


def unpacked(value: Any, strides: Strides) -> Any:
    """Return the value, with each of its tensors laid out in memory according to the given strides.

    A tensor is left unchanged if the entry for it in `strides` is None.
    """
    leaves, spec = tree_flatten(value)
    return tree_unflatten([_laid_out(leaf, stride) for leaf, stride in zip(leaves, strides, strict=True)], spec)


def spread_out(value: Any) -> Any:
    """Return the value with its tensors in a different memory layout. Vectors, scalars, and numbers stay the same.

    The elements of a matrix are stored with gaps in between, like those of a slice such as `wide[:, ::2]`.
    Tensors with more than two dimensions have their first two dimensions swapped in memory, as when a [b, s, h] tensor
    is viewed as [s, b, h]. Elementwise operators preserve this swapped layout, so tensors that the learner's code
    computes from such a tensor aren't contiguous either.
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
