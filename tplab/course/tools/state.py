"""The verdicts of `tplab check`, stored in `.tplab/progress.json` in the learner's folder, with one entry per exercise.

    {"exercises": {"4.2": {"status": "passed", "answer": "9f86...", "check": "0a4d...", "output": "77de...",
                           "checked": "2026-11-21 10:15"}}}

An entry applies only to code that has exactly these fingerprints (see fingerprint.py). A missing or damaged file counts
as empty. In that case, only the verdicts are lost, and the next check writes them again.
"""

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from tplab.common.files import locked, replace
from tplab.course.grade.check_notebook import Verdict
from tplab.course.tools.fingerprint import Fingerprint

FILE = "progress.json"
KEPT = ("passed", "failed")


@dataclass(frozen=True)
class Entry:
    """The last verdict on an exercise, the fingerprints of the code it applies to, and when it was checked."""

    status: str
    answer: str
    check: str
    output: str
    checked: str


def load(memory: Path) -> dict[str, Entry]:
    """Return the stored entries by exercise, skipping those that can't be read."""
    try:
        stored = json.loads((memory / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    exercises = stored.get("exercises") if isinstance(stored, dict) else None
    found = {}
    for number, raw in exercises.items() if isinstance(exercises, dict) else ():
        with suppress(TypeError):  # it isn't a mapping, or has different fields
            entry = Entry(**raw)
            if entry.status in KEPT and all(isinstance(value, str) for value in asdict(entry).values()):
                found[number] = entry
    return found


def record(memory: Path, verdicts: list[Verdict], fingerprints: dict[str, Fingerprint]) -> list[str]:
    """Store a check's verdicts on the code with these fingerprints, and return notes on anything that went wrong.

    An exercise that neither passed nor failed keeps its earlier entry, which applies to different code.
    """
    now = time.strftime("%Y-%m-%d %H:%M")
    said = {
        verdict.number: Entry(verdict.status, checked=now, **asdict(fingerprints[verdict.number]))
        for verdict in verdicts
        if verdict.status in KEPT and verdict.number in fingerprints
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
