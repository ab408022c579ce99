"""`tplab grade`: which files are whose, what a spreadsheet and a browser get, and what is checked again."""

import csv
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from filelock import FileLock

from tests import ROOT
from tests.course import tiny
from tests.course.tools import a_class
from tplab.course.grade.check_notebook import Verdict
from tplab.course.learner.course_files import ChapterFiles, Course, all_chapters, course_at
from tplab.course.notebooks.cells import read_notebook
from tplab.course.tools import cli
from tplab.course.tools.grading_many import jobs, limits, report, submissions, worker
from tplab.course.tools.grading_many.jobs import Outcome
from tplab.course.tools.grading_many.store import Store, checks_hash
from tplab.course.tools.grading_many.submissions import Student, find_students

CHAPTERS = {
    number: ChapterFiles(Course(Path("course"), Path("course", "chapters")), stem)
    for number, stem in ((0, "00_why"), (4, "04_linear"))
}


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
    notebook(tmp_path / "Ben_04_linear (1).ipynb", "")
    notebook(tmp_path / "Cem" / "deep" / "any name.ipynb", "0.2")
    notebook(tmp_path / "Cem" / ".ipynb_checkpoints" / "04_linear.ipynb")
    notebook(tmp_path / "Dan Day_1234_assignsubmission_file_" / "04_linear.ipynb")
    notebook(tmp_path / "Eva_04_linear.ipynb", "0.1")
    (tmp_path / "out").mkdir()
    (tmp_path / ".DS_Store").touch()
    assert found(tmp_path) == {
        "Ann.ipynb": ("Ann", [4], ""),
        "Ben_00_why.ipynb, Ben_04_linear (1).ipynb": ("Ben", [0, 4], ""),
        "Cem/": ("Cem", [0], ""),
        "Dan Day_1234_assignsubmission_file_/": ("Dan Day", [4], ""),
        "Eva_04_linear.ipynb": ("Eva", [0], ""),  # the content counts, not the name
    }


def test_chapter_asked_for(tmp_path):
    notebook(tmp_path / "Ann.ipynb", "0.1")
    notebook(tmp_path / "Ben.ipynb", "")
    notebook(tmp_path / "Cem.ipynb", "7.1")
    assert found(tmp_path, only=4) == {
        "Ann.ipynb": ("Ann", [], "Ann.ipynb is a notebook of chapter 0, not of chapter 4."),
        "Ben.ipynb": ("Ben", [4], ""),
        "Cem.ipynb": ("Cem", [], "Cem.ipynb is a notebook of chapter 7, which this course doesn't have."),
    }
    assert found(tmp_path)["Ben.ipynb"][2] == "Ben.ipynb doesn't say which chapter it is. If you know: --chapter N."


def test_two_students_of_one_name_stay_two(tmp_path):
    notebook(tmp_path / "Ann_04_linear.ipynb")
    notebook(tmp_path / "Ann.ipynb")
    notebook(tmp_path / "ann" / "04_linear.ipynb")
    students = find_students(tmp_path, CHAPTERS, None, tmp_path / "out")
    assert [list(one.notebooks) for one in students] == [[4]] * 3
    assert len({one.page.lower() for one in students}) == 3
    assert {problem for one in students for problem in one.problems} == {"3 submissions have this name."}


def test_files_beside_a_notebook_are_copied_but_no_links_and_no_other_notebooks(tmp_path):
    book = notebook(tmp_path / "class" / "Ann" / "04_linear.ipynb")
    for name in ("helper.py", "data/x.csv", ".hidden"):
        (book.parent / name).parent.mkdir(exist_ok=True)
        (book.parent / name).write_text(name)
    notebook(book.parent / "00_why.ipynb", "0.1")
    (book.parent / "link.py").symlink_to(book)
    (student,) = find_students(tmp_path / "class", CHAPTERS, None, tmp_path / "out")
    assert student.problems == ["link.py was left out: it is a link, which may lead anywhere."]
    copied = submissions.copy(student.notebooks[4], tmp_path / "copy")
    assert copied == tmp_path / "copy" / "notebook.ipynb"
    names = {str(path.relative_to(tmp_path / "copy")) for path in (tmp_path / "copy").rglob("*") if path.is_file()}
    assert names == {"notebook.ipynb", "helper.py", "data/x.csv"}
    (book.parent / "helper.py").write_text("changed")
    assert submissions.copy(student.notebooks[4], tmp_path / "again") is None


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
    report.write(
        tmp_path, graded(submissions.printable(EVIL[:-1])), {4: {"4.1": EVIL, "4.2": "Two", "4.3": "3"}}, [EVIL]
    )
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


