"""Choose the question that a wrong answer gets, from the tables of known mistakes.

The exercise's own table comes first. If nothing in it fits, it's one of the questions that any exercise may ask, which
are in `mistakes.md` in this folder.
"""

import re
from collections.abc import Callable
from typing import Any

from tplab.course.checks.differences import NOT_RUN, Differences, compare
from tplab.course.checks.observation import Changed, Claim, NotRun, Seen
from tplab.course.checks.tensor_differences import Context
from tplab.course.notebooks.mistakes import SHARED, Mistake, Table, shared, tables

# Sections of SHARED: questions to consider before an exercise's own, after them, and instead of them
FIRST, LAST, VARIANTS = "first", "last", "variants"


def choose(own: Table, differences: Differences, explains: Callable[[Mistake], int]) -> str:
    """Return the question for an answer that differs from the right one.

    explains: how much of the differences a known mistake explains, which is all of them (2), the first one (1), or
              nothing (0)

    A mistake that explains everything wins. Otherwise, it's the first question whose mistake or symptom fits, among
    those that come first in every exercise, the exercise's own, and those that come last.
    """
    for row in own.rows:
        if any(explains(mistake) == 2 for mistake in row.mistakes):
            return row.ask
    for row in (*tables(SHARED)[FIRST].rows, *own.rows, *tables(SHARED)[LAST].rows):
        if any(fits(symptom, differences) for symptom in row.symptoms) or any(map(explains, row.mistakes)):
            return row.ask
    raise AssertionError(f"the last row of {SHARED.name} fits everything")


def explained(theirs: Seen | None, observed: Seen, differences: Differences, expected: Seen) -> int:
    """Return how much of an answer's differences a known mistake explains: all (2), the first one (1), or nothing (0).

    To explain the first difference, the mistake must have the same wrong value, and whatever is right in the answer
    must be right in the mistake, too.
    """
    if theirs is None:
        return 0
    names = dict.fromkeys(name for rank in observed for name in rank)
    wrong_ones_first = sorted(names, key=lambda name: name not in differences.names)
    if all(same(name, theirs, observed) for name in wrong_ones_first):
        return 2
    first = next((row.name for row in differences if row.kind != NOT_RUN), "")
    says_little = not first or "traffic" in first or differences.kind(first) in ("zeros", "none", "changed", "not so")
    if says_little or same(first, theirs, expected):
        return 0
    fine = [name for name in names if name in expected[0] and name not in differences.names]
    return int(same(first, theirs, observed) and all(same(name, theirs, expected) for name in fine))


def same(name: str, mine: Seen, theirs: Seen) -> bool:
    """Return whether an observation is the same on every rank."""
    return all(
        _same_value(a.get(name), b.get(name), rank) for rank, (a, b) in enumerate(zip(mine, theirs, strict=True))
    )


def _same_value(mine: Any, theirs: Any, rank: int) -> bool:
    if isinstance(theirs, (Claim, Changed, NotRun, type(None))):
        return type(mine) is type(theirs) and bool(mine) == bool(theirs)
    return compare(mine, theirs, Context(1, rank, [], [], guess=False)) is None


def about_variant(differences: Differences) -> str:
    """Return the question for an answer that's right in the original case but wrong in a variant of it (a twin)."""
    rows = tables(SHARED)[VARIANTS].rows
    return next(row.ask for row in rows if any(fits(symptom, differences) for symptom in row.symptoms))


def about_report(own: Table, report: str, ended: str, *, note: str = "", in_groups: bool = False) -> str:
    """Return the first question with a symptom that fits a run that failed, or "".

    ended: how the run ended, which is "stuck", "crash" or "late"

    "report WORDS"   the report of the failed run matches this regular expression
    "stuck"          the ranks are waiting for each other
    "crash"          the run ended with an error
    "late"           the run was stopped, because the ranks didn't finish in time
    "case WORDS", "in groups"    as in `fits`. In a run in groups, "in groups" takes the place of "stuck" and "crash" if
                                 the table has this symptom
    """
    if in_groups and ended != "late" and about_groups(own):
        ended = "in groups"

    def fits_run(term: str) -> bool:
        word, _, rest = term.partition(" ")
        if word in ("report", "case"):
            return bool(re.search(rest, report if word == "report" else note))
        return term == ended

    for row in (*tables(SHARED)[FIRST].rows, *own.rows, *tables(SHARED)[LAST].rows):
        if any(all(map(fits_run, symptom.split(" and "))) for symptom in row.symptoms):
            return row.ask
    return ""


def about_groups(own: Table) -> str:
    """Return the question with the symptom "in groups", which is about a call that doesn't pass its group, or ""."""
    return next((row.ask for row in own.rows if "in groups" in row.symptoms), "")


def ask_about_group(ask: str) -> str:
    """Return the question `ask`, preceded by a sentence saying that the ranks form two groups in this run."""
    return f"{shared('two groups')} {ask}"


def fits(symptom: str, d: Differences) -> bool:
    """Return whether the differences show a symptom, such as "dx: 1/p / p times and not out" or "only traffic".

    NAME                an observation that differs. The name is a regular expression
    NAME: KIND / KIND   an observation that differs in one of these ways. A kind may be a regular expression, too
    only NAME, NAME     these observations differ, and no others
    saw WORDS           the traffic differs, and the calls that were seen match this regular expression
    root NAME           the observation is right on rank 0, and wrong on other ranks
    some NAME           the observation is right on some ranks, and wrong on other ranks
    case WORDS          the description of the case in the headline matches this regular expression
    p = NUMBER          the run is about this many ranks
    malformed           an output is missing, isn't a tensor, or has the wrong structure or dtype
    not TERM            the opposite
    """
    return all(_fits(term, d) for term in symptom.split(" and "))


def _fits(term: str, d: Differences) -> bool:
    word, _, rest = term.partition(" ")
    if word == "not":
        return not _fits(rest, d)
    if word == "only":
        wanted = rest.split(", ")
        named = [[name for name in d.names if re.fullmatch(each, name)] for each in wanted]
        return all(named) and d.names == {name for some in named for name in some}
    if word == "saw":
        return any(re.search(rest, row.text.partition("; saw ")[2]) for row in d if "traffic" in row.name)
    if word == "root":
        return d.p > 1 and rest in d.names and 0 not in d.ranks(rest)
    if word == "some":
        return 0 < len(set(d.ranks(rest))) < d.p
    if word == "case":
        return bool(re.search(rest, d.note))
    if word == "p":
        return rest == f"= {d.p}"
    if term == "malformed":
        return d.malformed
    name, _, kinds = term.partition(": ")
    ways = kinds.split(" / ") if kinds else []
    rows = [row for row in d if row.kind != NOT_RUN or NOT_RUN in ways]
    return any(
        re.fullmatch(name, row.name)
        and (not ways or any(way == row.kind or re.fullmatch(way, row.kind) for way in ways))
        for row in rows
    )
