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
    pairs = zip(leaves, strides, strict=True)
    return tree_unflatten([leaf if stride is None else laid_out(leaf, stride) for leaf, stride in pairs], spec)


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


def laid_out(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return a copy of a tensor that has these strides. Any gaps between its elements are filled with zeros."""
    copy = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    copy.untyped_storage().fill_(0)  # type: ignore[attr-defined]
    return copy.copy_(tensor.detach())
