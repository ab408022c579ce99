"""Describe unexpected values in words, as in "a tuple of 2 (tensor [3, 4], None)"."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Foreign:
    """Placeholder for a work handle, a module, a generator, or any other value that isn't a tensor or plain data."""

    type_name: str


def describe_sequence(values: Sequence[Any]) -> str:
    return f"{type(values).__name__} of {len(values)} ({', '.join(_brief(value) for value in values)})"


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"tensor {list(value.shape)}"
    return "None" if value is None else type(value).__name__


def describe(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, Foreign):
        return f"a {value.type_name}"
    if isinstance(value, (tuple, list)):
        return f"a {describe_sequence(value)}"
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 160 else f"a {type(value).__name__}"
