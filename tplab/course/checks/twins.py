"""Twins of a case: the same in float32, between two others, under no_grad, in eval mode, or not contiguous.

An answer can be right in a case and wrong in its twin: it names a dtype instead of taking it from its input, it keeps
something outside of the call, or it writes into a copy where it means to write into a tensor. `check_cases` makes the
twins of every case, so a check gets them without a word.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from tplab.course.checks import layouts
from tplab.course.checks.observation import GROUPS_LEFT, observing
from tplab.course.checks.recorded_traffic import Traffic
from tplab.course.checks.verification import Question

WORLD_SIZE = 2  # the smallest on which anything is sent
FLOAT32_TOLERANCE = 1e-4


class Twin(Enum):
    FLOAT32 = "in float32"
    BETWEEN = "between two other calls"
    EVALUATION = "under torch.no_grad"
    EVAL_MODE = "in eval mode, on the output of an earlier layer"
    STRIDED = "on tensors that aren't contiguous"


# twins that call the code again, or switch dropout off: not for one that draws random numbers
DRAWS_ONCE = (Twin.BETWEEN, Twin.EVALUATION, Twin.EVAL_MODE)
ALONE = (None, Twin.FLOAT32, Twin.STRIDED)  # for a check that runs in this process and loops over twins itself

_QUESTIONS = {
    Twin.FLOAT32: (
        "Your code gives the correct result for float64 tensors, but not for float32 tensors. Which line chooses a "
        "dtype on its own? Instead, take the dtype from one of the tensors that were passed to you, with "
        "torch.empty_like(x), x.new_zeros(...), or dtype=x.dtype."
    ),
    Twin.BETWEEN: (
        "Your code is correct if it's called once. This time, your code was also called with different values, both "
        "before this call and between its forward and backward passes. What does a call leave behind that the next "
        "call reads or overwrites? Look for something that you store on the class, in a global variable, or on the "
        "layer. (Local variables and ctx belong to a single call.)"
    ),
    Twin.EVALUATION: (
        "Your code is correct in training. This time, nothing needs a gradient, as in evaluation or text generation. "
        "Which line writes into a tensor that belongs to the caller, or does something different when no gradient is "
        "needed? (An in-place operation on your input also changes the caller's tensor, whether or not autograd "
        "complains.)"
    ),
    Twin.EVAL_MODE: (
        "Your code is correct in train mode and for an input that's a leaf. This time, the module is in eval mode, "
        "which should only turn off dropout. The module's input comes from an earlier layer, so the input needs a "
        "gradient but isn't a leaf. Which line checks self.training or x.is_leaf, and what does your code skip because "
        "of that line?"
    ),
    Twin.STRIDED: (
        "Your code is correct for the same values in contiguous tensors. Which line writes into a reshaped or "
        "flattened tensor, or expects the elements to be next to each other in memory? If a tensor isn't contiguous, "
        "reshape, flatten, and contiguous return a copy, and whatever you write into the copy is lost."
    ),
}

GROUPS_QUESTION = Question(
    lambda d: GROUPS_LEFT in d.names,
    "A process group exists until the program ends, and it takes up memory and connections. A training run may call "
    "this code a million times. Which line creates a new group in each call, and where could you create the group just "
    "once?",
)


def dtype_of(twin: Twin | None) -> torch.dtype:
    return torch.float32 if twin is Twin.FLOAT32 else torch.float64


def note(twin: Twin | None) -> str:
    return twin.value if twin else ""


def question(twin: Twin) -> str:
    return _QUESTIONS[twin]


def asked_first(twin: Twin | None) -> list[Question]:
    """Return the question about a twin as the first of a check's questions. No question for an ordinary case."""
    return [GROUPS_QUESTION, Question(lambda d: True, question(twin))] if twin else []


def tolerance(twin: Twin | None, tol: float) -> float:
    return max(tol, FLOAT32_TOLERANCE) if twin is Twin.FLOAT32 else tol


def rounded(twin: Twin | None, problem: Any) -> Any:
    """Round a problem to numbers that float32 can hold, so that the right values are those of the rounded problem."""
    return tree_map(_round, problem) if twin is Twin.FLOAT32 else problem


def given(twin: Twin | None, value: Any) -> Any:
    """Return what a rank is given, with the dtype or the memory layout of the twin."""
    if twin is Twin.FLOAT32:
        return tree_map(lambda item: _cast(item, torch.float32), value)
    return layouts.spread_out(value) if twin is Twin.STRIDED else value


def expected(twin: Twin | None, right: dict[str, Any]) -> dict[str, Any]:
    """Return the right values in the dtype of the twin."""
    if twin is not Twin.FLOAT32:
        return right
    return {name: _traffic(value) if isinstance(value, Traffic) else _float32(value) for name, value in right.items()}


@contextmanager
def observed_as(twin: Twin | None) -> Iterator[None]:
    """Context manager in which `observe` calls the learner's code as the twin asks for."""
    in_eval_mode = twin is Twin.EVAL_MODE
    options = {"between": twin is Twin.BETWEEN, "evaluation": twin is Twin.EVALUATION, "later": in_eval_mode}
    with _eval_mode() if in_eval_mode else nullcontext(), observing(**options):
        yield


@contextmanager
def _eval_mode() -> Iterator[None]:
    """Context manager in which new modules begin in eval mode."""
    original = nn.Module.__init__

    def init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(module, *args, **kwargs)
        module.training = False

    nn.Module.__init__ = init  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.__init__ = original  # type: ignore[method-assign]


def makes_sense(twin: Twin, answer: Any) -> bool:
    """Return whether a twin can make a difference to an answer. Only modules have an eval mode."""
    if twin is not Twin.EVAL_MODE:
        return True
    answers = answer if isinstance(answer, (tuple, list)) else [answer]
    return any(isinstance(each, type) and issubclass(each, nn.Module) for each in answers)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.dtype == torch.float64 else value


def _round(value: Any) -> Any:
    is_float64 = isinstance(value, Tensor) and value.dtype == torch.float64
    return value.float().double() if is_float64 else value


def _float32(value: Any) -> Any:
    return tree_map(lambda item: _cast(item, torch.float32), value)


def _traffic(right: Traffic) -> Traffic:
    return Traffic(call._replace(dtype="float32") if call.dtype == "float64" else call for call in right)
