"""Print the results of `tplab check` in a terminal of any width."""

import re
import textwrap
import time
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tplab.common.units import count
from tplab.course.grade.check_notebook import Verdict
from tplab.course.notebooks.numbering import heading, number_of

LOOK = {
    "passed": ("✓", "green"),
    "failed": ("✗", "red"),
    "to do": ("○", "yellow"),
    "waiting": ("…", "yellow"),
    "not run": ("-", "magenta"),
}
_INDENT = 4
_HANGING = 20  # maximum indentation of a row's continuation lines, in columns


def show_heading(console: Console, stem: str, title: str, path: Path) -> None:
    """Print the chapter's title and when its notebook was last saved, because unsaved changes aren't checked."""
    console.print(Text(f"{heading(number_of(stem))}: {title}", style="bold"))
    saved = time.strftime("%b %d, %H:%M:%S", time.localtime(path.stat().st_mtime))
    console.print(Text(f"{_short(path)}, saved {saved}", style="dim"))


def show_verdict(console: Console, verdict: Verdict) -> None:
    """Print one line with an exercise's verdict and, if the exercise needs work, what to look at."""
    mark, colour = LOOK[verdict.status]
    status = f"waiting for {verdict.text}" if verdict.status == "waiting" else verdict.status
    line = Table.grid(expand=True, padding=(0, 1))
    line.add_column(width=1)
    line.add_column(no_wrap=True)
    line.add_column(ratio=1)
    line.add_column(no_wrap=True, justify="right")
    line.add_row(Text(mark, style=colour), verdict.number, Text(verdict.title), Text(status, style=f"bold {colour}"))
    console.print(line)
    if verdict.text and verdict.status != "waiting":
        console.print(Padding(Text(reflow(verdict.text, console.width - _INDENT)), (0, 0, 1, _INDENT)))


def show_note(console: Console, note: str) -> None:
    console.print(Padding(Text(reflow(f"Note: {note}", console.width - 2), style="dim"), (0, 0, 0, 2)))


def show_summary(console: Console, verdicts: list[Verdict]) -> None:
    good = sum(verdict.status == "passed" for verdict in verdicts)
    passes = "passes" if 1 in (good, len(verdicts)) else "pass"
    told = f"{good} of {count(len(verdicts), 'exercise')} {passes}."
    order = ("failed", "to do", "waiting", "not run")
    following = next((verdict.number for status in order for verdict in verdicts if verdict.status == status), "")
    console.print(Text(f"{told} Next: {following}." if following else told, style="bold"))


def reflow(text: str, width: int) -> str:
    """Rewrap text that was wrapped for a different width, but keep the line breaks in tracebacks.

    A line counts as the continuation of the row above it if it's indented at least six columns deeper.
    """
    rows: list[list[str]] = []  # each row with its continuation lines
    for line in text.split("\n"):
        depth = len(line) - len(line.lstrip())
        start = len(rows[-1][0]) - len(rows[-1][0].lstrip()) if rows else 0
        if rows and rows[-1][0].strip() and depth >= start + 6 and not re.fullmatch(r"[\s^~]*", line):
            rows[-1].append(line)
        else:
            rows.append([line])
    return "\n".join(_wrapped(row, width) for row in rows)


def _wrapped(row: list[str], width: int) -> str:
    start = len(row[0]) - len(row[0].lstrip())
    hanging = len(row[1]) - len(row[1].lstrip()) if len(row) > 1 else start
    whole = " ".join([row[0].rstrip(), *(line.strip() for line in row[1:])])
    if len(whole) <= width:
        return whole
    return textwrap.fill(
        whole,
        max(width, 40),
        subsequent_indent=" " * min(hanging, _HANGING),
        drop_whitespace=True,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _short(path: Path) -> Path:
    """Return the path relative to the current folder if it's inside that folder, and unchanged otherwise."""
    try:
        return path.resolve().relative_to(Path.cwd())
    except ValueError:
        return path
