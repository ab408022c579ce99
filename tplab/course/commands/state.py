"""The verdicts of `tplab check`, stored in `.tplab/progress.json` in the learner's folder, with one entry per exercise.

    {"exercises": {"4.2": {"status": "passed", "code": "9f86...", "output": "77de...", "checked": "2026-11-21 10:15"}}}

An entry applies only to the code that was checked. If the code changes, the verdict no longer applies. A missing or
damaged file counts as empty. In that case, only the verdicts are lost, and the next check writes them again.

Without a verdict, `shown` reads the result that the check's cell shows in the saved notebook.
"""

import hashlib
import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from tplab.common.files import locked, replace
from tplab.course.grade.answers import code_cells, merge
from tplab.course.grade.check_notebook import Verdict, exercises_of
from tplab.course.grade.needs import select
from tplab.course.notebooks.cells import Cell

FILE = "progress.json"
KEPT = ("passed", "failed")


@dataclass(frozen=True)
class Fingerprint:
    """Hashes of what a verdict depends on.

    code:   the cells that `tplab check --exercise` runs, the check and what it should return, and the Python files next
            to the notebook. Experiments in cells that the exercise doesn't use make no difference
    output: what the check's cell shows in the notebook. It only tells an old output from a new one
    """

    code: str
    output: str


@dataclass(frozen=True)
class Entry:
    """The last verdict on an exercise, the fingerprint of the code it applies to, and when it was checked."""

    status: str
    code: str
    output: str
    checked: str


def fingerprints(reference: list[Cell], learner: list[Cell], folder: Path) -> dict[str, Fingerprint]:
    """Return the fingerprint of every exercise that has an answer in the learner's notebook, which is in `folder`."""
    merged = merge(reference, learner)
    beside = [part for path in sorted(folder.glob("*.py")) for part in (path.name, path.read_bytes().hex())]
    found = {}
    for number in exercises_of(reference):
        if number in merged.missing:
            continue
        pieces = select(merged, [number], whole=False)
        sources = [part for piece in pieces for part in (piece.number, piece.source.strip())]
        expected = results(pieces[-1].reference.outputs) if pieces[-1].reference else []
        shows = their_cell(learner, "check", number)
        found[number] = Fingerprint(
            code=_hash([*beside, *sources, *expected]),
            output=_hash([json.dumps([shows.execution_count, shows.outputs])] if shows else []),
        )
    return found


def _hash(parts: Iterable[str]) -> str:
    """Return the SHA-256 hash of the parts and their lengths, in hex."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(f"{len(data)}:".encode() + data)
    return digest.hexdigest()


def load(memory: Path) -> dict[str, Entry]:
    """Return the stored entries by exercise, or {} if they can't be read."""
    try:
        stored = json.loads((memory / FILE).read_text(encoding="utf-8"))["exercises"]
        return {number: Entry(**entry) for number, entry in stored.items()}
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return {}


def record(memory: Path, verdicts: list[Verdict], prints: dict[str, Fingerprint]) -> list[str]:
    """Store a check's verdicts on the code with these fingerprints, and return notes on anything that went wrong.

    An exercise that neither passed nor failed keeps its earlier entry, which applies to different code.
    """
    now = time.strftime("%Y-%m-%d %H:%M")
    said = {
        verdict.number: Entry(verdict.status, checked=now, **asdict(prints[verdict.number]))
        for verdict in verdicts
        if verdict.status in KEPT and verdict.number in prints
    }
    if not said:
        return []
    try:
        with locked((memory / FILE).with_suffix(".lock")):
            entries = load(memory) | said
            text = json.dumps({"exercises": {number: asdict(entries[number]) for number in sorted(entries)}}, indent=1)
            replace(memory / FILE, text.encode())
    except OSError as error:
        return [f"This could not be kept for `tplab progress`: {error.strerror or error} ({memory / FILE})."]
    return []


def results(outputs: list) -> list[str]:
    """Return the results in a cell's outputs as text."""
    texts = []
    for output in outputs:
        if isinstance(output, dict) and output.get("output_type") == "execute_result":
            data = output.get("data")
            text = data.get("text/plain", "") if isinstance(data, dict) else ""
            texts.append("".join(map(str, text)) if isinstance(text, list) else str(text))
    return texts


def their_cell(learner: list[Cell], role: str, number: str) -> Cell | None:
    """Return an exercise's last cell with this role ("exercise" or "check"), by id or metadata, or None."""
    id = f"{role}-{number.replace('.', '-')}"
    found = [cell for cell in code_cells(learner) if cell.id == id or cell.marks.get(role) == number]
    return found[-1] if found else None


def shown(learner: list[Cell], number: str) -> str:
    """Return the status that the check cell shows, "passed" or "failed", or "" if it proves nothing about this code.

    A check that ran before its exercise's cell proves nothing.
    """
    check, exercise = their_cell(learner, "check", number), their_cell(learner, "exercise", number)
    if check is None or exercise is None or _runs(exercise) >= _runs(check):
        return ""
    errors = [output.get("ename") for output in check.outputs if isinstance(output, dict) and "ename" in output]
    if errors:
        return "failed" if "CheckFailed" in errors else ""
    return "passed" if any(text.startswith(f"Exercise {number} passed") for text in results(check.outputs)) else ""


def _runs(cell: Cell) -> int:
    """Return a cell's position in execution order. Cells that haven't run since the kernel started sort last."""
    return cell.execution_count if isinstance(cell.execution_count, int) else 10**9
