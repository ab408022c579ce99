"""A ledger keeps track of a running check.

The ledger stores the seed of the check's random inputs, the observations that the check has compared, and the world
sizes at which the answer was right.
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from tplab.course.checks.default_device import MADE_THERE
from tplab.course.checks.differences import NOT_RUN, Differences
from tplab.course.checks.observation import Claim
from tplab.course.feedback.verdict import CheckFailed, ranks_text
from tplab.course.notebooks.mistakes import shared


@dataclass
class Ledger:
    exercise: str
    seed: int
    generators: int = 0  # number of random generators derived from the seed
    compared: dict[str, None] = field(default_factory=dict)  # names of observations, in the order they were compared
    claims: dict[str, None] = field(default_factory=dict)  # statements that turned out to be true
    passed: list[int] = field(default_factory=list)  # world sizes at which the answer passed a case
    afterwards: CheckFailed | None = None  # failure that the check raises if everything else is right
    alone: bool = False  # whether a single process computed the results for all world sizes

    def told(self) -> str:
        """For the verdict, return a sentence that lists what was right and at which world sizes."""
        sizes = ", ".join(map(str, sorted(self.passed)))
        where = f", {'for' if self.alone else 'on every rank at'} p = {sizes}" if sizes else ""
        told = f"Right: {', '.join(self.compared)}{where}."
        return f"{told} Also: {'; '.join(self.claims)}." if self.claims else told


_running: list[Ledger] = []


def current() -> Ledger:
    """Return the ledger of the running check, or a throwaway ledger if no check is running."""
    return _running[-1] if _running else Ledger("", secrets.randbelow(10**6))


@contextmanager
def open_ledger(exercise: str, seed: int | None) -> Iterator[Ledger]:
    ledger = Ledger(exercise, secrets.randbelow(10**6) if seed is None else seed)
    _running.append(ledger)
    try:
        yield ledger
    finally:
        _running.remove(ledger)


def fresh_generator() -> torch.Generator:
    """Return a random number generator with a new seed, so that every run of a check uses different inputs.

    If the check fails, its message contains the seed, so that the learner can repeat the check with the same inputs.
    """
    ledger = current()
    ledger.generators += 1
    return torch.Generator().manual_seed(ledger.seed * 1000 + ledger.generators)


def failed(number: str, differences: Differences, names: Sequence[str], ask: str, note: str) -> CheckFailed:
    """Return the failure that lists the differences and asks one question. For `note`, see `compare_ranks`."""
    p, wrong = differences.p, {d.name for d in differences}
    ranks = sorted({d.rank for d in differences if d.kind != NOT_RUN})
    where = ", ".join(filter(None, [f"Exercise {number}", f"p = {p}" if p else "", note]))
    on = f" on {ranks_text(ranks, p)}" if p > 1 and not differences.alone else ""
    how = "wrong"
    if differences.names and all("traffic" in name for name in differences.names):
        how = "right values, but wrong traffic"
    return CheckFailed(
        f"{where}: {how}{on}.",
        rows=list(differences.rows()),
        right=[name for name in names if name not in wrong],
        question=ask,
    )


def note_right(
    p: int, observed: Sequence[Mapping[str, Any]], names: Sequence[str], note: str, alone: bool = False
) -> None:
    """Record in the ledger that everything was right in a case. Headlines refer to the case by its `note`."""
    ledger = current()
    claims = [name for name in names if any(isinstance(rank.get(name), Claim) for rank in observed)]
    ledger.alone = alone
    ledger.claims.update(dict.fromkeys(claims))
    ledger.compared.update(dict.fromkeys(name for name in names if name not in claims))
    if p and p not in ledger.passed:
        ledger.passed.append(p)


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
