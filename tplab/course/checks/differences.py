"""Compare an observation with the expected value, and describe how the observation differs.

The description is specific: it says "exactly 2 times the correct tensor" rather than "not close".

    compare(seen, expected, context) -> None | (kind, text)

`kind` is a word or phrase that a symptom in a table of mistakes can match. `text` is what the learner reads.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from typing import Any

from torch import Tensor

from tplab.course.checks.default_device import MADE_THERE
from tplab.course.checks.describe import describe, describe_sequence
from tplab.course.checks.observation import REQUIRES_GRAD, Changed, Claim, NotRun
from tplab.course.checks.recorded_traffic import Traffic
from tplab.course.checks.tensor_differences import Context, missing_value, tensor_difference
from tplab.course.feedback.verdict import names, ranks_text

NOT_RUN = "not run"
MALFORMED = ("none", "type", "structure", "dtype", "missing")
MISSING = object()  # stands for an observation that the rank didn't return


@dataclass(frozen=True)
class Difference:
    """A description of how an observation on one rank differs from the expected value."""

    name: str
    rank: int
    kind: str
    text: str


class Differences(Sequence[Difference]):
    """All differences found in one run on p ranks.

    names:       the observations that differ on at least one rank, not counting those that the check couldn't make.
    kind(name):  how the observation differs, "mixed" if it differs in several ways, or "" if it's right on every rank.
    ranks(name): the ranks on which the observation differs.
    note:        the description of the case, which the headline shows after p.
    malformed:   whether an output is missing, isn't a tensor, or has the wrong structure or dtype.
    """

    def __init__(self, p: int, differences: Sequence[Difference], *, alone: bool = False, note: str = "") -> None:
        self.p, self.alone, self.note = p, alone, note
        self._all = list(differences)
        self.names = frozenset(d.name for d in self._all if d.kind != NOT_RUN)
        self.malformed = any(d.kind in MALFORMED and not is_gradient(d.name) for d in self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, index: Any) -> Any:
        return self._all[index]

    def kind(self, name: str) -> str:
        kinds = {d.kind for d in self._all if d.name == name and d.kind != NOT_RUN}
        return "mixed" if len(kinds) > 1 else next(iter(kinds), "")

    def ranks(self, name: str) -> list[int]:
        return [d.rank for d in self._all if d.name == name and d.kind != NOT_RUN]

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """Yield (observations, ranks, text) rows.

        Observations that differ in the same way share a row, and so do observations that the check couldn't make.
        """
        rows: dict[tuple[str, str], list[str]] = {}  # (ranks, text) -> names of observations
        for name in dict.fromkeys(d.name for d in self._all if d.kind != NOT_RUN):
            mine = [d for d in self._all if d.name == name and d.kind != NOT_RUN]
            for kind in dict.fromkeys(d.kind for d in mine):
                alike = [d for d in mine if d.kind == kind]
                varied = len({d.text for d in alike}) > 1
                text = f"{alike[0].text} (rank {alike[0].rank})" if varied else alike[0].text
                where = "" if self.alone else ranks_text([d.rank for d in alike], self.p)
                rows.setdefault((where, text), []).append(name)
        for (ranks, text), alike_names in rows.items():
            yield ", ".join(alike_names), ranks, text
        skipped = [d for d in self._all if d.kind == NOT_RUN and d.name not in self.names]
        if skipped:
            yield "the rest", "", ", ".join(dict.fromkeys(d.name for d in skipped)) + ": " + skipped[0].text


def compare_ranks(
    p: int,
    observed: Sequence[Mapping[str, Any]],
    expected: Sequence[Mapping[str, Any]],
    *,
    terms: Mapping[str, Sequence[Any]] | None = None,
    tol: float = 1e-9,
    alone: bool = False,
    note: str = "",
) -> tuple[Differences, list[str]]:
    """Return the differences between observed and expected values, and the names of all values that were compared.

    p:        the number of ranks, or 0 if the results of a function aren't about ranks
    observed: one dict per rank. `Changed` and `Claim` values must be empty, even if `expected` doesn't contain them
    expected: one dict per rank, with tensors, `Traffic`, numbers, strings, None, and tuples and lists of such values
    terms:    the tensors that each rank started with, as in {"x": [x on rank 0, ...]}. A wrong tensor may turn out to
              be a combination of these
    tol:      the largest allowed difference, relative to the largest expected element, or absolute if that element is
              below 1
    alone:    whether a single process computed the results for all p ranks. If so, `observed` and `expected` contain
              only one dict each, and the failure names no rank
    note:     what is special about this run, such as "in bfloat16". The headline shows p and then this note
    """
    count = 1 if alone else p
    names = list(dict.fromkeys(name for pair in zip(observed, expected, strict=True) for name in _names(*pair)))
    found = []
    for name in names:
        seen = [rank_observed.get(name, MISSING) for rank_observed in observed]
        right = [rank_expected.get(name) for rank_expected in expected]
        for rank in range(count):
            if name not in expected[rank] and not isinstance(seen[rank], (Changed, Claim)):
                continue
            context = Context(count, rank, seen, right, terms or {}, tol, is_gradient(name))
            difference = compare(seen[rank], right[rank], context)
            if difference:
                found.append(Difference(name, rank, *difference))
    return Differences(p, found, alone=alone, note=note), names


def _names(observed: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    statements = [name for name, value in observed.items() if isinstance(value, (Changed, Claim))]
    return [*expected, *(name for name in statements if name != MADE_THERE)]


def compare(seen: Any, expected: Any, context: Context) -> tuple[str, str] | None:
    """Return the kind of difference and a description of it, or None if the values agree."""
    if isinstance(seen, NotRun):
        return NOT_RUN, f"not run, because {seen.why}"
    if isinstance(seen, Changed):
        if not seen:
            return None
        written = [name for name in seen if not name.startswith(REQUIRES_GRAD)]
        if not written:
            flagged = names([name.removeprefix(REQUIRES_GRAD) for name in seen])
            return "requires grad", f"your code changed the requires_grad flag of {flagged}"
        return "changed", f"your code wrote into {names(written)}, which the caller still needs"
    if isinstance(seen, Claim):
        return ("not so", f"not true: {seen}") if seen else None
    if isinstance(expected, Traffic):
        return _traffic(seen, expected)
    if seen is MISSING:
        return "missing", "missing"
    if isinstance(expected, Tensor):
        return tensor_difference(seen, expected, context)
    if isinstance(expected, (tuple, list)):
        return _sequence(seen, expected, context)
    if expected is None:
        return None if seen is None else ("type", f"got {describe(seen)}, expected None")
    if seen is None:
        return "none", missing_value(context)
    if _is_number(expected):
        return _number(seen, expected, context.tol)
    if isinstance(expected, bool) == isinstance(seen, bool) and type(seen) is not Tensor and seen == expected:
        return None
    return "value", f"got {describe(seen)}, expected {expected!r}"


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _number(seen: Any, expected: Any, tol: float) -> tuple[str, str] | None:
    """Compare numbers. Integers have to be the same, but if one of the numbers is a float, it may be rounded."""
    if not _is_number(seen):
        return "type", f"got {describe(seen)}, expected a number"
    rounded = isinstance(seen, float) or isinstance(expected, float)
    if seen == expected or (rounded and abs(seen - expected) <= tol * max(1.0, abs(expected))):
        return None
    return "value", f"got {_written(seen)}, expected {_written(expected)}"


def _written(number: Any) -> str:
    return f"{int(number):,}" if isfinite(number) and number == int(number) else f"{float(number):.6g}"


def _traffic(seen: Any, expected: Traffic) -> tuple[str, str] | None:
    if not isinstance(seen, Traffic):
        return "missing", "wasn't recorded"
    if seen == expected:
        return None
    late = any(not call.waited for call in seen)
    kind = "never waited" if late else "no traffic" if not seen else "traffic"
    wanted, found = _spelled(expected), _spelled(seen)
    if wanted == found:  # the same calls, but among different ranks
        wanted, found = (f"{text} among ranks {_members(t)}" for text, t in ((wanted, expected), (found, seen)))
    return kind, f"expected {wanted}; saw {found}"


def _members(traffic: Traffic) -> str:
    return " and ".join(str(list(group)) for group in sorted({call.group for call in traffic}))


def _spelled(traffic: Traffic) -> str:
    return str(traffic) if traffic else "no collective"


def _sequence(seen: Any, expected: Sequence[Any], context: Context) -> tuple[str, str] | None:
    if not isinstance(seen, (tuple, list)):
        kind = "none" if seen is None else "structure"
        return kind, f"got {describe(seen)}, expected a {describe_sequence(expected)}"
    if len(seen) != len(expected):
        return "structure", f"got a {describe_sequence(seen)}, expected a {describe_sequence(expected)}"
    for index, (mine, right) in enumerate(zip(seen, expected, strict=True)):
        all_seen = [_item(value, index) for value in context.seen]
        all_right = [_item(value, index) for value in context.expected]
        own = Context(context.p, context.rank, all_seen, all_right, tol=context.tol, guess=context.guess)
        found = compare(mine, right, own)
        if found:
            return found[0], f"element {index}: {found[1]}"
    return None


# Words that begin with d, but not the names of gradients that begin with them
_NO_GRADIENT = ("deep", "device", "dim", "divide", "down", "drawn", "drift", "dtype", "dtypes")


def is_gradient(name: str) -> bool:
    """Return True for the name of a gradient, such as "dx", "dW" or "ddown.weight", but not for "drift" or "dtype"."""
    return name.startswith("d") and re.split(r"\W", name)[0] not in _NO_GRADIENT


def _item(values: Any, index: int) -> Any:
    return values[index] if isinstance(values, (tuple, list)) and index < len(values) else MISSING
