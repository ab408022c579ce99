"""A report as Markdown, with its pictures in a folder beside it."""

from pathlib import Path

from tplab.capstone.report.blocks import Block, Figure, Grid, Missing, Numbers, Report, Sample, Words
from tplab.viz.table import Table

_DPI = 144


def write_markdown(report: Report, path: Path) -> None:
    """Write it to `path`, and its pictures into the folder `<name>_files` beside that."""
    folder = path.with_name(f"{path.stem}_files")
    folder.mkdir(exist_ok=True)
    parts = [f"# {report.title}", report.about]
    for section in report.sections:
        parts.append(f"## {section.title}")
        parts += [_block(block, folder) for block in section.blocks]
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _block(block: Block, folder: Path) -> str:
    match block:
        case Words(text):
            return text
        case Numbers(numbers):
            return "\n".join(f"- **{number.value}** {number.unit}: {number.name}" for number in numbers)
        case Figure(name, picture, says):
            (folder / f"{name}.png").write_bytes(picture.png(_DPI))
            return f"![{picture.caption}]({folder.name}/{name}.png)\n\n{says}"
        case Grid(table, folded):
            return f"{folded}:\n\n{_table(table)}" if folded else _table(table)
        case Sample(step, prompt, text):
            when = "Before training" if step == 0 else f"After step {step:,}"
            written = prompt + text.removeprefix(prompt)
            fence = "`" * max(3, 1 + _longest_ticks(written))
            return f"{when}:\n\n{fence}text\n{written}\n{fence}"
        case Missing(what, how):
            return f"> Not measured: {what}.\n> To do so: {how}"


def _table(table: Table) -> str:
    rule = ["---:" if right else "---" for right in table.numeric]
    lines = [table.head, rule, *table.rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _longest_ticks(text: str) -> int:
    longest = run = 0
    for character in text:
        run = run + 1 if character == "`" else 0
        longest = max(longest, run)
    return longest
