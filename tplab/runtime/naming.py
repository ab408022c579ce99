"""Describe a collective's tensors, arguments and group, and find the line of the program that calls it."""

import os
import sys
from collections.abc import Sequence
from functools import cache
from types import CodeType, FrameType
from typing import Any

import torch
import typing_extensions
from torch import Tensor

from tplab.runtime.failures import RUNTIME, TPLAB

_DEPRECATED = typing_extensions.deprecated.__call__.__code__.co_filename  # torch wraps functions with this decorator
_TORCH = os.path.dirname(torch.__file__) + os.sep


@cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def describe(tensors: Sequence[Tensor]) -> str:
    if not tensors:
        return ""
    first = tensors[0]
    text = f"{list(first.shape)} {dtype_name(first.dtype)}"
    if not first.is_contiguous():
        text += f" with strides {list(first.stride())}"
    return text if len(tensors) == 1 else f"{len(tensors)} x {text}"


def signature_of(kind: str, tensors: Sequence[Tensor], op: str | None, root: int | None) -> str:
    if kind == "all_to_all":  # the sizes may differ between ranks
        return dtype_name(tensors[0].dtype) if tensors else ""
    parts = [describe(tensors)] if tensors else []
    if op:
        parts.append(op)
    if root is not None:
        parts.append(f"root {root}")
    return ", ".join(parts)


def is_one_block(tensor: Tensor) -> bool:
    """Return True if the elements fill one block of memory without gaps or overlaps, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 0:
            return True
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def not_one_block(kind: str, tensor: Tensor) -> str:
    return (
        f"{kind} of a tensor with shape {list(tensor.shape)} and strides {list(tensor.stride())}: its elements don't "
        "fill one block of memory without gaps or overlaps, so the backend would read and write past them. Make a copy "
        "first with y = x.contiguous(), pass y to the collective, and use y from there on."
    )


_LEARNERS, _LAYERS, _MACHINERY = range(3)
_whose: dict[int, tuple[int, CodeType]] = {}  # by id of the code, which the value keeps alive


def _find_out(code: CodeType) -> tuple[int, CodeType]:
    file = code.co_filename
    if not file.startswith((_TORCH, TPLAB, _DEPRECATED, "<")):
        whose = _LEARNERS
    elif file.startswith(TPLAB) and not file.startswith(RUNTIME):
        whose = _LAYERS
    else:
        whose = _MACHINERY
    found = _whose[id(code)] = whose, code
    return found


def hide(code: CodeType) -> None:
    """Never report a line of this function as the caller of a collective, no matter where the function is defined."""
    _whose[id(code)] = _MACHINERY, code


def caller() -> FrameType | None:
    """Return the innermost frame outside torch and tplab.

    If there's none, return the innermost frame in tplab outside tplab.runtime, or None.
    """
    frame: FrameType | None = sys._getframe(3)
    of_tplab = None
    while frame is not None:
        code = frame.f_code
        whose, _ = _whose.get(id(code)) or _find_out(code)
        if whose == _LEARNERS:
            return frame
        if whose == _LAYERS and of_tplab is None:
            of_tplab = frame
        frame = frame.f_back
    return of_tplab


def place_of(frame: FrameType | None) -> str:
    """Return the call site of a frame as "file:line:function"."""
    if frame is None:
        return "?:0:?"
    return f"{frame.f_code.co_filename}:{frame.f_lineno}:{frame.f_code.co_name}"


def layout(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return shapes, dtypes and strides as a hashable key. Tensors with different descriptions have different keys."""
    if len(tensors) == 1:
        tensor = tensors[0]
        return tensor.shape, tensor.dtype, tensor.stride()
    return tuple((tensor.shape, tensor.dtype, tensor.stride()) for tensor in tensors)


def flat(tensors: Any) -> Sequence[Tensor]:
    """Flatten nested lists of tensors, in order."""
    if type(tensors) is list and len(tensors) == 1 and type(tensors[0]) is Tensor:  # the usual case
        return tensors
    if isinstance(tensors, Tensor):
        return [tensors]
    return [tensor for part in tensors for tensor in flat(part)]
