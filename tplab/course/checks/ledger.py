"""What the running check has done so far: its inputs' seed, what it compared, at which world sizes it was right."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Ledger:
    exercise: str
    seed: int
    generators: int = 0  # how many streams of random inputs were drawn from the seed
    compared: dict[str, None] = field(default_factory=dict)  # names, in the order they came
    claims: dict[str, None] = field(default_factory=dict)  # statements that hold
    passed: list[int] = field(default_factory=list)  # world sizes
    alone: bool = False  # the answers were computed on one process, for these world sizes

    def passed_before(self, p: int | None = None) -> str:
        """The world sizes that were right before this one, for a failure's headline."""
        sizes = ", ".join(str(size) for size in self.passed if size != p)
        return f" (right at p = {sizes})" if sizes else ""

    def told(self) -> str:
        """What was right and where, for the verdict."""
        sizes = ", ".join(map(str, sorted(self.passed)))
        where = f", {'for' if self.alone else 'on every rank at'} p = {sizes}" if sizes else ""
        told = f"Right: {', '.join(self.compared)}{where}."
        return f"{told} Also: {'; '.join(self.claims)}." if self.claims else told


_running: list[Ledger] = []


def current() -> Ledger:
    """The ledger of the running check; a fresh one, kept nowhere, outside of any check."""
    return _running[-1] if _running else Ledger("", secrets.randbelow(10**6))


@contextmanager
def open_ledger(exercise: str, seed: int | None) -> Iterator[Ledger]:
    ledger = Ledger(exercise, secrets.randbelow(10**6) if seed is None else seed)
    _running.append(ledger)
    try:
        yield ledger
    finally:
        _running.remove(ledger)
