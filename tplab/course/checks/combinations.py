"""Recognize a wrong tensor as a combination of what the ranks started with.

Nearly every mistake in a collective gives a weighted sum over the ranks: seen = c_0 x_0 + ... + c_(p-1) x_(p-1), where
x_r is rank r's tensor. The coefficients say what went wrong:

    (0, 1, 0, 0) on rank 1    this rank's own x, so nothing was summed
    (1, 1, 1, 1)              the sum, although something else was expected
    (1/4, 1/4, 1/4, 1/4)      the mean
    (1, 0, 1, 1)              rank 1's term is missing
    (1, 1, 2, 1)              rank 2's term was counted twice
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

MISSING, DOUBLED = "missing rank", "doubled rank"


def combinations(
    seen: Tensor, terms: Mapping[str, Sequence[Any]], rank: int, p: int, tol: float
) -> Iterator[tuple[str, str]]:
    """Yield (kind, text) for each set of terms that `seen` is a recognizable combination of.

    seen:   the wrong tensor on this rank
    terms:  the tensors that each rank started with, as in {"x": [x on rank 0, ...]}. Terms with another shape than
            `seen` are skipped, and so are all terms if there's just one rank
    """
    for name, tensors in terms.items():
        alike = [each for each in tensors if isinstance(each, Tensor) and each.shape == seen.shape]
        if len(alike) == p > 1 and seen.is_floating_point() and seen.isfinite().all():
            coefficients = _solved(seen.double().cpu(), torch.stack([each.double().cpu() for each in alike]), tol)
            if coefficients is not None:
                yield from _named(name, coefficients, rank, p)
            elif torch.equal(seen.double().cpu(), torch.stack(alike).double().cpu().amax(0)):
                yield f"maximum of {name}", f"equals the elementwise maximum of {name} across ranks"


def _solved(seen: Tensor, terms: Tensor, tol: float) -> list[float] | None:
    """Return the coefficients c with seen = sum of c_r terms[r], or None if there are none or many."""
    columns = terms.flatten(1).T  # [elements, p]
    if len(columns) <= len(terms) or torch.linalg.matrix_rank(columns) < len(terms):
        return None
    found = torch.linalg.lstsq(columns, seen.flatten()[:, None]).solution[:, 0]
    off = (columns @ found - seen.flatten()).abs().max()
    return found.tolist() if off <= max(tol, 1e-9) * max(1.0, float(seen.abs().max())) else None


def _named(name: str, coefficients: list[float], rank: int, p: int) -> Iterator[tuple[str, str]]:
    def is_like(*wanted: float) -> bool:
        return all(abs(c - w) < 1e-6 for c, w in zip(coefficients, wanted, strict=True))

    the = name if len(name) == 1 else f"the {name}"
    own = [float(other == rank) for other in range(p)]
    if is_like(*own):
        yield f"own {name}", f"equals this rank's own {name}"
    if is_like(*(p * c for c in own)):
        yield f"p times own {name}", f"equals p times this rank's own {name} (p = {p})"
    if is_like(*[1.0] * p):
        yield f"sum of {name}", f"equals the sum of {the} over all ranks"
    if is_like(*[1 / p] * p):
        yield f"mean of {name}", f"equals the mean of {the} over all ranks"
    for other in range(p):
        if is_like(*(float(each == other) for each in range(p))):
            yield f"{name} of rank {other}", f"equals rank {other}'s {name}"
        if is_like(*(float(each != other) for each in range(p))):
            yield MISSING, f"equals the sum of {the} over all ranks except rank {other}"
        if is_like(*(1.0 + (each == other) for each in range(p))):
            yield DOUBLED, f"equals the sum of {the} over all ranks, with rank {other} counted twice"
