"""To make a prediction, the learner writes down what they expect to happen, and only then runs the code.

    predict("4.a", calls=1, bytes=96)

This call looks up `PREDICTIONS["4.a"]` in the chapter's package, which reads them from `predictions.md`. If a field is
still `...`, the learner hasn't predicted it yet. A wrong prediction doesn't raise an error. Instead, the learner gets
some advice and, starting with the third distinct attempt, can also reveal the right answer. Numbers may also be
fractions or tensors, such as Fraction(1, 4) or torch.tensor(0.25), and names may contain hyphens, spaces, or
underscores.

At the end of a chapter's "Break it" section, `symptoms(4)` displays a table of symptoms and the mistakes that cause
them. It's at the end of `predictions.md`.
"""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from textwrap import fill
from typing import Any

from tplab.course.checks.exercises import chapter_module
from tplab.course.feedback.verdict import (
    AMBER,
    BLUE,
    GREEN,
    box,
    code_html,
    heading,
    names,
    paragraph,
    table,
    text_row,
)

_TRIES = 3
_HEAD = ("What you see", "What causes it", "Exercise")
_WIDTHS = (42, 46, 8)


@dataclass(frozen=True)
class Prediction:
    """A question with a known answer. In all strings, backticks mark code, as in "`weight` is [o, i]".

    answer: the right value of each field.
    why:    the explanation that the learner sees when all fields are right.
    wrong:  the advice for any wrong value of a field (with a key such as "bytes"), or for a particular wrong value of
            this field (with a key such as ("bytes", 48)).
    """

    question: str
    answer: Mapping[str, Any]
    why: str
    wrong: Mapping[Any, str] = field(default_factory=dict)


def read_predictions(path: Path) -> dict[str, Prediction]:
    """Read the predictions of a chapter from a file with a section per prediction:

    ## 4.a

    How many calls, and how many bytes?

    Right: `calls=1, bytes=96`

    One all-reduce of 12 doubles.

    - `bytes=12`: You counted elements.
    - `calls`: Count the arrows between ranks.
    """
    text = path.read_text(encoding="utf-8")
    sections = re.split(r"^## (?=\w+\.)", text, flags=re.MULTILINE)[1:]
    return dict(map(_prediction, sections))


def _prediction(section: str) -> tuple[str, Prediction]:
    number, question, right, why, *advice = section.partition("\n## ")[0].strip().split("\n\n")
    answer = _values(right.removeprefix("Right: ").strip("`"))
    wrong: dict[Any, str] = {}
    for line in "\n".join(advice).splitlines():
        key, _, text = line.removeprefix("- ").partition(": ")
        name, equals, _ = key.strip("`").partition("=")
        wrong[(name, _values(key.strip("`"))[name]) if equals else name] = text
    return number, Prediction(question, answer, why, wrong)


def _values(arguments: str) -> dict[str, Any]:
    """Return {name: value} for the keyword arguments of a call, such as "calls=1, bytes=96"."""
    call = ast.parse(f"predict({arguments})", mode="eval").body
    assert isinstance(call, ast.Call)
    return {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}


@dataclass(frozen=True)
class Reply:
    """The reply to a prediction, displayed as an HTML box or as text."""

    color: str
    mark: str
    head: str
    lines: tuple[str, ...]
    answer: str = ""

    def __repr__(self) -> str:
        lines = [self.head, *(fill(line, 98, initial_indent="  ", subsequent_indent="  ") for line in self.lines)]
        return "\n".join([*lines, *([f"  {self.answer}"] if self.answer else [])]).replace("`", "")

    def _repr_html_(self) -> str:
        parts = [heading(f"{self.mark} {self.head}"), *map(paragraph, self.lines)]
        if self.answer:
            parts.append(f"<details><summary>Show the answer</summary>{code_html(self.answer)}</details>")
        return box(self.color, *parts)


_tried: dict[str, list[dict[str, Any]]] = {}


