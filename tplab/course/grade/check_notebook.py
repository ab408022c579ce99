"""Check a learner's notebook: merge it into the reference, run nbval on the result, and judge each exercise.

The reference is the executed solution notebook. The verdict on an exercise is one of these:

    passed      the check returned the same result as in the reference
    failed      the check rejected the answer and said what to look at, or the exercise's cell is missing or doesn't
                run, or the answer uses an earlier exercise whose cell is missing or doesn't run
    to do       the exercise's cell still contains the stub that the learner should replace
    waiting     the answer uses an earlier exercise that is still to do
    not run     the run ended before it reached the check

`check_notebook` yields each verdict as soon as it is known, and changes no file.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tplab.course.grade.answers import Merged, code_cells, merge, role_of
from tplab.course.grade.needs import FIRST_CELL, select, to_notebook
from tplab.course.grade.run import Limits, Run
from tplab.course.notebooks.cells import Cell
from tplab.course.notebooks.kernels import DIED
from tplab.course.notebooks.numbering import EXERCISE

NO_START = (
    "The kernel that should run your notebook ended before it ran anything. "
    "`python -m ipykernel_launcher` in a terminal shows why."
)
BEFORE_THE_FIRST_CELL = (
    "The kernel ended, or didn't respond in time, before it ran any of your cells, so your code isn't the cause. "
    "The machine may be busy with something else, or it may be out of memory. Run the check again later."
)


@dataclass(frozen=True)
class Verdict:
    """The verdict of `tplab check` on one exercise."""

    number: str
    title: str
    status: str
    text: str = ""


def exercises_of(reference: list[Cell]) -> dict[str, str]:
    """Return the number and title of each exercise in a chapter, in order."""
    checks = [cell.marks for cell in code_cells(reference) if role_of(cell)[0] == "check"]
    return {marks["check"]: marks.get("title", "") for marks in checks}


def check_notebook(
    reference: list[Cell],
    learner: list[Cell],
    folder: Path,
    *,
    exercises: list[str] | None = None,
    limits: Limits | None = None,
) -> Iterator[Verdict | str]:
    """Check a notebook with the cells `learner`, which is in `folder`, against `reference`.

    Besides verdicts, this yields notes as text. They don't affect any verdict.

    exercises: if given, check only these exercises, and run only the cells that they need
    limits:    what the run may use, by default any memory and CELL_TIMEOUT seconds per cell
    """
    merged = merge(reference, learner)
    titles = exercises_of(reference)
    wanted = exercises or list(titles)
    run = Run(to_notebook(select(merged, wanted, whole=exercises is None)), folder.resolve(), limits or Limits())
    judge = Judge(merged)
    waiting, ended = dict.fromkeys(wanted), ""
    for row in run:
        judge.see(row)
        if row["role"] == "check" and row["number"] in waiting:
            del waiting[row["number"]]
            yield Verdict(row["number"], titles[row["number"]], *judge.verdict(row))
        if row["died"]:
            ended = _ended(row)
            break
    for number in waiting:
        yield Verdict(number, titles[number], "not run", run.ended or ended or "nbval did not reach it.")
    yield from filter(None, [*merged.notes, *judge.notes, run.ended])


class Judge:
    """Reads the rows that nbval_plugin.py sends, one per cell and in order, and turns a check's row into a verdict."""

    def __init__(self, merged: Merged):
        self.missing = merged.missing
        self.all_passed = True
        self.notes: list[str] = []
        self._broken: dict[str, str] = {}  # exercise -> why its cell failed

    def see(self, row: dict) -> None:
        if row["outcome"] == "passed":
            return
        role = row["role"]
        self.all_passed = self.all_passed and role not in ("exercise", "check")
        if role == "exercise":
            self._broken[row["number"]] = "Its own cell does not run. " + explain(row)
        elif role == "own" and not _asks_for(row):
            self.notes.append(f"One of your own cells failed: {explain(row)}")
        elif row["id"] == FIRST_CELL:
            self.notes.append(BEFORE_THE_FIRST_CELL)
        elif role in ("setup", "given") and self.all_passed:
            self.notes.append(f"The chapter's cell {row['id']} failed: {explain(row)}")

    def verdict(self, row: dict) -> tuple[str, str]:
        """Return the status and text for a check cell's row."""
        number = row["number"]
        if number in self.missing:
            return "failed", self.missing[number]
        if number in self._broken:
            return "failed", self._broken[number]
        if row["outcome"] == "passed":
            return "passed", ""
        asked = _asks_for(row)
        if asked == number:
            return "to do", ""
        return ("waiting", asked) if asked else ("failed", explain(row))


def _ended(row: dict) -> str:
    """Return where the kernel ended, in words that the learner knows."""
    if DIED in row.get("message", ""):
        return NO_START
    if row["id"] == FIRST_CELL:
        return BEFORE_THE_FIRST_CELL
    places = {
        "check": f"the check of exercise {row['number']}",
        "exercise": f"the cell of exercise {row['number']}",
        "own": "one of your own cells",
    }
    where = places.get(row["role"], f"the chapter's cell {row['id']}")
    return f"The kernel ended in {where}."


def _asks_for(row: dict) -> str:
    """Return the number of the exercise whose stub was called, if that's why the cell failed, or "" otherwise."""
    stub = re.fullmatch(rf"exercise ({EXERCISE})", row.get("evalue", "").strip())
    return stub[1] if stub and row["ename"] == "NotImplementedError" else ""


def explain(row: dict) -> str:
    """Explain to the learner why a cell failed."""
    if "seconds" in row:
        told = f"There was no result after {row['seconds']:g} seconds, so the cell was stopped."
        return (
            f"{told} Is there an endless loop, or a rank that waits for the others? "
            "If not, the machine may be busy with something else. Run the check again later."
        )
    if row["died"]:
        return "The kernel's process ended while it ran."
    if "ename" in row:
        return _explain_error(row["ename"], row["evalue"], row["traceback"])
    if "expected" in row:
        return f"The check shows another result. It should be\n{row['expected']}\nand is\n{row['got'] or 'nothing'}"
    return row["message"].split("\n")[0] or "It failed without saying why."


def _explain_error(name: str, value: str, traceback: str) -> str:
    if name in ("CheckFailed", "AssertionError") and value.strip():
        return value.strip()
    value = re.sub(r" \([\w.<>-]+, line (\d+)\)$", r" (line \1 of the cell)", value.strip())
    told = f"{name}: {value}" if value else name
    frames = re.split(r"^Cell In", traceback, flags=re.MULTILINE)[1:]
    arrow = re.search(r"^-+> *(\d+) *(.+)$", frames[-1], re.MULTILINE) if frames else None
    return f"{told}\nat line {arrow[1]} of the cell: {arrow[2].strip()}" if arrow and name != "SyntaxError" else told
