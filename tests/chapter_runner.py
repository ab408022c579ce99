"""Runs an answer against its check without a notebook."""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from tests import ROOT
from tplab.course.notebooks import numbering
from tplab.course.notebooks.mistakes import path_of, tables
from tplab.course.notebooks.numbering import number_of
from tplab.course.notebooks.rewrite import blank_exercise, blank_prediction, keep_solution
from tplab.course.notebooks.source import Chapter, read, sources


def swap(text: str, old: str, new: str) -> str:
    """The text with `new` in place of `old`. Raises ValueError if `old` isn't in it."""
    if old not in text:
        raise ValueError(f"{old!r} is not in {text!r}")
    return text.replace(old, new)


@cache
def chapter(number: int) -> Chapter:
    """The source of a chapter."""
    return next(read(path) for path in sources(ROOT) if number_of(path.stem) == number)


def chapter_of(exercise: str) -> Chapter:
    return chapter(numbering.chapter_of(exercise))


def load_chapter_namespace(exercise: str, answers: Mapping[str, str], blank: Iterable[str] = ()) -> dict[str, Any]:
    """A fresh namespace as a notebook has it just before the check of `exercise`, with its setup and exercises run.

    answers: sources that stand in for an exercise's solution. blank: exercises whose stub is left as it is.
    """
    from tplab.course.checks.reference_answers import new_namespace, run_cell  # here, since ranks import this module

    namespace = new_namespace()
    for cell in chapter_of(exercise).cells:
        if cell.role == "check" and cell.number == exercise:
            return namespace
        if cell.role == "exercise":
            source = answers.get(cell.number) or keep_solution(cell.text)
            if cell.number in blank:
                source = blank_exercise(cell.text, cell.number)
            run_cell(source, namespace, f"<exercise {cell.number}>")
        elif cell.code and "setup" in cell.tags:
            run_cell(cell.text, namespace, f"<setup of chapter {exercise.partition('.')[0]}>")
    raise ValueError(f"there is no check {exercise}")


def run_check(exercise: str, namespace: dict[str, Any], seed: int | None = None) -> Any:
    """What the check cell of `exercise` shows, for new inputs or those of `seed`. Raises what it raises."""
    source = chapter_of(exercise).of_role("check")[exercise].text.strip()
    if seed is not None:
        source = swap(source + "\n", ")\n", f", seed={seed})")
    return eval(source, namespace)


def run_prediction(number: str, *, blank: bool = False) -> Any:
    """What the predict cell shows with the source's values, or with dots for every value."""
    from tplab.course.checks.reference_answers import new_namespace, run_cell  # here, since ranks import this module

    source = chapter_of(number).of_role("predict")[number].text
    namespace = new_namespace()
    for cell in chapter_of(number).cells:
        if cell.code and "setup" in cell.tags:
            run_cell(cell.text, namespace, f"<setup of chapter {number.partition('.')[0]}>")
    return eval((blank_prediction(source) if blank else source).strip(), namespace)


def wrong_source(exercise: str, name: str = "") -> str:
    """The source of the known mistake of this name in an exercise or, without a name, of the first one that runs."""
    sections = tables(path_of(numbering.chapter_of(exercise))).items()
    mistakes = [mistake for title, each in sections if title.split()[0] == exercise for mistake in each.mistakes]
    found = next(one for one in mistakes if (one.name == name if name else not one.fails))
    return found.of(keep_solution(chapter_of(exercise).of_role("exercise")[exercise].text) + "\n")
