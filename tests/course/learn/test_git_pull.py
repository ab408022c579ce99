"""`git pull` works whatever the learner has edited, and `tplab update` then brings the new chapters in."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests import ROOT
from tests.course import tiny
from tplab.course.learn import start
from tplab.course.learn.course_files import Course
from tplab.course.notebooks.cells import read_notebook

NAME = "90_tiny.ipynb"


def git(folder: Path, *arguments: str) -> str:
    options = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=main"]
    done = subprocess.run(["git", *options, *arguments], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def publish(origin: Path, text: str) -> None:
    shutil.rmtree(origin / "chapters", ignore_errors=True)
    tiny.make_unexecuted(origin, text)
    git(origin, "add", "--all")
    git(origin, "commit", "--quiet", "--message", "a version")


def edit(folder: Path) -> None:
    """Whatever a learner may do to a notebook, and beside it."""
    made = tiny.Learner(folder / NAME)
    made.answer(1, "return x + x  # my answer")
    made.insert(2, "note = 1  # my note")
    cell = next(cell for cell in made.cells if "a given cell" in "".join(cell["source"]))
    cell["source"] = 'print("a given cell")  # my change'
    made.cell("check-90-1").update(outputs=[], execution_count=3)
    del made.cells[made.place("check-90-2")]
    made.save(folder / NAME)
    (folder / "helpers.py").write_text("x = 1  # mine")
    shutil.copy(folder / NAME, folder / "scratch.ipynb")


@pytest.mark.parametrize("where", ["my_course", "chapters, before the first start"])
def test_git_pull_and_update(where, tmp_path):
    origin, clone = tmp_path / "origin", tmp_path / "clone"
    origin.mkdir()
    git(origin, "init", "--quiet")
    shutil.copy(ROOT / ".gitignore", origin)
    publish(origin, tiny.source(2))
    git(tmp_path, "clone", "--quiet", str(origin), str(clone))
    course = Course(clone, clone / "my_course")
    if where == "my_course":
        start.start(course)
        edit(course.folder)
    else:
        edit(clone / "chapters")
        start.start(course)
    assert git(clone, "status", "--porcelain") == ""
    publish(origin, tiny.source(3).replace("a given cell", "another given cell"))
    git(clone, "pull", "--quiet")
    start.update(course)
    assert git(clone, "status", "--porcelain") == ""
    cells = "\n".join(cell.source for cell in read_notebook(course.folder / NAME))
    for text in ("another given cell", "exercise 90.3", "# my answer", "# my note", "# my change"):
        assert text in cells
    assert "# mine" in (course.folder / "helpers.py").read_text()
    assert (course.folder / "scratch.ipynb").exists()
