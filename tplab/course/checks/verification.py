"""Compare every rank's observations with the expected values, and build the failure that lists all differences.

An observation is a named value that a check records on a rank, such as "dx". A check's ledger keeps track of what the
check has compared.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tplab.course.checks.default_device import MADE_THERE
from tplab.course.checks.differences import MISSING, NOT_RUN, Difference, Differences, compare, is_gradient
from tplab.course.checks.ledger import current
from tplab.course.checks.mistake_kinds import Context
from tplab.course.checks.observation import Changed, Claim
from tplab.course.feedback.verdict import CheckFailed, ranks_text
from tplab.course.notebooks.mistakes import shared


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
    current().alone = alone
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


def failed(number: str, differences: Differences, names: Sequence[str], ask: str, note: str) -> CheckFailed:
    """Return the failure that lists the differences and asks one question. For `note`, see `compare_ranks`."""
    p, wrong = differences.p, {d.name for d in differences}
    ranks = sorted({d.rank for d in differences if d.kind != NOT_RUN})
    where = ", ".join(filter(None, [f"Exercise {number}", f"p = {p}" if p else "", note]))
    on = f" on {ranks_text(ranks, p)}" if p > 1 and not differences.alone else ""
    how = " ".join(filter(None, ["wrong", differences.aspect]))
    if differences.names and all("traffic" in name for name in differences.names):
        how = "right values, but wrong traffic"
    return CheckFailed(
        f"{where}: {how}{on}{current().right_before(note, p)}.",
        rows=list(differences.rows()),
        right=[name for name in names if name not in wrong],
        question=ask,
    )


def note_right(p: int, observed: Sequence[Mapping[str, Any]], names: Sequence[str], note: str) -> None:
    """Record in the ledger that everything was right in a case."""
    claims = [name for name in names if any(isinstance(rank.get(name), Claim) for rank in observed)]
    current().cases += 1
    current().values += len(observed) * len(names)
    current().claims.update(dict.fromkeys(claims))
    current().compared.update(dict.fromkeys(name for name in names if name not in claims))
    if p:
        current().note_right(note, p)


def note_the_device(number: str, p: int, observed: Sequence[Mapping[str, Any]], note: str) -> None:
    """If a rank created a tensor on the CPU, record a failure in the ledger.

    The check reports this failure only if everything else is correct.
    """
    texts = {rank: seen[MADE_THERE] for rank, seen in enumerate(observed) if seen.get(MADE_THERE)}
    if texts and current().afterwards is None:
        where = ", ".join(filter(None, [f"Exercise {number}", f"p = {p}" if p else "", note]))
        on = ranks_text(list(texts), len(observed))
        current().afterwards = CheckFailed(
            f"{where}: wrong device. Everything else is correct.",
            rows=[(MADE_THERE, on, f"not true: {next(iter(texts.values()))}")],
            question=shared("device"),
        )


def _names(observed: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    statements = [name for name, value in observed.items() if isinstance(value, (Changed, Claim))]
    return [*expected, *(name for name in statements if name != MADE_THERE)]