def predict(number: str, **values: Any) -> Reply:
    """Compare a prediction with the right answer, and return the reply to show the learner.

    Raises ValueError for an unknown prediction number, and TypeError for an unknown field.
    """
    predictions: dict[str, Prediction] = getattr(chapter_module(number), "PREDICTIONS", {})
    if number not in predictions:
        raise ValueError(f"there is no prediction {number!r} in this chapter")
    asked = predictions[number]
    unknown = [name for name in values if name not in asked.answer]
    if unknown:
        raise TypeError(f"prediction {number} asks for {names(list(asked.answer))}, not for {names(unknown)}")
    missing = [name for name in asked.answer if values.get(name, ...) is ...]
    if missing:
        todo = f"Replace the dots with your prediction for {names(missing)}, and then run this cell."
        return Reply(BLUE, "?", f"Prediction {number}", (asked.question, todo))
    values = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in values.items()}
    wrong = [name for name, right in asked.answer.items() if not _right(values[name], right)]
    if not wrong:
        return Reply(GREEN, "✓", f"Prediction {number}: right", (asked.why,))
    tried = _tried.setdefault(number, [])
    if values not in tried:
        tried.append(values)
    head = f"Prediction {number}: not yet right: {names(wrong)}"
    advice = dict.fromkeys(_advice(asked, name, values[name]) for name in wrong)
    answer = ", ".join(f"{name} = {asked.answer[name]!r}" for name in wrong) + f". {asked.why}"
    return Reply(AMBER, "✗", head, tuple(advice), answer if len(tried) >= _TRIES else "")


def _right(value: Any, right: Any) -> bool:
    if isinstance(right, str):
        name = getattr(value, "__name__", value)  # the learner may write the function itself, without quotes
        return isinstance(name, str) and _same_name(name) == _same_name(right)
    if isinstance(right, bool) or isinstance(value, bool):
        return value is right
    if isinstance(right, (tuple, list)) and len(right) == 1 and isinstance(value, Real):
        value = (value,)  # the learner wrote a vector's shape without brackets
    if isinstance(right, (tuple, list)):
        same_length = isinstance(value, (tuple, list)) and len(value) == len(right)
        return same_length and all(_right(mine, theirs) for mine, theirs in zip(value, right, strict=True))
    if isinstance(right, float):
        return isinstance(value, Real) and abs(float(value) - right) <= 0.01 * abs(right)
    return bool(value == right)


def _same_name(text: str) -> str:
    """Normalize the spelling of a name, so that "Reduce-scatter" and "dist.reduce_scatter" count as the same name."""
    return text.strip().casefold().removeprefix("dist.").replace("-", "_").replace(" ", "_")


def _advice(asked: Prediction, name: str, value: Any) -> str:
    for known, text in asked.wrong.items():
        if isinstance(known, tuple) and known[0] == name and _right(value, known[1]):
            return text
    return asked.wrong.get(name, f"Read the question again: {asked.question}")


@dataclass(frozen=True)
class Symptoms:
    """A table of symptoms, displayed as HTML or as text.

    rows: (what a learner may see, the mistake that causes it, the number of the exercise or "")
    """

    rows: tuple[tuple[str, ...], ...] = ()

    def __repr__(self) -> str:
        rule = tuple("-" * width for width in _WIDTHS)
        return "\n".join(text_row(row, _WIDTHS) for row in (_HEAD, rule, *self.rows))

    def _repr_html_(self) -> str:
        return table(self.rows, _HEAD)


def read_symptoms(path: Path) -> Symptoms:
    """Read the table at the end of a chapter's `predictions.md`."""
    _, _, table_text = path.read_text(encoding="utf-8").partition("\n## Symptoms\n")
    rows = [line.strip("|").split("|") for line in table_text.splitlines() if line.startswith("|")]
    return Symptoms(tuple(tuple(cell.strip() for cell in row) for row in rows[2:]))


def symptoms(chapter: int | str) -> Symptoms:
    """Return a chapter's table of symptoms."""
    return getattr(chapter_module(chapter), "SYMPTOMS", Symptoms())
