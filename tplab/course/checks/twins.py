"""A twin is a variant of a case that differs in one condition, such as the dtype or the memory layout of the tensors.

An answer can be right for a case but wrong for one of its variants. For example, the answer may hardcode a dtype
instead of using its input's dtype, keep a value between calls, or write into a copy of a tensor when it should write
into the tensor itself. `OnRanks.batches` makes all variants of every case, so a check doesn't have to create any of
them.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from tplab.course.checks import layouts
from tplab.course.checks.late import late
from tplab.course.checks.observation import Extra, observing
from tplab.course.checks.recorded_traffic import Traffic
from tplab.course.notebooks.mistakes import shared

WORLD_SIZE = 2  # the smallest world size at which ranks send any messages
FLOAT32_TOLERANCE = 1e-4
# Over 12 seeds, the largest error of a correct answer was 11 eps, relative to the largest element (for dWk of grouped
# attention). Most errors were less than 5 eps
BFLOAT16_TOLERANCE = 32 * torch.finfo(torch.bfloat16).eps


class Twin(Enum):
    FLOAT32 = "in float32"
    BETWEEN = "between two other calls"
    EVALUATION = "as in evaluation"
    STRIDED = "on tensors that aren't contiguous"
    BFLOAT16 = "in bfloat16"
    AGAIN = "called again with the same arguments"
    LATE = "with messages that arrive at the last moment"  # only in trials that ask for it (see `late`)


_DTYPES: dict[Twin | None, torch.dtype] = {Twin.FLOAT32: torch.float32, Twin.BFLOAT16: torch.bfloat16}
_EXTRA: dict[Twin | None, Extra] = {Twin.BETWEEN: Extra.BETWEEN, Twin.EVALUATION: Extra.EVALUATION}
_TOLERANCES: dict[Twin | None, float] = {Twin.FLOAT32: FLOAT32_TOLERANCE, Twin.BFLOAT16: BFLOAT16_TOLERANCE}
# These variants add calls of the learner's code or turn dropout off, so they don't suit code that draws random numbers
DRAWS_ONCE = (Twin.BETWEEN, Twin.EVALUATION)
ROUNDED = (Twin.FLOAT32, Twin.BFLOAT16)  # these variants don't suit cases whose values need float64's precision
# A check that doesn't launch any ranks loops over these variants itself. None stands for the original case
ALONE = (None, Twin.FLOAT32, Twin.STRIDED, Twin.BFLOAT16)

_LAYOUTS_MEET = "with strides"  # reports say this if ranks pass tensors with different layouts to a collective
_VIEW_SAYS = "view size is not compatible"  # torch says this if `view` would have to copy elements


def dtype_of(twin: Twin | None) -> torch.dtype:
    return _DTYPES.get(twin, torch.float64)


def note(twin: Twin | None) -> str:
    return twin.value if twin else ""


def question(twin: Twin, report: str = "") -> str:
    """Return the question to ask if the run of this variant of a case failed. `report` is the report from that run."""
    about_layouts = {_LAYOUTS_MEET: "layouts", _VIEW_SAYS: "view"} if twin is Twin.STRIDED else {}
    return shared(next((key for words, key in about_layouts.items() if words in report), twin.value))


def tolerance(twin: Twin | None, tol: float) -> float:
    return max(tol, _TOLERANCES.get(twin, tol))


def rounded(twin: Twin | None, problem: Any) -> Any:
    """Round a problem's values to a variant's dtype, so that the expected values are computed from the rounded ones.

    The tensors stay in float64. If `draw` computed a tensor from other tensors, it used their unrounded values, so the
    computed tensor is off by about one eps.
    """
    return tree_map(lambda item: _rounded(item, dtype_of(twin)), problem)


def given(twin: Twin | None, value: Any, index: int = 0) -> Any:
    """Convert a rank's values to the dtype or memory layout of this variant.

    In a variant with another layout, only tensors with an even `index` change. A trial passes 0 for every rank, or the
    ranks' own indices: then the ranks receive tensors with different layouts, and a collective on these tensors would
    mix up their elements.
    """
    if twin is Twin.STRIDED:
        return value if index % 2 else layouts.spread_out(value)
    return tree_map(lambda item: _cast(item, dtype_of(twin)), value)


def expected(twin: Twin | None, right: dict[str, Any]) -> dict[str, Any]:
    """Return the expected values, including the expected traffic, in the dtype that a variant of the case uses."""
    return {
        name: _sent_in(value, "float64", dtype_of(twin))
        if isinstance(value, Traffic)
        else tree_map(lambda item: _cast(item, dtype_of(twin)), value)
        for name, value in right.items()
    }


def observed(twin: Twin | None, seen: dict[str, Any]) -> dict[str, Any]:
    """Return a rank's observations. In the bfloat16 variant of a case, count float32 traffic as bfloat16 traffic.

    In this variant, an answer is allowed to send float32 tensors, because careful programs sum bfloat16 tensors in
    float32.
    """
    if twin is not Twin.BFLOAT16:
        return seen
    return {
        name: _sent_in(value, "float32", torch.bfloat16) if isinstance(value, Traffic) else value
        for name, value in seen.items()
    }


def loss_in(twin: Twin | None, loss: Any) -> Any:
    """In the bfloat16 variant of a case, convert a float32 loss to bfloat16. Return any other loss unchanged.

    An answer may return a float32 loss for bfloat16 logits, as tplab and Megatron-LM do.
    """
    is_float32 = isinstance(loss, Tensor) and loss.dtype == torch.float32
    return loss.to(torch.bfloat16) if is_float32 and twin is Twin.BFLOAT16 else loss


@contextmanager
def observed_as(twin: Twin | None) -> Iterator[None]:
    """Context manager that makes `observe` call the learner's code the way a variant of the case requires."""
    extra = _EXTRA.get(twin, Extra.NONE)
    module_mode = _eval_mode() if twin is Twin.EVALUATION else nullcontext()
    with module_mode, observing(extra), late() if twin is Twin.LATE else nullcontext():
        yield


@contextmanager
def _eval_mode() -> Iterator[None]:
    """Context manager that makes new modules start in eval mode."""
    original = nn.Module.__init__

    def init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(module, *args, **kwargs)
        module.training = False

    nn.Module.__init__ = init  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.__init__ = original  # type: ignore[method-assign]


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.dtype == torch.float64 else value


def _rounded(value: Any, dtype: torch.dtype) -> Any:
    is_float64 = isinstance(value, Tensor) and value.dtype == torch.float64
    return value.to(dtype).double() if is_float64 else value


def _sent_in(traffic: Traffic, before: str, dtype: torch.dtype) -> Traffic:
    name = str(dtype).removeprefix("torch.")
    return Traffic(call._replace(dtype=name) if call.dtype == before else call for call in traffic)
