"""`verify` compares every rank's observations with the expected values, reports all differences, and asks one question.

An observation is a named value that a check records on a rank, such as "dx". A check's ledger keeps track of what the
check has compared.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tplab.course.checks.choose import FIRST, LAST, choose_general
from tplab.course.checks.default_device import MADE_THERE
from tplab.course.checks.differences import MISSING, NOT_RUN, Difference, Differences, compare, is_gradient
from tplab.course.checks.ledger import current
from tplab.course.checks.mistake_kinds import Context
from tplab.course.checks.observation import Changed, Claim
from tplab.course.feedback.verdict import CheckFailed, ranks_text
from tplab.course.notebooks.mistakes import shared


@dataclass(frozen=True)
class Question:
    """A question to ask when an answer is wrong in a particular way.

    when: either the names of all observations that differ, as in "dx" or ("dx", "backward traffic"), or a predicate on
          `Differences`, as in lambda d: d.kind("out") == "p times".
    """

    when: str | Sequence[str] | Callable[[Differences], bool]
    ask: str

    def fits(self, differences: Differences) -> bool:
        if callable(self.when):
            return bool(self.when(differences))
        wanted = frozenset([self.when] if isinstance(self.when, str) else self.when)
        return differences.names == wanted and not differences.malformed


# If only this aspect of the values is wrong, the check asks the shared question about it. But if the exercise's own
# question contains one of the words, it's already about this aspect, so the check asks the exercise's question instead
_ABOUT = {
    "dtype": ("dtype", "float", "int"),
    "sign": ("sign", "minus", "subtract", "negative", "gradient"),
}


def verify(
    number: str,
    p: int,
    observed: Sequence[Mapping[str, Any]],
    expected: Sequence[Mapping[str, Any]],
    *,
    questions: Sequence[Question] = (),
    lookalikes: Mapping[str, Mapping[str, Sequence[Any]]] | None = None,
    tol: float = 1e-9,
    note: str = "",
    alone: bool = False,
) -> None:
    """Compare every rank's observations with the expected values. If any differ, raise one CheckFailed that lists them.

    observed:   one dict per rank, as returned by `run_ranks`. `Changed` and `Claim` values must be empty, even if
                `expected` doesn't contain them.
    expected:   one dict per rank, with tensors, `Traffic`, numbers, strings, None, and tuples and lists of such values.
    questions:  the exercise's own questions. The check asks the first question that fits.
    lookalikes: values that common mistakes would produce, as in {"dx": {"this rank's part, before the sum": [value on
                rank 0, ...]}}. The description completes the sentence "dx equals ..." and is also the kind that a
                Question can match.
    tol:        the largest allowed difference, relative to the largest expected element, or absolute if that element is
                below 1.
    note:       what is special about this run, such as "with skip_bias_add". The headline shows p and then this note.
    alone:      whether a single process computed the results for all p ranks. If so, `observed` and `expected` contain
                only one dict each, and the failure names no rank.
    """
    differences, names = compare_ranks(p, observed, expected, lookalikes=lookalikes, tol=tol, alone=alone, note=note)
    note_the_device(number, p, observed, note)
    if differences:
        ask = choose_general(FIRST, differences)
        ask = ask or next((question.ask for question in questions if question.fits(differences)), "")
        ask = ask or choose_general(LAST, differences)
        if differences.aspect in _ABOUT and not any(word in ask for word in _ABOUT[differences.aspect]):
            ask = shared(differences.aspect)
        raise failed(number, differences, names, ask, note)
    note_right(p, observed, names, note)


def compare_ranks(
    p: int,
    observed: Sequence[Mapping[str, Any]],
    expected: Sequence[Mapping[str, Any]],
    *,
    lookalikes: Mapping[str, Mapping[str, Sequence[Any]]] | None = None,
    terms: Mapping[str, Sequence[Any]] | None = None,
    tol: float = 1e-9,
    alone: bool = False,
    note: str = "",
) -> tuple[Differences, list[str]]:
    """Return the differences between observed and expected values, and the names of all values that were compared.

    p:     as in `verify`, or 0 if the results of a function aren't about ranks
    terms: the tensors that each rank started with, as in {"x": [x on rank 0, ...]}. A wrong tensor may turn out to be
           a combination of these. For all other arguments, see `verify`.
    """
    count = 1 if alone else p
    current().alone = alone
    if len(expected) != count or len(observed) != count:
        got = f"got {len(observed)} and {len(expected)}"
        raise ValueError(f"a comparison needs {count} observed and {count} expected results, {got}")
    names = list(dict.fromkeys(name for rank in range(count) for name in _names(observed[rank], expected[rank])))
    found = []
    for name in names:
        seen = [_get(rank_observed, name) for rank_observed in observed]
        right = [rank_expected.get(name) for rank_expected in expected]
        for rank in range(count):
            if name not in expected[rank] and not isinstance(seen[rank], (Changed, Claim)):
                continue
            alike = {label: values[rank] for label, values in (lookalikes or {}).get(name, {}).items()}
            context = Context(count, rank, seen, right, alike, terms or {}, tol, is_gradient(name))
            difference = compare(seen[rank], right[rank], context)
            if difference:
                found.append(Difference(name, rank, *difference))
    return Differences(p, found, alone=alone, note=note), names


def failed(number: str, differences: Differences, names: Sequence[str], ask: str, note: str) -> CheckFailed:
    """Return the failure that lists the differences and asks one question. For `note`, see `verify`."""
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
    claims = [name for name in names if any(isinstance(_get(rank, name), Claim) for rank in observed)]
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


def _names(observed: Any, expected: Mapping[str, Any]) -> list[str]:
    if not isinstance(observed, Mapping):
        return [*expected]
    return [
        *expected,
        *(name for name, value in observed.items() if isinstance(value, (Changed, Claim)) and name != MADE_THERE),
    ]


def _get(observed: Any, name: str) -> Any:
    return observed.get(name, MISSING) if isinstance(observed, Mapping) else MISSING