def test_page_of_a_student_who_has_left_goes(tmp_path):
    report.write(tmp_path, graded("Ann") + graded("Ben"), {4: {}}, [])
    report.write(tmp_path, graded("Ben"), {4: {}}, [])
    assert [path.name[:3] for path in (tmp_path / "students").iterdir()] == ["ben"]


# What is checked again


def test_store(tmp_path):
    store = Store(tmp_path)
    outcome = Outcome([Verdict("4.1", "x", "passed")], ["note"], {"4.1": "code"}, ended="why")
    store.start("a")
    assert (store.tries("a"), store.load("a")) == (1, None)
    store.save("a", outcome)
    assert (store.tries("a"), store.load("a")) == (0, outcome)
    for text in ("", "[]", "{}", '{"verdicts": [1]}', "[" * 100_000, '{"verdicts": [], "more": 1}'):
        (tmp_path / "outcomes" / "a.json").write_text(text)
        assert store.load("a") is None


def test_checks_hash_knows_the_solution_and_the_limits(tmp_path):
    tiny.make_unexecuted(tmp_path, tiny.source(1))
    files = all_chapters(course_at(tmp_path))[90]
    usual = limits.Limits(1, 2, 3, 4, 5)
    before = checks_hash(files, usual)
    assert checks_hash(files, usual) == before
    assert checks_hash(files, limits.Limits(1, 2, 3, 4, 6)) != before
    files.reference.write_text(files.reference.read_text() + " ")
    assert checks_hash(files, usual) != before


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny.make_unexecuted(folder, tiny.source(1))
    return folder


def command(root: Path, folder: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "tplab", "grade", str(folder), "--root", str(root), "--jobs", "1", *more]


def submit(root: Path, folder: Path, name: str, body: str) -> None:
    folder.mkdir(exist_ok=True)
    mine = tiny.Learner(root / "chapters" / "90_tiny.ipynb")
    mine.answer(1, body)
    mine.save(folder / f"{name}.ipynb")


@pytest.mark.slow
def test_only_what_is_new_is_checked_and_a_kill_costs_only_what_ran(root, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(root))
    folder, outcomes = tmp_path / "class", tmp_path / "class-grades" / "outcomes"
    submit(root, folder, "a", "return x + x")
    submit(root, folder, "b", "import time; time.sleep(60)")
    with open(tmp_path / "said", "w") as said:
        process = subprocess.Popen(command(root, folder), stdout=said, start_new_session=True)
    until(lambda: list(outcomes.glob("*.json")) and list(outcomes.glob("*.started")))
    process.kill()
    process.wait()
    until(lambda: not [left for left in a_class.left_behind() if not os.path.exists(left)])  # only the folder
    submit(root, folder, "b", "import time; time.sleep(60)")
    submit(root, folder, "c", "return 5")
    with open(tmp_path / "said", "w") as said:
        process = subprocess.Popen(command(root, folder), stdout=said, start_new_session=True)
    until(lambda: len(list(outcomes.glob("*.json"))) == 2)  # c is before b, which ran when it was killed
    until(lambda: [path.read_text() for path in outcomes.glob("*.started")] == ["xx"])
    process.kill()
    process.wait()
    done = subprocess.run(command(root, folder), capture_output=True, text=True)
    assert "3 notebooks were checked before, and 0 are to be checked." in done.stdout
    assert done.returncode == 1
    rows = list(csv.DictReader(io.StringIO((outcomes.parent / "grades.csv").read_text("utf-8-sig"))))
    assert [row["90.1"] for row in rows] == ["passed", "not run", "failed"]
    assert "was killed 2 times while it checked this notebook" in rows[1]["remarks"]


