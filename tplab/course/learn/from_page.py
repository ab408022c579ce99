"""Add answers to the learner's library as soon as they pass in JupyterLab, without waiting for `tplab check`.

The kernel knows the cells that it has run. When a check passes, we take the cell that last defined the answer, along
with the imports and helpers that it uses from other cells, just as `tplab check` takes them from the saved notebook. We
only do this if the answer that was checked is the one in that cell.
"""

import inspect
import sys
from pathlib import Path
from typing import Any

from tplab.course.feedback.verdict import AMBER, CheckPassed, box, display_html, paragraph
from tplab.course.feedback.waiting import on_page
from tplab.course.grade.answers import Piece
from tplab.course.grade.needs import binds
from tplab.course.learn import library
from tplab.course.learn.course_files import Course, own_course
from tplab.course.learn.my_tp import names_of
from tplab.course.learn.passages import Passage, extract
from tplab.course.notebooks.numbering import chapter_of
from tplab.course.notebooks.source import parse_code, passed_names

NOT_TAKEN = (
    "This answer isn't in your library yet, because not all of it is in cells that ran since the kernel started. Save "
    "the notebook and run `tplab check --exercise {number}` in a terminal: it takes the answer from the file."
)


class CannotTake(Exception):  # noqa: N818 (it says what to do: check the saved notebook)
    """Raised when the cells that ran don't contain the answer that was checked."""


_course: Course | None = None  # the course of the notebook's folder, even after a cell has changed to another


def watch() -> None:
    """On a page in the learner's own folder, add an answer to the library as soon as its check passes."""
    global _course
    if _course is None and on_page():
        _course = own_course(Path.cwd())
        if _course:
            sys.modules["IPython"].get_ipython().events.register("post_run_cell", _after_cell)


def _after_cell(result: Any) -> None:
    """Add the answer to the library if a cell's check passed. IPython calls this function after each cell."""
    verdict = getattr(result, "result", None)
    if not (isinstance(verdict, CheckPassed) and _course):
        return
    shell = sys.modules["IPython"].get_ipython()
    try:
        passage = passage_of(
            verdict.exercise, _course, list(shell.history_manager.input_hist_raw), result.info.raw_cell, shell.user_ns
        )
        library.add(_course, {verdict.exercise: passage})
    except (CannotTake, OSError, SyntaxError) as error:
        text = NOT_TAKEN.format(number=verdict.exercise)
        if isinstance(error, SyntaxError):
            text = f"Your answer to {verdict.exercise} can't go into your library: {error}"
        if isinstance(error, OSError):
            text = f"Your library could not be written: {error.strerror or error} ({error.filename})."
        display_html(box(AMBER, paragraph(text)), text)


def passage_of(number: str, course: Course, ran: list[str], check: str, namespace: dict[str, Any]) -> Passage:
    """Extract the answer to an exercise from the cells that a kernel has run. Raises CannotTake if it isn't in them.

    ran        the sources of these cells, in the order in which they ran
    check      the source of the check's cell
    namespace  the kernel's variables, which include the answer
    """
    checked = names_of(course, chapter_of(number))
    names = passed_names(check)
    if names != checked.get(number):  # something other than the notebook's answer was passed to the check
        raise CannotTake
    pieces = []
    own: dict[str, str] = {}  # name -> the last cell that defines it
    for place, source in enumerate(ran):
        try:
            parse_code(source)
        except SyntaxError:  # so it never ran
            continue
        if source == check:
            continue
        bound = binds(source)
        own |= {name: source for name in names if name in bound}
        other = next((exercise for exercise, its in checked.items() if exercise != number and bound & {*its}), "")
        pieces.append(Piece("exercise" if other else "own", f"cell-{place}", source, other))
    answers = list(dict.fromkeys(own.values()))
    if own.keys() != {*names}:
        raise CannotTake
    others = [piece for piece in pieces if piece.source not in answers]
    mine = [Piece("exercise", f"answer-{place}", source, number) for place, source in enumerate(answers)]
    passage = extract(number, [*others, *mine, Piece("check", "check", check, number)])
    code = "\n\n".join(passage.code)
    if not all(source in code for name in names for source in _sources_of(namespace.get(name))):
        raise CannotTake
    return passage


def _sources_of(answer: Any) -> list[str]:
    """Return the source of the learner's function, or of each method of their class.

    Raises CannotTake if Python doesn't know a source.
    """
    functions = [answer]
    if isinstance(answer, type):  # Python doesn't know the source of a class that a cell defines
        inner = [getattr(value, "__func__", getattr(value, "fget", value)) for value in vars(answer).values()]
        functions = [value for value in inner if inspect.isfunction(value) and value.__module__ == answer.__module__]
    try:
        return [inspect.getsource(function).rstrip() for function in functions]
    except (OSError, TypeError):
        raise CannotTake from None
