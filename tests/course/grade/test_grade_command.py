"""`tplab grade`: which files are whose, what a spreadsheet and a browser get, and one small class."""

import csv
import io
import os
import re
import threading
from pathlib import Path

import pytest

from tests import saying
from tests.course import tiny
from tplab.course.commands import cli
from tplab.course.grade import report, submissions
from tplab.course.grade.check_notebook import Verdict
from tplab.course.grade.many import Outcome
from tplab.course.grade.run import Limits, Run
from tplab.course.grade.submissions import Student, find_students
from tplab.course.notebooks.cells import Cell

CHAPTERS = {0: "00_why", 4: "04_linear"}


def notebook(path: Path, number: str = "4.1") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{"cells": [{{"id": "exercise-{number.replace(".", "-")}"}}]}}' if number else "{}")
    return path


def found(folder: Path, only: int | None = None) -> dict[str, tuple[str, list[int], str]]:
    """What is found in a folder: by entry, the student's name, the chapters, and the remarks."""
    students = find_students(folder, CHAPTERS, only, folder / "out")
    return {one.entry: (one.name, sorted(one.notebooks), " ".join(one.problems)) for one in students}


def test_students_and_chapters(tmp_path):
    notebook(tmp_path / "Ann.ipynb")
    notebook(tmp_path / "Ben_00_why.ipynb", "")
    notebook(tmp_path / "Cem" / "deep" / "any name.ipynb", "0.2")
    notebook(tmp_path / "Cem" / "04_linear.ipynb", "4.1")
    notebook(tmp_path / "Cem" / ".ipynb_checkpoints" / "04_linear.ipynb")
    notebook(tmp_path / "Dan Day_1234_assignsubmission_file_" / "04_linear.ipynb")
    notebook(tmp_path / "Eva_04_linear.ipynb", "0.1")  # the content counts, not the name
    (tmp_path / "out").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / ".DS_Store").touch()
    (tmp_path / "essay.txt").touch()
    seen = found(tmp_path)
    remarks = {entry: seen.pop(entry)[2] for entry in ("empty", "essay.txt")}
    assert all(remarks.values()), remarks
    assert seen == {
        "Ann.ipynb": ("Ann", [4], ""),
        "Ben_00_why.ipynb": ("Ben_00_why", [0], ""),
        "Cem": ("Cem", [0, 4], ""),
        "Dan Day_1234_assignsubmission_file_": ("Dan Day", [4], ""),
        "Eva_04_linear.ipynb": ("Eva_04_linear", [0], ""),
    }


def test_notebooks_that_can_not_be_checked_are_remarked(tmp_path):
    notebook(tmp_path / "Ann.ipynb", "0.1")
    notebook(tmp_path / "Ben.ipynb", "")
    notebook(tmp_path / "Dan" / "old.ipynb")
    notebook(tmp_path / "Dan" / "new.ipynb")
    os.utime(tmp_path / "Dan" / "old.ipynb", (1, 1))
    seen = found(tmp_path, only=4)
    assert [chapters for _, chapters, _ in seen.values()] == [[], [4], [4]]
    assert re.search(saying("chapter 0", "chapter 4"), seen["Ann.ipynb"][2])
    assert "old.ipynb" in seen["Dan"][2]
    dan = find_students(tmp_path, CHAPTERS, 4, tmp_path / "out")[2]
    assert dan.notebooks[4].name == "new.ipynb", "the one saved last counts"
    assert "--chapter" in found(tmp_path)["Ben.ipynb"][2]


def test_files_beside_a_notebook_are_copied_but_no_other_notebooks(tmp_path):
    book = notebook(tmp_path / "class" / "Ann" / "04_linear.ipynb")
    for name in ("helper.py", "data/x.csv", ".hidden"):
        (book.parent / name).parent.mkdir(exist_ok=True)
        (book.parent / name).write_text(name)
    notebook(book.parent / "00_why.ipynb", "0.1")
    (student,) = find_students(tmp_path / "class", CHAPTERS, None, tmp_path / "out")
    submissions.copy(student.notebooks[4], tmp_path / "copy", beside=student.folder)
    names = {str(path.relative_to(tmp_path / "copy")) for path in (tmp_path / "copy").rglob("*") if path.is_file()}
    assert names == {"notebook.ipynb", "helper.py", "data/x.csv"}


# The CSV file and the pages

ODD = "=1+1<script>alert(1)<\\script>\ud800"


