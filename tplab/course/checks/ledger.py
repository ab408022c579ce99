"""The ledger of the running check: the seed of its inputs, what it has compared, and the world sizes that passed."""

import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tplab.course.feedback.tracebacks import VOTE_SHAPE
from tplab.course.feedback.verdict import CheckFailed, names
from tplab.runtime.records import Collective


@dataclass
class Ledger:
    exercise: str
    seed: int
    generators: int = 0  # number of random generators derived from the seed
    compared: dict[str, None] = field(default_factory=dict)  # names, in the order they were compared
    claims: dict[str, None] = field(default_factory=dict)  # statements that turned out to be true
    passed: list[int] = field(default_factory=list)  # world sizes
    right: dict[str, list[int]] = field(default_factory=dict)  # note of a case -> world sizes it was right at
    afterwards: CheckFailed | None = None  # raised if everything else is right
    cases: int = 0  # comparisons with the expected values
    values: int = 0  # observations compared in all cases, on all ranks
    messages: int = 0  # collectives and sends between at least two ranks
    bytes: int = 0  # their size, each counted once
    alone: bool = False  # the answers were computed in a single process, for these world sizes

    def note_right(self, note: str, p: int) -> None:
        """Note that a case, which `note` names in headlines, was right at this world size."""
        for sizes in (self.passed, self.right.setdefault(note, [])):
            if p not in sizes:
                sizes.append(p)

    def right_before(self, note: str) -> str:
        """Return the world sizes at which this very case was right before, worded for a failure's headline."""
        sizes = ", ".join(map(str, self.right.get(note, ())))
        return f" (right at p = {sizes})" if sizes else ""

    def count_messages(self, collectives: Iterable[Collective]) -> None:
        """Add what the ranks sent each other while the answer ran. A collective counts once, not once per rank."""
        for each in collectives:
            first = each.kind == "send" or (each.kind != "recv" and each.rank == each.group[0])
            if first and len(each.group) > 1 and each.shape != VOTE_SHAPE:
                self.messages += 1
                self.bytes += each.bytes

    def tried(self) -> str:
        """Return how much the check has tried, as in "12 cases on 1, 2 and 4 ranks, 480 results compared, ..."."""
        if not self.cases:
            return ""
        cases = f"{self.cases:,} case{'' if self.cases == 1 else 's'}"
        sizes = sorted(self.passed)
        ranks = "" if self.alone else f" on {names(sizes)} rank{'' if sizes == [1] else 's'}"
        sent = f", {self.messages:,} messages" if self.messages else ""
        if sent and not self.alone:  # a check whose answers are numbers draws the sizes of its messages, too
            sent += f" of {self.bytes:,} bytes in all"
        return f"{cases}{ranks}, {self.values:,} results compared{sent}."

    def told(self) -> str:
        """Return a sentence for the verdict that lists what was right and at which world sizes."""
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
