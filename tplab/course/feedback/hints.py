"""Each exercise has three hints. `tplab hint 4.2` shows the next hint. The box of a failed check contains all three.

This module reads the hints from the executed solution notebook, which contains them as nested <details> (see
`rewrite.fold_hints`). That way, learners still get the hints even if they've deleted or edited the hints cell in their
own notebook. The file `.tplab/hints.json` in the learner's folder stores the number of the last hint shown for each
exercise, as in {"4.2": 1}.
"""

import json
import re
from contextlib import suppress
from pathlib import Path

from tplab.common.files import replace
from tplab.course.notebooks.cells import Cell, Unreadable, read_notebook
from tplab.course.notebooks.numbering import EXERCISE, argument, chapter_files, chapter_of, number_of
from tplab.course.notebooks.reference import find_reference

STATE = "hints.json"
_OPENING = re.compile(r"<details><summary>Hint \d+</summary>")


class NoHint(Exception):  # noqa: N818 (the name says what's missing)
    """Raised when the requested hint doesn't exist. The message says what to type instead."""


def unfold(text: str) -> list[str]:
    """Extract the hints, as Markdown, from a hints cell's nested <details>. This reverses `rewrite.fold_hints`."""
    return [re.sub(r"(\s*</details>)+\s*$", "", part).strip() for part in _OPENING.split(text)[1:]]


def hints_of(reference: list[Cell]) -> dict[str, list[str]]:
    """Return the hints of every exercise in a chapter, as in {"4.1": ["...", "...", "..."], ...}."""
    return {str(cell.marks["hints"]): unfold(cell.source) for cell in reference if "hints" in cell.marks}


def hints_for(number: str, material: Path) -> list[str]:
    """Return the hints of exercise `number`, read from the chapter's solution notebook in `material`/solutions.

    Raises NoHint if there's no such exercise, and Unreadable if the notebook is broken.
    """
    if not re.fullmatch(EXERCISE, number):
        raise NoHint(
            f"There is no exercise {number!r}. Write the number as it appears in the heading, for example: tplab hint "
            "4.2"
        )
    chapters = {number_of(path.stem): path for path in chapter_files(material / "solutions", ".ipynb")}
    path = chapters.get(chapter_of(number))
    if path is None:
        there = ", ".join(map(argument, chapters)) or "none"
        raise NoHint(f"There is no chapter {argument(chapter_of(number))}. There are: {there}.")
    known = hints_of(read_notebook(path))
    if number not in known:
        raise NoHint(
            f"There is no exercise {number} in chapter {argument(chapter_of(number))}. There are: {', '.join(known)}."
        )
    return known[number]


# Hints that have been shown


def seen(memory: Path) -> dict[str, int]:
    """Return the number of the last hint shown for each exercise. A missing or damaged file counts as empty."""
    try:
        stored = json.loads((memory / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    items = stored.items() if isinstance(stored, dict) else ()
    return {number: step for number, step in items if isinstance(step, int) and not isinstance(step, bool) and step > 0}


def remember(memory: Path, number: str, step: int) -> None:
    """Record that hint `step` has been shown."""
    path = memory / STATE
    path.parent.mkdir(exist_ok=True)
    replace(path, json.dumps(seen(memory) | {number: step}, indent=1, sort_keys=True).encode())


def show(number: str, material: Path, memory: Path) -> int:
    """Print the next hint for `tplab hint 4.2`. Return the exit code, which is 2 if there's no hint to show."""
    # Imported here because notebook kernels also use this module, but kernels display hints as HTML, without rich
    from rich.console import Console
    from rich.markdown import Markdown
    from rich.text import Text

    try:
        hints = hints_for(number, material)
    except (NoHint, Unreadable) as error:
        Console(stderr=True, highlight=False).print(Text(str(error), style="red"))
        return 2
    step = min(seen(memory).get(number, 0) + 1, len(hints))
    with suppress(OSError):  # an unwritable folder is no reason to withhold a hint
        remember(memory, number, step)
    more = f"For the next hint, run: tplab hint {number}"
    last = f"That was the last hint. To see the answer and an explanation, run: tplab solution {number}"
    console = Console(highlight=False)
    console.print(Text(f"Exercise {number}, hint {step} of {len(hints)}", style="bold"))
    console.print(Markdown(hints[step - 1]))
    console.print()
    console.print(Text(more if step < len(hints) else last, style="dim"))
    return 0


# Hints inside the box of a failed check


def folded(number: str) -> str:
    """Return the exercise's hints as nested HTML, or "" if they can't be found."""
    return to_html(hints_of(find_reference(number)).get(number, []))


def to_html(hints: list[str]) -> str:
    """Convert Markdown hints to nested <details>, so that opening a hint reveals the next one.

    This works without a kernel.
    """
    from markdown_it import MarkdownIt

    render = MarkdownIt("commonmark", {"html": False}).render
    folded = ""
    for place in range(len(hints), 0, -1):
        body = render(hints[place - 1])
        inner = f'<div style="margin: 0.2em 0 0 1.1em;">{body}{folded}</div>'
        summary = f'<summary style="cursor: pointer;">Hint {place}</summary>'
        folded = f'<details style="margin-top: 0.35em;">{summary}{inner}</details>'
    return folded
