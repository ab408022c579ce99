"""Check a learner's notebook: merge it into the reference, run nbval on the result, and judge each exercise.

The reference is the executed solution notebook. The verdict on an exercise is one of these:

    passed      the check returned the same result as in the reference
    failed      the check rejected the answer and said what to look at, or the exercise's cell is missing or doesn't run
    to do       the exercise's cell still contains the stub that the learner should replace
    waiting     the answer uses an earlier exercise that is still to do, or whose cell is missing or doesn't run
    not run     the run ended before it reached the check

`check_notebook` yields each verdict as soon as it is known. It reads the learner's file, but never writes to it.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tplab.course.grade.answers import Merged, code_cells, merge, names_in, role_of
from tplab.course.grade.needs import binds, select, to_notebook
from tplab.course.grade.run import Limits, Run
from tplab.course.notebooks.cells import Cell, read_notebook
from tplab.course.notebooks.kernels import DIED
from tplab.course.notebooks.numbering import EXERCISE

NEEDED = ("torch", "numpy", "tplab", "matplotlib", "ipywidgets", "ipykernel", "IPython", "traitlets", "cloudpickle")
NO_START = (
    "The kernel that should run your notebook ended before it ran anything. "
    "`python -m ipykernel_launcher` in a terminal shows why."
)


@dataclass(frozen=True)
class Verdict:
    """The verdict of `tplab check` on one exercise."""

    number: str
    title: str
    status: str
    text: str = ""


@dataclass(frozen=True)
class Note:
    """A remark that doesn't affect any verdict."""

    text: str


def exercises_of(reference: list[Cell]) -> dict[str, str]:
    """Return the number and title of each exercise in a chapter, in order."""
    checks = [cell.marks for cell in code_cells(reference) if role_of(cell)[0] == "check"]
    return {marks["check"]: marks.get("title", "") for marks in checks}


def check_notebook(
    reference: list[Cell],
    path: Path,
    *,
    learner: list[Cell] | None = None,
    exercises: list[str] | None = None,
    blank: list[Cell] | None = None,
    limits: Limits | None = None,
) -> Iterator[Verdict | Note]:
    """Check the notebook at `path` against `reference`.

    If the notebook can't be read, this raises cells.Unreadable before anything runs.

    learner:   the notebook's cells, if they have already been read
    exercises: if given, check only these exercises, and run only the cells that they need
    blank:     the chapter as the learner first sees it; if the exercises are still the same as there, nothing runs
    limits:    what the run may use, by default any memory and CELL_TIMEOUT seconds per cell
    """
    merged = merge(reference, read_notebook(path) if learner is None else learner)
    titles = exercises_of(reference)
    wanted = exercises or list(titles)
    if blank and _untouched(merged, wanted, blank):
        return iter([*(Verdict(number, titles[number], "to do") for number in wanted), *map(Note, merged.notes)])
    notebook = to_notebook(select(merged, wanted, whole=exercises is None))
    folder = path.resolve().parent
    merged.notes += [
        f"{file.name} beside your notebook has the name of a module that others import: they get yours. Rename it."
        for file in sorted(folder.glob("*.py"))
        if file.stem in NEEDED or file.stem in sys.stdlib_module_names
    ]
    return _verdicts(Run(notebook, folder, limits or Limits()), merged, reference, wanted)


def _untouched(merged: Merged, wanted: list[str], blank: list[Cell]) -> bool:
    """Return whether the notebook has no answer to any of the wanted exercises, so that nothing needs to run."""
    stubs = {role_of(cell)[1]: cell.source for cell in code_cells(blank) if role_of(cell)[0] == "exercise"}
    mine = [piece for piece in merged.pieces if piece.role == "exercise" and piece.number in wanted]
    names = {name for number in wanted for name in names_in(stubs.get(number, ""))}
    return (
        not {*wanted} & merged.missing.keys()
        and all(piece.source == stubs.get(piece.number) for piece in mine)
        and not any(piece.role == "own" and binds(piece.source) & names for piece in merged.pieces)
    )


def _verdicts(run: Run, merged: Merged, reference: list[Cell], wanted: list[str]) -> Iterator[Verdict | Note]:
    judge = Judge(merged, reference)
    titles = exercises_of(reference)
    said = set()
    for row in run:
        judge.see(row)
        if row.get("role") == "check" and row["number"] in wanted:
            said.add(row["number"])
            yield Verdict(row["number"], titles[row["number"]], *judge.verdict(row))
    for number in wanted:
        if number not in said:
            yield Verdict(number, titles[number], "not run", run.ended or judge.stopped or "nbval did not reach it.")
    yield from (Note(text) for text in [*merged.notes, *judge.notes, run.ended] if text)