@pytest.mark.slow
def test_ctrl_c_ends_all_and_counts_against_nobody(root, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(root))
    folder, outcomes = tmp_path / "class", tmp_path / "class-grades" / "outcomes"
    submit(root, folder, "b", "import time; time.sleep(60)")
    process = subprocess.Popen(
        command(root, folder), stdout=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )  # fmt: skip
    until(lambda: list(outcomes.glob("*.started")) and a_class.left_behind())
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=150)[0]  # more than the answer sleeps
    assert process.returncode == 130
    assert said.endswith("Stopped. To go on, run the same command again.\n")
    assert list(outcomes.iterdir()) == []
    assert a_class.left_behind() == []


def until(true, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.1)


# Misuse, and what no exercise needs


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere"], "There is no folder nowhere. It should hold one notebook or one folder per student."),
        (["empty"], "is empty. It should hold one notebook or one folder per student."),
        (["class", "--chapter", "17"], "There is no chapter 17. There are: 90."),
        (["class", "--out", "class"], "can't go into class itself"),
        (["class", "--out", "other"], "holds files that aren't from tplab grade"),
        (["class", "--memory", "0"], "--memory 0 can't be. Give a number above 0."),
        (["class", "--cell-timeout", "nan"], "--cell-timeout nan can't be."),
    ],
)
def test_misuse_is_told_in_a_sentence(root, tmp_path, monkeypatch, capsys, arguments, says):
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "class", "other"):
        Path(name).mkdir()
    Path("other", "thesis.txt").touch()
    submit(root, Path("class"), "a", "return 2 * x")
    assert cli.main(["grade", *arguments, "--root", str(root)]) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_two_do_not_write_to_one_folder(root, tmp_path, capsys):
    submit(root, tmp_path / "class", "a", "return 2 * x")
    (tmp_path / "class-grades" / "outcomes").mkdir(parents=True)
    with FileLock(tmp_path / "class-grades" / "lock"):
        assert cli.main(["grade", str(tmp_path / "class"), "--root", str(root)]) == 2
    assert "Another tplab grade is writing to" in capsys.readouterr().err


def test_folder_that_can_not_be_written_is_told(root, tmp_path, capsys):
    submit(root, tmp_path / "class", "a", "return 2 * x")
    (tmp_path / "file").touch()
    assert (
        cli.main(["grade", str(tmp_path / "class"), "--out", str(tmp_path / "file" / "out"), "--root", str(root)]) == 2
    )
    assert "Grading had to stop: Not a directory" in capsys.readouterr().err


def test_help_says_what_is_accepted(capsys):
    with pytest.raises(SystemExit):
        cli.main(["grade", "--help"])
    out = capsys.readouterr().out
    assert "Ann_04_parallel_linear.ipynb" in out
    assert "This isn't a container." in out


def test_no_right_answer_is_suspicious():
    """The words that a teacher is told to look at occur in no solution of the course."""
    for files in all_chapters(course_at(ROOT)).values():
        reference = read_notebook(files.reference)
        assert worker.suspicious(worker.merge(reference, reference).pieces) == [], files.stem


def test_environment_is_scrubbed(monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("SSH_AUTH_SOCK", "secret")
    kept = limits.environment(tmp_path)
    assert "secret" not in kept.values()
    assert (kept["HOME"], kept["TMPDIR"]) == (str(tmp_path / "home"), str(tmp_path / "tmp"))


def test_folder_that_resists_is_removed(tmp_path):
    deep = os.open(tmp_path, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=deep)
        below = os.open("d", os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = below
    os.close(deep)
    jobs.remove(tmp_path / "d")
    left = (tmp_path / "d").exists()
    subprocess.run(["rm", "-rf", str(tmp_path / "d")], check=True)  # pytest's own cleaning would fail
    assert not left
