"""`tplab grade`: which files are whose, what a spreadsheet and a browser get, and one small class."""

import csv
import io
import os
import threading
from pathlib import Path

import pytest

from tests.course import tiny
from tplab.course.grade import report, submissions
from tplab.course.grade.check_notebook import Verdict
from tplab.course.grade.many import Outcome
from tplab.course.grade.run import Limits, Run
from tplab.course.grade.submissions import Student, find_students
from tplab.course.notebooks.cells import Cell
from tplab.course.tools import cli

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
    (tmp_path / "link.ipynb").symlink_to("Ann.ipynb")
    seen = found(tmp_path)
    remarks = {entry: seen.pop(entry)[2] for entry in ("empty", "essay.txt", "link.ipynb")}
    assert all(remarks.values()), remarks
    assert seen == {
        "Ann.ipynb": ("Ann", [4], ""),
        "Ben_00_why.ipynb": ("Ben_00_why", [0], ""),
        "Cem": ("Cem", [0, 4], ""),
        "Dan Day_1234_assignsubmission_file_": ("Dan Day", [4], ""),
        "Eva_04_linear.ipynb": ("Eva_04_linear", [0], ""),
    }


def test_notebooks_that_can_not_be_checked_are_remarked(tmp_path, monkeypatch):
    notebook(tmp_path / "Ann.ipynb", "0.1")
    notebook(tmp_path / "Ben.ipynb", "")
    notebook(tmp_path / "Cem.ipynb", "7.1")
    notebook(tmp_path / "Dan" / "old.ipynb")
    notebook(tmp_path / "Dan" / "new.ipynb")
    os.utime(tmp_path / "Dan" / "old.ipynb", (1, 1))
    seen = found(tmp_path, only=4)
    assert {entry: chapters for entry, (_, chapters, _) in seen.items()} == {
        "Ann.ipynb": [], "Ben.ipynb": [4], "Cem.ipynb": [], "Dan": [4],
    }  # fmt: skip
    for entry, says in {"Ann.ipynb": "not of chapter 4", "Cem.ipynb": "chapter 7", "Dan": "old.ipynb"}.items():
        assert says in seen[entry][2]
    assert "--chapter" in found(tmp_path)["Ben.ipynb"][2]
    monkeypatch.setattr(submissions, "MOST_BYTES", 20)
    assert found(tmp_path)["Ann.ipynb"][1] == []


def test_pages_of_two_students_of_one_name_are_two(tmp_path):
    notebook(tmp_path / "Ann.ipynb")
    notebook(tmp_path / "ann" / "04_linear.ipynb")
    assert len({one.page.lower() for one in find_students(tmp_path, CHAPTERS, None, tmp_path / "out")}) == 2


def test_files_beside_a_notebook_are_copied_but_no_links_and_no_other_notebooks(tmp_path):
    book = notebook(tmp_path / "class" / "Ann" / "04_linear.ipynb")
    for name in ("helper.py", "data/x.csv", ".hidden"):
        (book.parent / name).parent.mkdir(exist_ok=True)
        (book.parent / name).write_text(name)
    notebook(book.parent / "00_why.ipynb", "0.1")
    (book.parent / "link.py").symlink_to(book)
    os.mkfifo(book.parent / "pipe")
    (student,) = find_students(tmp_path / "class", CHAPTERS, None, tmp_path / "out")
    assert [problem.split()[0] for problem in student.problems] == ["link.py", "pipe"]
    copied = submissions.copy(student.notebooks[4], tmp_path / "copy", beside=student.folder)
    assert copied == tmp_path / "copy" / "notebook.ipynb"
    names = {str(path.relative_to(tmp_path / "copy")) for path in (tmp_path / "copy").rglob("*") if path.is_file()}
    assert names == {"notebook.ipynb", "helper.py", "data/x.csv"}
    submissions.copy(student.notebooks[4], tmp_path / "alone", beside=False)
    assert os.listdir(tmp_path / "alone") == ["notebook.ipynb"]


def test_names_that_can_not_be_shown_are_written_out():
    assert submissions.printable(os.fsdecode(b"Ren\xe9")) == "Ren\\xe9"
    assert submissions.printable("a\nb\u202ec") == "a\\nb\\u202ec"
    assert submissions.printable("Смит 日本") == "Смит 日本"


# The CSV file and the pages

EVIL = "=1+1</pre><script>alert(1)</script>\x1b[31m\u202e\ud800"


def graded(name: str) -> list[report.Grade]:
    verdicts = [
        Verdict("4.1", EVIL, "passed"),
        Verdict("4.2", "Two", "failed", EVIL),
        Verdict("4.3", "3", "waiting", "4.1"),
    ]
    outcome = Outcome(verdicts, [EVIL], {"4.2": EVIL})
    return [report.Grade(Student(name, name, problems=[EVIL]), {4: outcome})]


