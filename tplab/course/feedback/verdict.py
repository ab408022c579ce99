"""Represent and display the result of a check: `CheckPassed` or `CheckFailed`.

Both classes have a text form (for terminals, nbval, and `tplab check`) and an HTML box (for notebooks). The text of a
`CheckPassed` is the same in every run, so nbval can compare it. A failure message lists the observations that differ,
and then asks a question that points to the cause. An observation is a named value, such as a gradient, that a check
compares with an expected value.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import zip_longest
from textwrap import fill, indent, wrap

_WIDTH = 100
_NAMES = 34  # maximum width of the names column and of the ranks column, in characters
_BOX = (
    "border-left: 6px solid {plain}; border-left-color: {color}; padding: 0.4em 0.9em; margin: 0.3em 0; "
    "background: var(--jp-layout-color1, transparent); color: var(--jp-ui-font-color1, inherit); "
    "font-family: var(--jp-content-font-family, sans-serif); font-size: var(--jp-content-font-size1, 14px); "
    "line-height: 1.45; max-width: 62em;"
)
GREEN = "var(--jp-success-color1, #2e7d32)"
RED = "var(--jp-error-color1, #c62828)"
AMBER = "var(--jp-warn-color1, #b26a00)"
BLUE = "var(--jp-info-color1, #1565c0)"


def box(color: str, *parts: str) -> str:
    """Return the HTML for a box that has a colored left border and is readable in both light and dark themes."""
    plain = color.rpartition(" ")[2].removesuffix(")")  # for untrusted pages, which drop colors that are CSS variables
    return f'<div style="{_BOX.format(color=color, plain=plain)}">{"".join(parts)}</div>'


def heading(text: str, large: bool = False) -> str:
    """Return the HTML for a box's first line. The text has no color, because the border colors are too pale to read."""
    size = " font-size: 130%;" if large else ""
    return f'<div style="font-weight: 600;{size}">{escape(text)}</div>'


def paragraph(text: str, *, strong: bool = False, small: bool = False) -> str:
    weight = "font-weight: 600;" if strong else ""
    size = "font-size: 88%;" if small else ""
    return f'<div style="margin-top: 0.35em; {weight}{size}">{code_html(text)}</div>'


def code_html(text: str) -> str:
    """Escape the text for HTML and turn `text in backticks` into <code>."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def preformatted(text: str) -> str:
    style = (
        "margin: 0.4em 0 0 0; padding: 0.4em 0.6em; overflow-x: auto; white-space: pre-wrap; "
        "word-break: normal; overflow-wrap: anywhere; "  # because JupyterLab breaks output lines in the middle of words
        "background: var(--jp-layout-color2, rgba(128, 128, 128, 0.12)); color: inherit; "
        "font-family: var(--jp-code-font-family, monospace); "
        "font-size: var(--jp-code-font-size, 13px); line-height: 1.35;"
    )
    return f'<pre style="{style}">{escape(text)}</pre>'


def table(rows: Sequence[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Return the HTML for a left-aligned table. If there is no header row, the first column is bold."""
    cell = (
        'style="text-align: left; vertical-align: top; padding: 0.15em 1.2em 0.15em 0; border: none; background: none;"'
    )
    lines = []
    if head:
        lines.append("<tr>" + "".join(f"<th {cell}>{escape(text)}</th>" for text in head) + "</tr>")
    for first, *others in rows:
        cells = [f"<b>{escape(first)}</b>" if not head else escape(first), *map(escape, others)]
        lines.append("<tr>" + "".join(f"<td {cell}>{text}</td>" for text in cells) + "</tr>")
    style = "margin: 0.4em 0 0 0; border-collapse: collapse; border: none; font-size: inherit; color: inherit;"
    return f'<table style="{style}">{"".join(lines)}</table>'


