"""Guess what a wrong tensor actually contains.

For example, it may contain another rank's part, p times the correct tensor, or the correct parts in the wrong order.

    tensor_difference(seen, expected, context) -> None | (kind, text)

The guesses are ordered from most to least informative, and the learner sees the first guess that fits. The last resort
is a message that says how many elements differ.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tplab.course.checks.combinations import combinations
from tplab.course.checks.describe import describe
from tplab.course.feedback.verdict import names


@dataclass(frozen=True)
class Context:
    """The values that help to explain why an observation is wrong on one rank.

    seen, expected: the observed and the expected value on every rank.
    terms:          the tensors that each rank started with, by name.
    gradient:       True if the observed tensor is a gradient.
    guess:          False if nobody needs to know what a wrong tensor contains, only that it's wrong.
    """

    p: int
    rank: int
    seen: Sequence[Any]
    expected: Sequence[Any]
    terms: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    tol: float = 1e-9
    gradient: bool = False
    guess: bool = True


def tensor_difference(seen: Any, expected: Tensor, context: Context) -> tuple[str, str] | None:
    if seen is None:
        return "none", missing_value(context)
    if not isinstance(seen, Tensor):
        return "type", f"got {describe(seen)}, expected a tensor"
    if seen.shape != expected.shape:
        kind, looks = _shape(seen, expected, context) if context.guess else ("shape", "")
        return kind, f"shape {list(seen.shape)}, expected {list(expected.shape)}" + (f": {looks}" if looks else "")
    if seen.dtype != expected.dtype:
        return "dtype", f"dtype {_dtype(seen)}, expected {_dtype(expected)}"
    if expected.numel() == 0 or _close(seen, expected, context.tol):
        return None
    return next(_guesses(seen, expected, context)) if context.guess else ("value", "")


def _shape(seen: Tensor, expected: Tensor, context: Context) -> tuple[str, str]:
    """Guess what a tensor with the wrong shape really is, and return the guess as (kind, text)."""
    for dim in range(expected.dim() if context.p > 1 else 0):
        parts = [part for part in context.expected if isinstance(part, Tensor) and part.dim() == expected.dim()]
        if len(parts) == context.p and _mergeable(parts, dim) and _equal(seen, torch.cat(parts, dim), context):
            return "whole", f"it's the full tensor, with the parts of all ranks concatenated along dimension {dim}"
        if expected.shape[dim] % context.p == 0:
            for rank, part in enumerate(expected.chunk(context.p, dim)):
                if _equal(seen, part, context):
                    whose = "this rank's" if rank == context.rank else f"rank {rank}'s"
                    return "part", f"it's {whose} part of the correct tensor, split along dimension {dim}"
    if _transposed(seen, expected, context):
        return "transposed", "it's the transpose of the correct tensor"
    return "shape", ""


def _guesses(seen: Tensor, expected: Tensor, context: Context) -> Iterator[tuple[str, str]]:
    """For a tensor that has the right shape but wrong values, yield guesses at the cause as (kind, text) pairs.

    The guesses are ordered from most to least informative.
    """
    infinite = ~torch.isfinite(seen) & (seen != expected)  # an infinity may be what's expected
    if infinite.any():
        what = "NaN" if torch.isnan(seen).any() else "infinity"
        yield "nan", f"{int(infinite.sum())} of {seen.numel()} elements are {what}"
    if not seen.any():
        yield "zeros", "all zeros"
    if seen.is_floating_point() and expected.any() and _close(seen, expected, 2e-6):
        off = float((seen - expected).abs().nan_to_num(0.0).max())  # the same infinity on both sides gives a NaN
        yield (
            "rounded",
            f"almost correct, off by {off:.1g} at most: either rounded, for example by a cast to float32, or something "
            "tiny was added. The page how_close.md, beside this notebook, says which differences are normal",
        )
    yield from combinations(seen, context.terms, context.rank, context.p, context.tol)
    for rank, other in enumerate(context.expected):
        if rank != context.rank and isinstance(other, Tensor) and _equal(seen, other, context):
            yield "other rank", f"equals what rank {rank} should have"
    yield from _multiple(seen, expected, context)
    if _transposed(seen, expected, context):
        yield "transposed", "the transpose of the correct tensor"
    yield from _parts(seen, expected, context)
    alike = [part for part in context.seen if isinstance(part, Tensor) and part.shape == seen.shape]
    finite = bool(expected.isfinite().all())
    if finite and 1 < len(alike) == context.p and _equal(torch.stack(alike).sum(0), expected, context):
        yield "part of a sum", "one term of the sum: the values of all ranks add up to the correct tensor"
    yield "value", _numbers(seen, expected, context)


def _multiple(seen: Tensor, expected: Tensor, context: Context) -> Iterator[tuple[str, str]]:
    p, wide = context.p, expected.to(torch.float64) if not expected.is_complex() else expected
    norm = (wide * wide).sum()
    # A common factor means nothing if there are fewer than two elements or if the elements are only rounding errors
    if not norm or expected.numel() < 2 or float(wide.abs().max()) <= context.tol:
        return
    factor = float((seen.to(wide.dtype) * wide).sum() / norm) if not expected.is_complex() else 0.0
    if not factor or not _close(seen.to(wide.dtype) / factor, wide, max(context.tol, 1e-9)):
        return
    for kind, value, words in (
        ("p times", p, f"exactly {p} times the correct tensor (p = {p})"),
        ("1/p", 1 / p, f"exactly 1/{p} of the correct tensor (p = {p})"),
        ("p times", p * p, f"exactly {p * p} times the correct tensor (p·p = {p * p})"),
        ("1/p", 1 / (p * p), f"exactly 1/{p * p} of the correct tensor (p·p = {p * p})"),
        ("negated", -1.0, "the correct tensor with the opposite sign"),
    ):
        if abs(factor - value) < 1e-6 * abs(value) and value != 1:
            yield kind, words
    yield "multiple", f"exactly {factor:.6g} times the correct tensor"


def _parts(seen: Tensor, expected: Tensor, context: Context) -> Iterator[tuple[str, str]]:
    """Yield guesses that some of the tensor's p equal parts along a dimension are wrong or out of order."""
    p = context.p
    for dim in range(seen.dim()):
        if p > 1 and seen.shape[dim] % p == 0:
            mine, right = seen.chunk(p, dim), expected.chunk(p, dim)
            same = [[_equal(part, other, context) for other in right] for part in mine] if p <= 4 else []
            for order in itertools.permutations(range(p)) if same else ():
                if all(same[i][k] for i, k in enumerate(order)):
                    yield "order", f"the correct parts, but in the wrong order along dimension {dim}: {list(order)}"
            wrong = [i for i in range(p) if not _close(mine[i], right[i], context.tol)]
            if len(wrong) < p:
                zero = all(not mine[i].any() for i in wrong)
                which = f"part{'s' * (len(wrong) > 1)} {names(wrong)} (of 0 to {p - 1}) along dimension {dim}"
                if zero:
                    yield "partly zero", f"zero in {which}, correct elsewhere"
                yield "partly wrong", f"wrong only in {which}: {_numbers(seen, expected, context)}"