class Judge:
    """Reads the rows that nbval_plugin.py sends, one per cell and in order, and turns a check's row into a verdict."""

    def __init__(self, merged: Merged, reference: list[Cell]):
        self.missing = merged.missing
        self.all_passed = True
        self.notes: list[str] = []
        self.stopped = ""  # if the kernel has ended: why no later cell could run
        self._broken: dict[str, str] = {}  # exercise -> why its cell failed
        self._wrote: dict[str, str] = {}  # name -> the exercise whose cell defines it
        for cell in code_cells(reference):
            role, number = role_of(cell)
            if role == "exercise":
                self._wrote |= dict.fromkeys(names_in(cell.source), number)

    def see(self, row: dict) -> None:
        if row["outcome"] == "passed" or self.stopped:
            return
        self.all_passed = self.all_passed and row.get("role") not in ("exercise", "check")
        role, number = row.get("role"), row.get("number", "")
        if role == "exercise":
            self._broken[number] = "Its own cell does not run. " + explain(row)
        elif role == "own" and not _asks_for(row):
            self.notes.append(f"One of your own cells failed: {explain(row)}")
        elif role in ("setup", "given") and self.all_passed:
            self.notes.append(f"The chapter's cell {row['id']} failed: {explain(row)}")
        if row["died"]:
            ended = "had to be stopped" if "seconds" in row else "ended"
            self.stopped = NO_START if DIED in row["message"] else f"The kernel {ended} in {_place(row)}."

    def verdict(self, row: dict) -> tuple[str, str]:
        """Return the status and text for a check cell's row."""
        number = row["number"]
        if number in self.missing:
            return "failed", self.missing[number]
        if row.get("died") and not self.stopped.endswith(f"check of exercise {number}."):
            return "not run", self.stopped
        if number in self._broken:
            return "failed", self._broken[number]
        if row["outcome"] == "passed":
            return "passed", ""
        asked = _asks_for(row)
        if asked == number:
            return "to do", ""
        if (
            not asked
            and (name := re.search(r"name '(\w+)'", row.get("evalue", "")))
            and row.get("ename") == "NameError"
        ):
            owner = self._wrote.get(name[1], number)
            asked = owner if owner != number and owner in {*self._broken, *self.missing} else ""
        return ("waiting", asked) if asked else ("failed", explain(row))


def _place(row: dict) -> str:
    """Return where the kernel ended, in words that the learner knows."""
    role = row.get("role")
    if role == "check":
        return f"the check of exercise {row['number']}"
    if role == "exercise":
        return f"the cell of exercise {row['number']}"
    return "one of your own cells" if role == "own" else f"the chapter's cell {row['id']}"


def _asks_for(row: dict) -> str:
    """Return the number of the exercise whose stub was called, if that's why the cell failed, or "" otherwise."""
    stub = re.fullmatch(rf"exercise ({EXERCISE})", row.get("evalue", "").strip())
    return stub[1] if stub and row.get("ename") == "NotImplementedError" else ""


def explain(row: dict) -> str:
    """Explain to the learner why a cell failed."""
    if "seconds" in row:
        told = f"No result after {row['seconds']:g} seconds; it was stopped."
        return f"{told} An endless loop, or a rank that waits for the others?"
    if "printed" in row:
        return f"It printed more than {row['printed'] // 1_000_000} million characters and was stopped."
    if row["died"]:
        return "The kernel's process ended while it ran."
    if "ename" in row:
        return _explain_error(row["ename"], row["evalue"], row["traceback"])
    if "expected" in row:
        return _first_difference(row["expected"].split("\n"), row["got"].split("\n"))
    return row["message"].split("\n")[0] or "It failed without saying why."


def _explain_error(name: str, value: str, traceback: str) -> str:
    if name in ("CheckFailed", "AssertionError") and value.strip():
        return value.strip()
    value = re.sub(r" \([\w.<>-]+, line (\d+)\)$", r" (line \1 of the cell)", value.strip())
    told = f"{name}: {value}" if value else name
    frames = re.split(r"^Cell In", traceback, flags=re.MULTILINE)[1:]
    arrow = re.search(r"^-+> *(\d+) *(.+)$", frames[-1], re.MULTILINE) if frames else None
    return f"{told}\nat line {arrow[1]} of the cell: {arrow[2].strip()}" if arrow and name != "SyntaxError" else told


def _first_difference(expected: list[str], got: list[str]) -> str:
    place = next((i for i, pair in enumerate(zip(expected, got, strict=False)) if pair[0] != pair[1]), None)
    place = min(len(expected), len(got)) if place is None else place
    wanted, found = (f"{lines[place][:120]!r}" if place < len(lines) else "nothing more" for lines in (expected, got))
    return f"The check shows another result: line {place + 1} should be {wanted} and is {found}."
