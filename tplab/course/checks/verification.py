"""`verify` compares every rank's observations with the expected values, reports all differences, and asks one question.

An observation is a named value that a check records on a rank, such as "dx". A check's ledger keeps track of what the
check has compared.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tplab.course.checks.default_device import MADE_THERE
from tplab.course.checks.default_device import QUESTION as MADE_THERE_QUESTION
from tplab.course.checks.differences import MALFORMED, MISSING, NOT_RUN, Difference, compare
from tplab.course.checks.ledger import current
from tplab.course.checks.mistake_kinds import Context
from tplab.course.checks.observation import Changed, Claim
from tplab.course.feedback.verdict import CheckFailed, ranks_text

# kind of difference -> the aspect of the observation that is wrong
_ASPECTS = {
    "dtype": "dtype",
    "negated": "sign",
    "order": "order",
    "transposed": "order",
    "p times": "scale",
    "1/p": "scale",
    "multiple": "scale",
}


class Differences(Sequence[Difference]):
    """All differences found in one run on p ranks.

    names:       the observations that differ on at least one rank, not counting those that the check couldn't make.
    kind(name):  how the observation differs, "mixed" if it differs in several ways, or "" if it's right on every rank.
    text(name):  the difference in words.
    ranks(name): the ranks on which the observation differs.
    malformed:   whether an output is missing, isn't a tensor, or has the wrong structure or dtype. If so, only
                 questions with a predicate can match.
    """

    def __init__(self, p: int, differences: Sequence[Difference], *, alone: bool = False) -> None:
        self.p, self.alone = p, alone
        self._all = list(differences)
        self.names = frozenset(d.name for d in self._all if d.kind != NOT_RUN)
        self.malformed = any(d.kind in MALFORMED and not _is_gradient(d.name) for d in self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, index: Any) -> Any:
        return self._all[index]

    def kind(self, name: str) -> str:
        kinds = {d.kind for d in self._all if d.name == name and d.kind != NOT_RUN}
        return "mixed" if len(kinds) > 1 else next(iter(kinds), "")

    def text(self, name: str) -> str:
        """Describe the difference on the first rank where the observation differs. Return "" if it never differs."""
        return next((d.text for d in self._all if d.name == name), "")

    def kinds(self) -> set[str]:
        return {d.kind for d in self._all}

    def ranks(self, name: str) -> list[int]:
        return [d.rank for d in self._all if d.name == name and d.kind != NOT_RUN]

    @property
    def aspect(self) -> str:
        """The aspect that all differences share ("dtype", "sign", "order" or "scale"), or "" if they share none."""
        aspects = {_ASPECTS.get(d.kind, "") for d in self._all if d.kind != NOT_RUN and "traffic" not in d.name}
        return next(iter(aspects)) if len(aspects) == 1 else ""

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


LATE_QUESTION = Question(
    lambda d: "never waited" in d.kinds(),
    "You started a collective with async_op=True but never waited for it. When is it safe to read the result?",
)

BARRIER_QUESTION = Question(
    lambda d: (
        bool(d.names)
        and all("traffic" in name and "barrier" in d.text(name).partition("; saw ")[2] for name in d.names)
    ),
    "The values are correct, but your code calls a barrier it doesn't need. A barrier doesn't transfer any data. "
    "All the barrier does is make every rank wait for the slowest one, but a collective already waits for all the "
    "data it needs. Which of your lines calls the barrier? Would anything go wrong without it?",
)

REQUIRES_GRAD_QUESTION = Question(
    lambda d: bool(d.names) and {d.kind(name) for name in d.names} == {"requires grad"},
    "The values are correct, but your code changed the `requires_grad` flag of a tensor that belongs to the caller. "
    "Autograd would now compute a gradient that the caller never asked for, and on integer tensors, such as token "
    "IDs, setting the flag would raise an error. Which line calls requires_grad_() on a tensor that was passed in?",
)

_FIRST = (BARRIER_QUESTION, REQUIRES_GRAD_QUESTION)

# aspect -> (words, question). If only this aspect is wrong, the check asks the question. But if the exercise's own
# question contains one of the words, it's already about this aspect, so the check asks the exercise's question instead
_ABOUT = {
    "dtype": (
        ("dtype", "float", "int"),
        "The result has the wrong dtype. Which line creates a tensor with a different dtype, or casts a tensor to a "
        "different dtype? (torch.empty and torch.zeros create float32 tensors unless you pass dtype=x.dtype.)",
    ),
    "sign": (
        ("sign", "minus", "subtract", "negative", "gradient"),
        "The magnitudes are correct, but the signs are wrong. Did you subtract two terms in the wrong order, or is "
        "there one minus sign too many?",
    ),
}

# The check asks one of these fallback questions if none of the exercise's own questions fits
_GENERAL = (
    Question(
        lambda d: d.malformed,
        "What should your function return, and what does its last line return? (dist.all_reduce and dist.all_gather "
        "write into the tensors that you pass to them, and both return None.)",
    ),
    Question(
        lambda d: "changed" in d.kinds(),
        "Your code wrote into one of the caller's tensors, but the caller may still need the old values. Which of your "
        "lines does that? (For example, a collective writes into the tensor that you pass to it.)",
    ),
    LATE_QUESTION,
    Question(
        lambda d: any(d.kind(name) == "none" for name in d.names),
        "Trace the tensor from the input to the output. Where does the tensor leave autograd's graph? Or does one "
        "of the ranks never use the tensor?",
    ),
    Question(
        lambda d: d.aspect == "order",
        "All the correct elements are there, but they're in the wrong places. In what order does your code "
        "concatenate the ranks' shards? In what order does your code arrange the dimensions?",
    ),
    Question(
        lambda d: d.aspect == "scale",
        "The result is off by a constant factor. How many times does your code add each rank's term? Does your "
        "code multiply or divide the sum by anything?",
    ),
    Question(
        lambda d: all("traffic" in name for name in d.names),
        "The values are correct, but the number of bytes sent isn't. Is a collective missing or unnecessary? Or "
        "does a collective send more than it has to?",
    ),
    Question(
        lambda d: True,
        "At this point, should each rank have the full tensor, its own slice, or one term of a sum? And what does "
        "each rank actually have?",
    ),
)


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
    count = 1 if alone else p
    current().alone = alone
    if len(expected) != count or len(observed) != count:
        got = f"got {len(observed)} and {len(expected)}"
        raise ValueError(f"verify needs {count} observed and {count} expected results, {got}")
    names = list(dict.fromkeys(name for rank in range(count) for name in _names(observed[rank], expected[rank])))
    found = []
    for name in names:
        seen = [_get(rank_observed, name) for rank_observed in observed]
        right = [rank_expected.get(name) for rank_expected in expected]
        for rank in range(count):
            if name not in expected[rank] and not isinstance(seen[rank], (Changed, Claim)):
                continue
            alike = {label: values[rank] for label, values in (lookalikes or {}).get(name, {}).items()}
            context = Context(count, rank, seen, right, alike, tol, _is_gradient(name))
            difference = compare(seen[rank], right[rank], context)
            if difference:
                found.append(Difference(name, rank, *difference))
    _note_the_device(number, p, observed, note)
    if found:
        raise _explain(number, Differences(p, found, alone=alone), names, questions, note)
    claims = [name for name in names if any(isinstance(_get(rank, name), Claim) for rank in observed)]
    current().cases += 1
    current().values += count * len(names)
    current().claims.update(dict.fromkeys(claims))
    current().compared.update(dict.fromkeys(name for name in names if name not in claims))
    current().note_right(note, p)


def _explain(
    number: str, differences: Differences, names: Sequence[str], questions: Sequence[Question], note: str
) -> CheckFailed:
    p = differences.p
    ranks = sorted({d.rank for d in differences if d.kind != NOT_RUN})
    where = f"p = {p}" + (f", {note}" if note else "")
    on = f" on {ranks_text(ranks, p)}" if p > 1 and not differences.alone else ""
    wrong = {d.name for d in differences}
    ask = next(question.ask for question in (*_FIRST, *questions, *_GENERAL) if question.fits(differences))
    words, instead = _ABOUT.get(differences.aspect, ((), ask))
    how = " ".join(filter(None, ["wrong", differences.aspect]))
    return CheckFailed(
        f"Exercise {number}, {where}: {how}{on}{current().right_before(note)}.",
        rows=list(differences.rows()),
        right=[name for name in names if name not in wrong],
        question=ask if any(word in ask for word in words) else instead,
    )


def _note_the_device(number: str, p: int, observed: Sequence[Mapping[str, Any]], note: str) -> None:
    """If a rank created a tensor on the CPU, record a failure in the ledger.

    The check reports this failure only if everything else is correct.
    """
    texts = {rank: seen[MADE_THERE] for rank, seen in enumerate(observed) if seen.get(MADE_THERE)}
    if texts and current().afterwards is None:
        where = ", ".join(filter(None, [f"p = {p}", note]))
        on = ranks_text(list(texts), len(observed))
        current().afterwards = CheckFailed(
            f"Exercise {number}, {where}: wrong device. Everything else is correct.",
            rows=[(MADE_THERE, on, f"not true: {next(iter(texts.values()))}")],
            question=MADE_THERE_QUESTION,
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


def _is_gradient(name: str) -> bool:
    """Return True for the name of a gradient, such as "dx", "dW" or "db2", but not for "dtype" or "device"."""
    return name.startswith("d") and name not in ("dtype", "dim", "device", "divide")
