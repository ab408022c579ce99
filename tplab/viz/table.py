"""A small table of results, with one row per run and one column per number."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

SENTENCE = 60  # characters; a longer cell wraps, as the names of the columns do


class Table:
    """A table of results, shown as text in a terminal and as HTML in a notebook."""

    def __init__(self, head: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[bool], title: str) -> None:
        self.head, self.rows, self.numeric, self.title = head, rows, numeric, title

    def __repr__(self) -> str:
        widths = [max(len(text) for text in column) for column in zip(self.head, *self.rows, strict=True)]
        lines = [self._line(row, widths) for row in (self.head, *self.rows)]
        return "\n".join([self.title, *lines] if self.title else lines)

    def _line(self, row: Sequence[str], widths: Sequence[int]) -> str:
        cells = zip(row, widths, self.numeric, strict=True)
        return "  ".join(text.rjust(width) if right else text.ljust(width) for text, width, right in cells).rstrip()

    def _repr_html_(self) -> str:
        def cells(row: Sequence[str], tag: str) -> str:
            sides = ["right" if right else "left" for right in self.numeric]
            spaces = ["pre-wrap" if tag == "th" or len(text) > SENTENCE else "pre" for text in row]
            return "".join(
                f'<{tag} style="text-align: {side}; padding: 0.2em 0.9em; white-space: {space};">{escape(text)}</{tag}>'
                for text, side, space in zip(row, sides, spaces, strict=True)
            )

        title = f"<caption>{escape(self.title)}</caption>" if self.title else ""
        body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in self.rows)
        return f"<table>{title}<thead><tr>{cells(self.head, 'th')}</tr></thead><tbody>{body}</tbody></table>"


def table(rows: Sequence[Mapping[str, Any]], *, title: str = "") -> Table:
    """Return a table with one column per name. All rows must have the same names. None leaves a cell empty.

    Format numbers yourself, for example with f"{loss:.4f}". A column that contains only numbers is right-aligned.
    """
    if not rows:
        raise ValueError("table needs at least one row")
    head = list(rows[0])
    for row in rows:
        if list(row) != head:
            raise ValueError(f"every row of a table has the same columns: {head}, not {list(row)}")
    texts = [["" if value is None else str(value) for value in row.values()] for row in rows]
    numeric = [all(_is_number(text) for text in column) for column in zip(*texts, strict=True)]
    return Table(head, texts, numeric, title)


def _is_number(text: str) -> bool:
    try:
        float(text.replace(",", "").removesuffix("%") or "0")
    except ValueError:
        return False
    return True
