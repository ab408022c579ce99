"""Write a report as Markdown. `page` renders the same text as HTML."""

import re
from collections.abc import Callable
from pathlib import Path

from tplab.capstone.report.blocks import Block, Figure, Grid, Missing, Report, Sample
from tplab.viz.table import Table

_DPI = 144


def write_markdown(report: Report, path: Path) -> None:
    """Write a report to `path`, and its pictures to the folder `<name>_files` next to it."""
    folder = path.with_name(f"{path.stem}_files")
    folder.mkdir(exist_ok=True)

    def save(figure: Figure) -> str:
        (folder / f"{figure.name}.png").write_bytes(figure.picture.png(_DPI))
        return f"{folder.name}/{figure.name}.png"

    path.write_text(to_markdown(report, save), encoding="utf-8")


def to_markdown(report: Report, address: Callable[[Figure], str]) -> str:
    """Return the report as Markdown, with `address(figure)` as the link to each picture."""
    parts = [f"# {_text(report.title)}", _text(report.about)]
    for section in report.sections:
        parts.append(f"## {_text(section.title)}")
        parts += [_block(block, address) for block in section.blocks]
    return "\n\n".join(parts) + "\n"


def _block(block: Block, address: Callable[[Figure], str]) -> str:
    match block:
        case str(text):
            return _text(text)
        case list(numbers):
            return "\n".join(f"- **{number.value}** {number.unit}  \n  {_text(number.name)}" for number in numbers)
        case Figure(_, picture, says):
            return f"![{_text(picture.caption)}]({address(block)})\n\n{_text(says)}"
        case Grid(table, folded):
            shown = _table(table)
            return f"<details><summary>{_text(folded)}</summary>\n\n{shown}\n\n</details>" if folded else shown
        case Sample(step, prompt, text):
            when = "Before training" if step == 0 else f"After step {step:,}"
            written = prompt + text.removeprefix(prompt)
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", written)), default=0))
            return f"{when}:\n\n{fence}text\n{written}\n{fence}"
        case Missing(what, how):
            return f"> Not measured: {_text(what)}.  \n> To do so: {_text(how)}"


def _table(table: Table) -> str:
    rule = ["---:" if right else "---" for right in table.numeric]
    lines = [[_text(cell) for cell in table.head], rule, *([_text(cell) for cell in row] for row in table.rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _text(text: str) -> str:
    """Put text on a single line and escape everything that has a meaning in Markdown, except `code`."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    marks = r"[\\*<\[\]|]|(?<!\w)_|_(?!\w)"  # underscores inside words need no escape
    return "".join(part if part.startswith("`") else re.sub(marks, r"\\\g<0>", part) for part in parts)
