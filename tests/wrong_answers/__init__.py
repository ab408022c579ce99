"""Wrong answers to the exercises, and the harness that runs an answer against its check without a notebook.

A chapter's file chNN.py holds WRONG, a list of WrongAnswer: at least five for each exercise, plausible programs that
somebody shipped or that a learner will write, each with words of the message it must get. tests/course/test_chapters.py runs
them all. A wrong answer that passes fails the build.

A learner's check draws new inputs each time. Here each wrong answer has inputs of its own, the same in every run, so
that a failure is one of the last change; `make test SEED=7` draws others.
"""

import builtins
import importlib
import linecache
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from textwrap import dedent, indent
from typing import Any
from zlib import crc32

from tests import ROOT
from tplab.course.notebooks import numbering
from tplab.course.notebooks.mistakes import path_of, tables
from tplab.course.notebooks.numbering import number_of, package
from tplab.course.notebooks.rewrite import blank_exercise, blank_prediction, keep_solution
from tplab.course.notebooks.source import Chapter, read, sources

SEED = int(os.environ.get("TPLAB_TEST_SEED", "0"))


@dataclass(frozen=True)
class WrongAnswer:
    """A wrong program for an exercise.

    source: what the learner wrote in the exercise's cell, in place of the solution
    says:   words of the message that the check must give for it
    """

    exercise: str
    name: str
    source: str
    says: str


def indented(text: str, spaces: int = 4) -> str:
    """The lines of `text` with their common indentation replaced by `spaces`: the body of a function or class."""
    return indent(dedent(text).strip(), " " * spaces)


def swap(text: str, old: str, new: str) -> str:
    """The text with `new` in place of `old`. Raises ValueError if `old` isn't in it."""
    if old not in text:
        raise ValueError(f"{old!r} is not in {text!r}")
    return text.replace(old, new)


def swap_all(text: str, *pairs: tuple[str, str]) -> str:
    """The text with each (old, new) swapped, one after the other."""
    for old, new in pairs:
        text = swap(text, old, new)
    return text


@cache
def chapter(number: int) -> Chapter:
    """The source of a chapter."""
    return next(read(path) for path in sources(ROOT) if number_of(path.stem) == number)


def chapter_of(exercise: str) -> Chapter:
    return chapter(numbering.chapter_of(exercise))


def has_table(number: int) -> bool:
    return (ROOT / "tplab" / "course" / "exercises" / package(number) / "mistakes.md").exists()


def wrong_answers(number: int) -> list[WrongAnswer]:
    """The wrong answers to the exercises of a chapter. A chapter with a table of mistakes (`mistakes.md`) has none."""
    return [] if has_table(number) else importlib.import_module(f"tests.wrong_answers.{package(number)}").WRONG


def load_chapter_namespace(exercise: str, answers: Mapping[str, str], blank: Iterable[str] = ()) -> dict[str, Any]:
    """A fresh namespace as a notebook has it just before the check of `exercise`: its setup and exercise cells were run.

    answers: sources that stand in for an exercise's solution. blank: exercises whose stub is left as it is.
    The namespace is that of a __main__ module, so that functions defined in it travel to the ranks by value.
    """
    namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}
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


def run_cell(source: str, namespace: dict[str, Any], name: str) -> None:
    """Run a cell's source; tracebacks show its lines."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), namespace)


def run_check(exercise: str, namespace: dict[str, Any], seed: int | None = None) -> Any:
    """What the check cell of `exercise` shows, for new inputs or those of `seed`. Raises what it raises."""
    source = chapter_of(exercise).of_role("check")[exercise].text.strip()
    if seed is not None:
        source = swap(source + "\n", ")\n", f", seed={seed})")
    return eval(source, namespace)


def run_prediction(number: str, *, blank: bool = False) -> Any:
    """What the predict cell shows with the source's values, or with dots for every value."""
    source = chapter_of(number).of_role("predict")[number].text
    namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}
    for cell in chapter_of(number).cells:
        if cell.code and "setup" in cell.tags:
            run_cell(cell.text, namespace, f"<setup of chapter {number.partition('.')[0]}>")
    return eval((blank_prediction(source) if blank else source).strip(), namespace)


def plain(text: str) -> str:
    """Without line breaks and capitals, which depend on where in the message the words stand."""
    return " ".join(text.split()).casefold()


def seed_of(wrong: WrongAnswer) -> int:
    """The seed of the inputs that a wrong answer meets in this run of the tests."""
    return crc32(f"{SEED} {wrong.exercise} {wrong.name}".encode()) % 10**6


def wrong_source(exercise: str, name: str = "") -> str:
    """The source of the wrong answer of this name to an exercise or, without a name, of the first one that runs."""
    if not has_table(numbering.chapter_of(exercise)):
        answers = (one for one in wrong_answers(numbering.chapter_of(exercise)) if one.exercise == exercise)
        return next(one.source for one in answers if name in ("", one.name))
    sections = tables(path_of(numbering.chapter_of(exercise))).items()
    mistakes = [mistake for title, each in sections if title.split()[0] == exercise for mistake in each.mistakes]
    found = next(one for one in mistakes if (one.name == name if name else not one.fails))
    return found.of(keep_solution(chapter_of(exercise).of_role("exercise")[exercise].text) + "\n")


def run_wrong_answer(wrong: WrongAnswer) -> str:
    """The message that a wrong answer gets. Raises AssertionError where it passes or fails in another way."""
    from tplab.course.feedback.verdict import CheckFailed

    namespace = load_chapter_namespace(wrong.exercise, {wrong.exercise: wrong.source})
    try:
        verdict = run_check(wrong.exercise, namespace, seed_of(wrong))
    except CheckFailed as failure:
        message = str(failure)
    else:
        raise AssertionError(f"the wrong answer {wrong.name!r} passes the check of {wrong.exercise}: {verdict}")
    if plain(wrong.says) not in plain(message):
        raise AssertionError(f"{wrong.name!r} is told something else than {wrong.says!r}:\n{message}")
    return message