def _numbers(seen: Tensor, expected: Tensor, context: Context) -> str:
    if expected.dim() == 0:
        return f"{_number(seen)} instead of {_number(expected)}"
    if seen.dtype == torch.bool:
        off = (seen != expected).to(torch.float64)
    else:
        off = (seen - expected).abs().to(torch.float64).nan_to_num(0.0, posinf=torch.inf)
    at = tuple(int(i) for i in torch.unravel_index(off.argmax(), off.shape))
    count = int((off > context.tol).sum())
    size = f"{count} of {off.numel()} elements differ"
    return f"{size}, most of all at {list(at)}: {_number(seen[at])} instead of {_number(expected[at])}"


def _number(value: Tensor) -> str:
    item = value.item()
    return f"{item:.6g}" if isinstance(item, float) else str(item)


def _close(a: Tensor, b: Tensor, tol: float) -> bool:
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    if a.numel() and not math.isfinite((a - b).abs().max()):
        infinite = b.isinf()
        if a.isnan().any() or not torch.equal(a.isinf(), infinite) or not torch.equal(a[infinite], b[infinite]):
            return False
        a, b = a[~infinite], b[~infinite]
    if a.numel() == 0:
        return True
    return float((a - b).abs().max()) <= tol * max(1.0, float(b.abs().max()))


def _equal(seen: Tensor, value: Any, context: Context) -> bool:
    return isinstance(value, Tensor) and seen.shape == value.shape and _close(seen, value.to(seen.dtype), context.tol)


def _transposed(seen: Tensor, expected: Tensor, context: Context) -> bool:
    return expected.dim() >= 2 and any(
        _equal(seen, expected.transpose(i, j), context) for i, j in itertools.combinations(range(expected.dim()), 2)
    )


def _mergeable(parts: Sequence[Tensor], dim: int) -> bool:
    return len({part.shape[:dim] + part.shape[dim + 1 :] for part in parts}) == 1


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def missing_value(context: Context) -> str:
    if context.gradient:
        return "None: no gradient reaches this tensor"
    return "got None. Does every path through the function return a value?"