def text_row(texts: Sequence[str], widths: Sequence[int]) -> str:
    """Return a table's row as text. In each column, a text that's wider than the column continues on the next line."""
    columns = [wrap(text, width or 1) for text, width in zip(texts, widths, strict=True)]
    lines = zip_longest(*columns, fillvalue="")
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def in_notebook() -> bool:
    """Return whether this code is running in a notebook kernel."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module else None
    return getattr(shell, "kernel", None) is not None


def display_html(html: str, text: str) -> None:
    """Display the HTML in a notebook, and print the text anywhere else."""
    if in_notebook():
        from IPython.display import display

        display({"text/html": html, "text/plain": text}, raw=True)
    else:
        print(text, flush=True)


def names(items: Sequence[object]) -> str:
    """Join items with commas and "and", as in "a", "a and b", or "a, b and c"."""
    texts = [str(item) for item in items]
    return texts[0] if len(texts) == 1 else ", ".join(texts[:-1]) + " and " + texts[-1] if texts else ""


def ranks_text(ranks: Sequence[int], p: int) -> str:
    """Describe ranks in words, as in "rank 1", "ranks 0 and 2", or "every rank"."""
    if len(ranks) == p and p > 1:
        return "every rank"
    return ("rank " if len(ranks) == 1 else "ranks ") + names(sorted(ranks))


@dataclass(frozen=True)
class CheckPassed:
    """The result of a check whose answer passed.

    All of the box's text must be the same in every run, because nbval also compares the box with the one saved in the
    learner's notebook.
    """

    exercise: str
    title: str
    note: str
    compared: str

    def __repr__(self) -> str:
        told = [indent(fill(text, _WIDTH - 2), "  ") for text in (self.compared, self.note) if text]
        return "\n".join([f"Exercise {self.exercise} passed: {self.title}", *told])

    def _repr_html_(self) -> str:
        head = f"✓ Exercise {self.exercise} passed: {self.title}"
        told = [paragraph(self.note)] if self.note else []
        told += [paragraph(self.compared, small=True)]
        return box(GREEN, heading(head, large=True), *told)


@dataclass(eq=False)
class CheckFailed(AssertionError):  # noqa: N818 (a failed check isn't a program error)
    """Raised when an exercise's check fails. `str()` gives the full explanation.

    headline: the exercise, the world size p, and the ranks that are wrong.
    rows:     table rows of the form (observations, ranks, description of the difference).
    right:    the observations that agree with the expected values.
    report:   a traceback or the launcher's report, if the learner's code didn't run to completion.
    question: a question that points to the cause.
    footnote: how to repeat the check with the same inputs.
    exercise: the exercise's number, for saying where its hints are.
    """

    headline: str
    rows: list[tuple[str, str, str]] = field(default_factory=list)
    right: list[str] = field(default_factory=list)
    report: str = ""
    question: str = ""
    footnote: str = ""
    exercise: str = ""

    def __post_init__(self) -> None:
        super().__init__(self.headline)
        self._shown = False

    def __str__(self) -> str:
        parts = [self.headline]
        if self.rows:
            widths = [min(_NAMES, max(len(row[column]) for row in self.rows)) for column in (0, 1)]
            widths.append(max(50, _WIDTH - sum(widths) - 6))
            parts.append(indent("\n".join(text_row(row, widths) for row in self.rows), "  "))
        if self.right:
            parts.append(fill("Right: " + ", ".join(self.right) + ".", _WIDTH))
        if self.report:
            parts.append(indent(self.report.rstrip(), "  "))
        if self.question:
            parts.append(fill("Think: " + self.question, _WIDTH, subsequent_indent="       ", break_on_hyphens=False))
        if self.footnote:
            parts.append(self.footnote)
        if self.exercise:
            parts.append(f"A hint: tplab hint {self.exercise}")
        return "\n\n".join(parts)

    __repr__ = __str__

    def html(self) -> str:
        """Return the failure as an HTML box."""
        parts = [heading("✗ " + self.headline)]
        if self.rows:
            parts.append(table(self.rows))
        if self.right:
            parts.append(paragraph("Right: " + ", ".join(self.right) + "."))
        if self.report:
            parts.append(preformatted(self.report.rstrip()))
        if self.question:
            parts.append(paragraph("→ " + self.question, strong=True))
        if self.footnote:
            parts.append(paragraph(self.footnote, small=True))
        if self.exercise:
            hints = f"For a hint, look above this check, or run `tplab hint {self.exercise}` in a terminal."
            parts.append(paragraph(hints, small=True))
        return box(RED, *parts)

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython prints for this exception. In a notebook, also show the failure in a box."""
        if not in_notebook():
            return ["CheckFailed: " + str(self)]
        if not self._shown:  # IPython calls this more than once
            self._shown = True
            display_html(self.html(), str(self))
        return ["CheckFailed: " + self.headline]