def test_no_text_is_taken_for_html_or_for_a_formula_or_keeps_the_results_from_being_written(tmp_path):
    statuses = [("4.1", ODD, "passed", ""), ("4.2", "Two", "failed", ODD), ("4.3", "3", "waiting", "4.1")]
    verdicts = [Verdict(*status) for status in statuses]
    grades = [report.Grade(Student(ODD, "=1", problems=[ODD]), {4: Outcome(verdicts, [ODD], {"4.2": ODD})})]
    report.write(tmp_path, grades, ["0.1", "4.1", "4.2", "4.3"])
    text = (tmp_path / report.CSV).read_text("utf-8-sig")
    head, row = csv.reader(io.StringIO(text, newline=""))
    assert head == ["student", "submission", "0.1", "4.1", "4.2", "4.3", "passed", "of", "remarks"]
    assert row[2:8] == ["", "passed", "failed", "waiting", "1", "4"]
    assert all(cell.startswith("'=") for cell in (row[0], row[1], row[8])), row
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) == 2
    for page in pages:
        assert "<script" not in page.read_text(encoding="utf-8")
        assert "&lt;script&gt;" in page.read_text(encoding="utf-8")


# Limits


def test_a_run_can_be_stopped_from_outside(tmp_path):
    limits = Limits(stop=threading.Event())
    limits.stop.set()
    run = Run([Cell("code", "1", "a", {"tplab": {"role": "own"}})], tmp_path, limits)
    assert list(run) == []
    assert "stopped" in run.ended


# The command


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny.make_unexecuted(folder, tiny.source(2))
    return folder


def submit(root: Path, path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    mine = tiny.Learner(root / "chapters" / "90_tiny.ipynb")
    mine.answer(1, body)
    mine.save(path)


def rows(out: Path) -> dict[str, dict[str, str]]:
    text = (out / "grades.csv").read_text("utf-8-sig")
    return {row["student"]: row for row in csv.DictReader(io.StringIO(text, newline=""))}


def test_everyone_has_a_row_and_a_page_with_messages_and_code(root, tmp_path, monkeypatch):
    """Ann is right, Ben has a helper and is wrong, and Cem's file is damaged."""
    folder, out = tmp_path / "class", tmp_path / "class-grades"
    submit(root, folder / "Ann.ipynb", "return x + x")
    submit(root, folder / "Ben" / "90_tiny.ipynb", "from helper import three; open('new', 'w'); return three * x")
    (folder / "Ben" / "helper.py").write_text("three = 3")
    submit(root, folder / "Cem.ipynb", "return x + x")
    (folder / "Cem.ipynb").write_text((folder / "Cem.ipynb").read_text()[:-100])
    monkeypatch.setenv("PYTHONPATH", str(root))
    assert cli.main(["grade", str(folder), "--root", str(root), "--jobs", "2"]) == 1, "Cem's could not be checked"
    graded = rows(out)
    assert list(graded) == ["Ann", "Ben", "Cem"]
    assert [row["90.1"] for row in graded.values()] == ["passed", "failed", "not run"]
    assert [row["90.2"] for row in graded.values()] == ["to do", "to do", "not run"]
    assert [row["passed"] for row in graded.values()] == ["1", "0", "0"]
    assert "JSON" in graded["Cem"]["remarks"]
    paths = list((out / "students").iterdir())
    pages = {path.name.split(".")[0]: path.read_text() for path in paths}
    assert sorted(pages) == ["Ann", "Ben", "Cem"]
    assert "double_1(3) is 9." in pages["Ben"]
    assert "return three * x" in pages["Ben"]
    assert "return x + x" in pages["Ann"]
    assert "tplab-grade-" not in "".join(pages.values()), "the folder of the copy"
    assert all(f"students/{path.name}" in (out / "index.html").read_text() for path in paths)
    files = sorted(path.name for path in folder.rglob("*") if path.is_file())
    assert files == ["90_tiny.ipynb", "Ann.ipynb", "Cem.ipynb", "helper.py"], "they stay as they are"


@pytest.mark.parametrize(("option", "limit", "says"), [("--memory", "0.000001", "GB"), ("--timeout", "1", "1 second")])
def test_a_limit_of_the_command_is_that_of_each_notebook(option, limit, says, root, tmp_path):
    submit(root, tmp_path / "class" / "Ann.ipynb", "while True: pass")
    assert cli.main(["grade", str(tmp_path / "class"), "--root", str(root), option, limit]) == 1
    row = rows(tmp_path / "class-grades")["Ann"]
    assert row["90.1"] == "not run"
    assert says in row["remarks"]
