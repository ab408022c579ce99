"""At the end of a chapter's "Break it" section, display a table of symptoms and the mistakes that cause them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap

from tplab.course.feedback.verdict import table

_HEAD = ("What you see", "What causes it", "Exercise")
_WIDTHS = (42, 46)


@dataclass(frozen=True)
class Symptom:
    """A symptom that a learner may see, and the mistake that causes it."""

    see: str
    cause: str
    exercise: str = ""


def read_symptoms(path: Path) -> list[Symptom]:
    """Read the table at the end of a chapter's `predictions.md`, which has a column per field of `Symptom`."""
    _, _, table_text = path.read_text(encoding="utf-8").partition("\n## Symptoms\n")
    rows = [line.strip("|").split("|") for line in table_text.splitlines() if line.startswith("|")]
    return [Symptom(*(cell.strip() for cell in row)) for row in rows[2:]]


class Symptoms:
    """A table of symptoms, displayed as HTML or as text."""

    def __init__(self, symptoms: Sequence[Symptom]) -> None:
        self.rows = [(symptom.see, symptom.cause, symptom.exercise) for symptom in symptoms]

    def __repr__(self) -> str:
        rule = tuple("-" * width for width in (*_WIDTHS, len(_HEAD[2])))
        return "\n".join(line for row in (_HEAD, rule, *self.rows) for line in _text_row(row))

    def _repr_html_(self) -> str:
        return table(self.rows, _HEAD)


def symptoms(chapter: int | str) -> Symptoms:
    """Return a chapter's table of symptoms."""
    from tplab.course.checks.exercises import chapter_module  # imported here because that module imports torch

    return Symptoms(getattr(chapter_module(chapter), "SYMPTOMS", ()))


def _text_row(row: Sequence[str]) -> list[str]:
    see, cause = (wrap(text, width) for text, width in zip(row, _WIDTHS, strict=False))
    exercise = [row[2]] if row[2] else []
    height = max(len(see), len(cause), len(exercise))
    columns = [lines + [""] * (height - len(lines)) for lines in (see, cause, exercise)]
    return [f"{a:<{_WIDTHS[0]}}  {b:<{_WIDTHS[1]}}  {c}".rstrip() for a, b, c in zip(*columns, strict=True)]
