"""What the items have found so far. It's kept in a file, so that another call can go on."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

PASSED, FAILED, UNFINISHED = "passed", "failed", "unfinished"
STOPPED = "stopped"  # the outcome of a test that hung or ended its process; other outcomes are pytest's words


@dataclass
class Outcome:
    """The outcome of a test, and what explains it."""

    outcome: str
    seconds: float
    text: str = ""


@dataclass
class Result:
    """What an item has found.

    state      `PASSED`, `FAILED`, or `UNFINISHED` if it ran out of time, in which case the next call runs it again
    output     the end of what it printed
    tests      the outcomes of its tests so far, by their names in pytest
    expected   how many tests it has, once that is known
    """

    state: str = UNFINISHED
    seconds: float = 0.0
    output: str = ""
    tests: dict[str, Outcome] = field(default_factory=dict)
    expected: int | None = None

    @property
    def is_done(self) -> bool:
        return self.state != UNFINISHED


@dataclass
class Results:
    """The results of all items by name, in a file that belongs to one machine and one version of the code."""

    path: Path
    of: str
    items: dict[str, Result] = field(default_factory=dict)

    @staticmethod
    def read(path: Path, of: str) -> "Results":
        """Read the results from an earlier call, or return empty ones if there are none or if they are of others."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return Results(path, of)
        if found["of"] != of:
            return Results(path, of)
        return Results(path, of, {name: _result(values) for name, values in found["items"].items()})

    def write(self) -> None:
        text = json.dumps({"of": self.of, "items": {name: asdict(result) for name, result in self.items.items()}})
        write_whole(self.path, text)


def _result(values: Mapping) -> Result:
    return Result(**{**values, "tests": {name: Outcome(**test) for name, test in values["tests"].items()}})


def write_whole(path: Path, text: str) -> None:
    """Replace a file in one step, so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".new")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)


def fingerprint(root: Path, *facts: str) -> str:
    """Return a hash of the code that the items run, and of facts about the machine."""
    digest = hashlib.sha256("\n".join(facts).encode())
    for folder in ("tplab", "tests", "benchmarks", "solutions"):
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
