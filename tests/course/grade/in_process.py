"""`tplab check` without a kernel: the cells of a chapter run in this process, in a namespace of their own."""

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest

from tests.course import tiny
from tplab.course.checks.trials import EXERCISES
from tplab.course.commands.state import results
from tplab.course.grade import check_notebook
from tplab.course.grade.check_notebook import Verdict
from tplab.course.notebooks.cells import Cell, read_notebook


class Run:
    """Stands in for tplab.course.grade.run.Run, and yields the same rows."""

    def __init__(self, cells: list[Cell], folder: Path, limits: object):
        self.cells, self.ended = cells[1:], ""  # the first one prepares a kernel

    def __iter__(self) -> Iterator[dict]:
        names: dict = {}
        for cell in self.cells:
            row = {"id": cell.id, **cell.marks, "outcome": "passed", "died": False, "message": ""}
            try:
                shown = execute(cell.source, names)
                expected = "\n".join(results(cell.outputs))
                if row["role"] == "check" and shown != expected:
                    row |= {"outcome": "failed", "expected": expected, "got": shown}
            except BaseException as error:
                row |= {"outcome": "failed", "ename": type(error).__name__, "evalue": str(error), "traceback": ""}
            yield row


def execute(source: str, names: dict) -> str:
    """Run a cell and return what its last expression shows."""
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "<cell>", "exec"), names)
    value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names) if last else None
    return "" if value is None else repr(value)


@contextmanager
def course(folder: Path, count: int) -> Iterator[Path]:
    """A course in `folder` whose chapter 90 has `count` exercises, and which is checked in this process."""
    tiny.make_unexecuted(folder, tiny.source(count))
    with pytest.MonkeyPatch.context() as patch, mock.patch.dict(EXERCISES):
        patch.setattr(check_notebook, "Run", Run)
        module = ModuleType("tplab.course.exercises.ch90")
        exec((folder / "tiny_checks.py").read_text(), vars(module))
        patch.setitem(__import__("sys").modules, module.__name__, module)
        yield folder


def verdicts(root: Path, learner: tiny.Learner, **options) -> tuple[dict[str, Verdict], list[str]]:
    """What is said about each exercise, by its number in the chapter, and the notes."""
    reference = read_notebook(root / "solutions" / "90_tiny.ipynb")
    mine = read_notebook(learner.save(root / "chapters" / "mine.ipynb"))
    stream = list(check_notebook.check_notebook(reference, mine, root / "chapters", **options))
    said = {one.number.removeprefix("90."): one for one in stream if isinstance(one, Verdict)}
    return said, [one for one in stream if isinstance(one, str)]
