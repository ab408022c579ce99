"""Write the results of `tplab grade`: grades.csv, index.html, and a page per student. Everything in them is escaped."""

import csv
import io
from dataclasses import dataclass
from html import escape
from pathlib import Path
from urllib.parse import quote

from tplab.common.files import replace
from tplab.course.grade.many import Outcome
from tplab.course.grade.submissions import Student
from tplab.course.grade.terminal import LOOK
from tplab.course.notebooks.numbering import heading

CSV = "grades.csv"
_COLORS = {"green": "#2e7d32", "red": "#c62828", "yellow": "#8a5a00", "magenta": "#8e24aa"}
_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; }
.wide { overflow-x: auto; }
td, th { text-align: left; vertical-align: top; padding: 0.25em 1em 0.25em 0; border-bottom: 1px solid #8884; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #8881; padding: 0.6em; margin: 0.3em 0; }
td, h1 { overflow-wrap: anywhere; }
td:first-child { min-width: 8em; }
td:last-child { min-width: 16em; }
@media (prefers-color-scheme: dark) { span, .bad { filter: brightness(1.7); } }
"""


@dataclass(frozen=True)
class Grade:
    """A student, with the outcome for each of their notebooks by chapter."""

    student: Student
    outcomes: dict[int, Outcome]

    @property
    def statuses(self) -> dict[str, str]:
        """The status of each exercise by number."""
        return {verdict.number: verdict.status for out in self.outcomes.values() for verdict in out.verdicts}

    @property
    def passed(self) -> int:
        return sum(status == "passed" for status in self.statuses.values())

    @property
    def remarks(self) -> list[str]:
        """What a teacher should know: problems with files first, then limits, then the checker's notes."""
        told = list(self.student.problems)
        for number, out in self.outcomes.items():
            where = f"{heading(number)}: " if len(self.outcomes) > 1 else ""
            told += [where + text for text in (out.problem, *out.notes) if text]
        return told


def write(out: Path, grades: list[Grade], numbers: list[str]) -> None:
    """Write all files. `numbers` are the exercises of the chapters that were handed in."""
    replace(out / CSV, as_csv(grades, numbers))
    (out / "students").mkdir(exist_ok=True)
    for grade in grades:
        replace(out / "students" / f"{grade.student.entry}.html", student_page(grade, len(numbers)))
    replace(out / "index.html", index_page(grades, numbers))


def as_csv(grades: list[Grade], numbers: list[str]) -> bytes:
    """Return one row per student with a column per exercise, in a form that Excel and LibreOffice read as text."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(["student", "submission", *numbers, "passed", "of", "remarks"])
    for grade in grades:
        statuses = [grade.statuses.get(number, "") for number in numbers]
        remarks = short(" ".join(grade.remarks), 1_000)
        texts = (grade.student.name, grade.student.entry, remarks)
        # A spreadsheet takes a text for a formula if it begins with one of these characters
        name, entry, remarks = ("'" + text if text.lstrip()[:1] in tuple("=+-@") else text for text in texts)
        writer.writerow([name, entry, *statuses, grade.passed, len(numbers), remarks])
    return text.getvalue().encode("utf-8-sig", "backslashreplace")


def student_page(grade: Grade, total: int) -> bytes:
    """Return the page of a student, which shows each exercise with its status, its message and the student's code."""
    parts = [f"<p>{escape(grade.student.entry)}: {grade.passed} of {total} exercises passed.</p>"]
    parts += [f'<p class="bad">{escape(problem)}</p>' for problem in grade.student.problems]
    for number, out in grade.outcomes.items():
        parts.append(f"<h2>{heading(number)}</h2>")
        parts += [f"<pre>{escape(text)}</pre>" for text in (out.problem, *out.notes) if text]
        for verdict in out.verdicts:
            status = f"waiting for {verdict.text}" if verdict.status == "waiting" else verdict.status
            parts.append(f"<h3>{_mark(verdict.status)} {verdict.number} {escape(verdict.title)}: {escape(status)}</h3>")
            if verdict.text and verdict.status != "waiting" and verdict.text != out.problem:
                parts.append(f"<pre>{escape(verdict.text)}</pre>")
            if code := out.answers.get(verdict.number):
                parts.append(f"<details><summary>the code</summary><pre>{escape(code)}</pre></details>")
    return _page(grade.student.name, parts)


def index_page(grades: list[Grade], numbers: list[str]) -> bytes:
    """Return the index page, which has a table with a row per student."""
    head = "".join(f"<th>{cell}</th>" for cell in ["student", *numbers, "passed", "remarks"])
    rows = []
    for grade in grades:
        page = quote(grade.student.entry, errors="surrogateescape")
        link = f'<a href="students/{page}.html">{escape(grade.student.name)}</a>'
        cells = [link, *(_mark(grade.statuses.get(number, "")) for number in numbers), f"{grade.passed}"]
        cells.append(escape(short(" ".join(grade.remarks), 300)))
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    legend = " &nbsp; ".join(f"{_mark(status)} {status}" for status in LOOK)
    table = f'<div class="wide"><table><tr>{head}</tr>{"".join(rows)}</table></div>'
    return _page(f"Grades of {len(grades)} submissions", [f"<p>{legend}</p>", table])


def short(text: str, most: int) -> str:
    """Return text on one line, cut off after `most` characters."""
    text = " ".join(text.split())
    return text if len(text) <= most else text[:most] + " …"


def _mark(status: str) -> str:
    if status not in LOOK:
        return ""
    mark, color = LOOK[status]
    return f'<span style="color: {_COLORS[color]}" title="{status}" aria-label="{status}" role="img">{mark}</span>'


def _page(title: str, parts: list[str]) -> bytes:
    """Return an HTML page that loads no other files and runs no scripts."""
    text = (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n" + "\n".join(parts) + "\n</body></html>\n"
    )
    return text.encode(errors="backslashreplace")
