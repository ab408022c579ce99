"""`tplab solution 4.2`: show and explain the answer to an exercise. It asks first, and changes no file.

It shows the exercise's cell from the chapter's source, without docstrings and with the given lines dimmed. Then come
the three hints as an explanation, and what the check reports about the answer.
"""

import argparse
import ast
import re
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown
from rich.padding import Padding
from rich.syntax import Syntax
from rich.text import Text

from tplab.course.feedback import hints
from tplab.course.grade.check_notebook import exercises_of
from tplab.course.grade.terminal import reflow
from tplab.course.learner.course_files import (
    Misuse,
    add_root,
    chapter_of_exercise,
    course_or_material,
    no_such_exercise,
)
from tplab.course.notebooks.cells import read_notebook
from tplab.course.notebooks.rewrite import regions
from tplab.course.tools.confirm import agreed
from tplab.course.tools.exercise_status import next_exercise
from tplab.course.tools.saved_outputs import results


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "solution",
        help="the explained answer to an exercise",
        description="Show the explained answer to an exercise. Your notebook stays as it is.",
    )
    parser.add_argument("exercise", nargs="?", metavar="4.2", help="without it, the next one that you haven't passed")
    parser.add_argument("--yes", action="store_true", help="don't ask first")
    add_root(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    course = course_or_material(options)
    number = options.exercise or next_exercise(course)
    files = chapter_of_exercise(course, number, "tplab solution 4.2")
    reference = read_notebook(files.reference)
    titles = exercises_of(reference)
    if number not in titles:
        raise no_such_exercise(number, files, list(titles))
    code, answer = without_docstrings(exercise_source(files.source, number))
    question = f"Show the answer to exercise {number} ({titles[number]})? A hint may do: tplab hint {number}."
    if not agreed(question, options.yes, console):
        return 0
    console.print(Text(f"Exercise {number} · {titles[number]}", style="bold"))
    console.print()
    if console.is_terminal:
        syntax = Syntax(code, "python", theme="ansi_dark", background_color="default", word_wrap=True)
        for line in set(range(1, code.count("\n") + 2)) - answer:
            syntax.stylize_range("dim", (line, 0), (line + 1, 0))
        console.print(syntax)
        console.print(Text("Code that stands dim was given; the rest is the answer.", style="dim"))
    else:
        print(code)
    console.print(Text("\nHow to get there", style="bold"))
    for step, text in enumerate(hints.hints_of(reference).get(number, []), 1):
        console.print(f"{step}.")
        console.print(Padding(Markdown(text), (0, 0, 0, 3)))
    told = [text for cell in reference if cell.marks.get("check") == number for text in results(cell.outputs)]
    if told:
        console.print(Text("\nWhat its check says", style="bold"))
        console.print(Text(reflow("\n".join(told), console.width)))
    console.print(Text("\nYour notebook stays as it is. Write it there in your own words, then:", style="dim"))
    console.print(f"tplab check --exercise {number}")
    return 0


def exercise_source(path: Path, number: str) -> str:
    """Return the source of an exercise's cell in a chapter, with its markers. Raises Misuse if it isn't there."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise Misuse(f"The answers are in {path}, which can't be read: {error.strerror}.") from error
    cells = re.split(r"^# %%", text, flags=re.MULTILINE)
    mark = f'exercise="{number}"'
    found = next((cell for cell in cells if mark in cell.partition("\n")[0].split()), None)
    if found is None:
        raise Misuse(f"{path} holds no exercise {number}. Bring the course up to date: git pull")
    return found.partition("\n")[2].strip("\n")


def without_docstrings(text: str) -> tuple[str, set[int]]:
    """Return an exercise's code without markers and docstrings, and the line numbers (from 1) of the answer."""
    lines = text.split("\n")
    dropped: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and len(node.body) > 1:
                end = first.end_lineno or first.lineno
                blank = end < len(lines) and not lines[end].strip()
                dropped |= set(range(first.lineno, end + 1 + blank))
    kept: list[str] = []
    lit: set[int] = set()
    for place, (line, where) in enumerate(regions(text), 1):
        if where in ("given", "answer") and place not in dropped and (line.strip() or kept):
            kept.append(line)
            if where == "answer":
                lit.add(len(kept))
    return "\n".join(kept), lit