def test_csv_has_a_column_per_exercise_and_no_formula():
    for name in ("=1", "+1", "-1", "@x", "\t=1", " =1", "|x", EVIL):
        text = report.as_csv(graded(name), ["0.1", "4.1", "4.2", "4.3"]).decode("utf-8-sig")
        head, row = csv.reader(io.StringIO(text, newline=""))
        assert head == ["student", "submission", "0.1", "4.1", "4.2", "4.3", "passed", "of", "remarks"]
        assert row[2:8] == ["", "passed", "failed", "waiting", "1", "4"]
        assert all(cell.startswith("'") for cell in (row[0], row[1], row[8])), row


def test_pages_escape_everything(tmp_path):
    report.write(tmp_path, graded(submissions.printable(EVIL[:-1])), ["4.1", "4.2", "4.3"])
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) == 2
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert "<script" not in text
        assert "&lt;script&gt;" in text
        assert not {"\x1b", "\u202e", "\ud800"} & set(text)
        assert "default-src 'none'" in text
        assert "http://" not in text
        assert "src=" not in text.replace("default-src", "")
    report.write(tmp_path, graded("Ben"), ["4.1"])
    assert [path.name[:3] for path in (tmp_path / "students").iterdir()] == ["ben"], "the other student has left"


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


@pytest.fixture(scope="module")
def graded_class(root, tmp_path_factory):
    """The folder with the grades of three: Ann is right, Ben has a helper and is wrong, and Cem's file is damaged."""
    folder = tmp_path_factory.mktemp("teacher") / "class"
    submit(root, folder / "Ann.ipynb", "return x + x")
    submit(root, folder / "Ben" / "90_tiny.ipynb", "from helper import three; open('new', 'w'); return three * x")
    (folder / "Ben" / "helper.py").write_text("three = 3")
    submit(root, folder / "Cem.ipynb", "return x + x")
    (folder / "Cem.ipynb").write_text((folder / "Cem.ipynb").read_text()[:-100])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(root))
        assert cli.main(["grade", str(folder), "--root", str(root), "--jobs", "2"]) == 1, "Cem's could not be checked"
    return folder.with_name("class-grades")


def test_everyone_has_a_row_and_a_page_with_messages_and_code(graded_class):
    graded = rows(graded_class)
    assert list(graded) == ["Ann", "Ben", "Cem"]
    assert [row["90.1"] for row in graded.values()] == ["passed", "failed", "not run"]
    assert [row["90.2"] for row in graded.values()] == ["to do", "to do", "not run"]
    assert [row["passed"] for row in graded.values()] == ["1", "0", "0"]
    assert "JSON" in graded["Cem"]["remarks"]
    paths = list((graded_class / "students").iterdir())
    pages = {path.name.split("-")[0]: path.read_text() for path in paths}
    assert sorted(pages) == ["ann", "ben", "cem"]
    assert "double_1(3) is 9." in pages["ben"]
    assert "return three * x" in pages["ben"]
    assert "return x + x" in pages["ann"]
    assert "tplab-grade-" not in "".join(pages.values()), "the folder of the copy"
    assert all(f"students/{path.name}" in (graded_class / "index.html").read_text() for path in paths)
    submissions = graded_class.with_name("class")
    assert sorted(path.name for path in submissions.rglob("*") if path.is_file()) == [
        "90_tiny.ipynb", "Ann.ipynb", "Cem.ipynb", "helper.py",
    ], "they stay as they are"  # fmt: skip


@pytest.mark.parametrize(
    ("option", "value", "says"), [("--timeout", "0.001", "0.001 seconds"), ("--memory", "0.000001", "GB")]
)
def test_limits_of_the_command_are_those_of_each_notebook(root, tmp_path, option, value, says):
    submit(root, tmp_path / "class" / "Ann.ipynb", "return x + x")
    assert cli.main(["grade", str(tmp_path / "class"), "--root", str(root), option, value]) == 1
    row = rows(tmp_path / "class-grades")["Ann"]
    assert row["90.1"] == "not run"
    assert says in row["remarks"]


def test_misuse_is_told_in_a_sentence(root, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "other"):
        Path(name).mkdir()
    Path("other", "thesis.txt").touch()
    submit(root, Path("class", "a.ipynb"), "return 2 * x")
    for line, says in (
        ("nowhere", "no folder nowhere"),
        ("empty", "is empty"),
        ("class --chapter 17", "There is no chapter 17. There are: 90."),
        ("class --out class", "--out"),
        ("class --out other", "--out"),
        ("class --out class/a.ipynb", "--out"),
        ("class --memory 0", "--memory 0"),
        ("class --cell-timeout nan", "--cell-timeout nan"),
    ):
        assert cli.main(["grade", *line.split(), "--root", str(root)]) == 2
        assert says in " ".join(capsys.readouterr().err.split())
