"""Each exercise has three hints, in the cell above its check. `tplab hint 4.2` shows the next one in a terminal.

This module reads the hints from the executed solution notebook, which contains them as nested <details> (see
`rewrite.fold_hints`). That way, learners still get the hints even if they've deleted or edited the hints cell in their
own notebook. The file `.tplab/hints.json` in the learner's folder stores the number of the last hint shown for each
exercise, as in {"4.2": 1}.
"""

import json
import re
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown
from rich.text import Text

from tplab.common.files import replace
from tplab.course.notebooks.cells import Cell

STATE = "hints.json"
_OPENING = re.compile(r"<details><summary>Hint \d+</summary>")


def unfold(text: str) -> list[str]:
    """Extract the hints, as Markdown, from a hints cell's nested <details>. This reverses `rewrite.fold_hints`."""
    return [re.sub(r"(\s*</details>)+\s*$", "", part).strip() for part in _OPENING.split(text)[1:]]


def hints_of(reference: list[Cell]) -> dict[str, list[str]]:
    """Return the hints of every exercise in a chapter, as in {"4.1": ["...", "...", "..."], ...}."""
    return {str(cell.marks["hints"]): unfold(cell.source) for cell in reference if "hints" in cell.marks}


def _seen(path: Path) -> dict[str, int]:
    """Return the number of the last hint shown for each exercise. A missing or damaged file counts as empty."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    right = isinstance(stored, dict) and all(type(step) is int and step > 0 for step in stored.values())
    return stored if right else {}


def show(number: str, hints: list[str], memory: Path) -> None:
    """Print the next of an exercise's hints for `tplab hint 4.2`."""
    path = memory / STATE
    seen = _seen(path)
    step = min(seen.get(number, 0) + 1, len(hints))
    with suppress(OSError):  # an unwritable folder is no reason to withhold a hint
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, json.dumps(seen | {number: step}, indent=1, sort_keys=True).encode())
    more = f"For the next hint, run: tplab hint {number}"
    last = f"That was the last hint. To see the answer and an explanation, run: tplab solution {number}"
    console = Console(highlight=False)
    console.print(Text(f"Exercise {number}, hint {step} of {len(hints)}", style="bold"))
    console.print(Markdown(hints[step - 1]))
    console.print()
    console.print(Text(more if step < len(hints) else last, style="dim"))
