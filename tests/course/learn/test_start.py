"""`tplab start` and `tplab update` on a real folder: what they make, what they move, and that a kill loses nothing."""

import re
import shutil
from pathlib import Path

import pytest

from tests import ROOT, saying
from tests.course import tiny
from tplab.course.commands import cli
from tplab.course.learn import start
from tplab.course.learn.course_files import OWN, Course, find_course
from tplab.course.notebooks.cells import read_notebook

ANSWER = "return x + x  # mine"
NAME = "90_tiny.ipynb"


@pytest.fixture
def course(root):
    return Course(root, root / "my_course")


def pull(root: Path, text: str) -> None:
    """Another version of the course, as `git pull` brings it."""
    shutil.rmtree(root / "chapters")
    tiny.make_unexecuted(root, text)


def answer(path: Path, body: str = ANSWER, k: int = 1) -> bytes:
    made = tiny.Learner(path)
    made.answer(k, body)
    made.save(path)
    return path.read_bytes()


def text(path: Path) -> str:
    return "\n".join(cell.source for cell in read_notebook(path))


def everything(root: Path) -> dict[str, bytes]:
    """Every file below a folder, without the dates in names and contents."""
    found = {}
    for path in (path for path in root.rglob("*") if path.is_file()):
        name, data = str(path.relative_to(root)), path.read_bytes()
        if not name.endswith((".lock", "course.json")):
            found[f"kept/{path.name[:7]}{hash(data)}" if "kept" in name else name] = data
    return found


def test_it_copies_the_chapters_and_a_second_start_brings_back_only_what_is_missing(root, course, monkeypatch, capsys):
    monkeypatch.chdir(root)
    assert cli.main(["start"]) == 0
    assert (course.folder / NAME).read_bytes() == (root / "chapters" / NAME).read_bytes()
    assert re.search(saying("1 notebook", "cd my_course && tplab lab"), capsys.readouterr().out)
    mine = answer(course.folder / NAME)
    assert start.start(course) == start.Report()
    assert (course.folder / NAME).read_bytes() == mine
    (course.folder / NAME).unlink()
    assert start.start(course).new == [NAME]


def test_a_page_is_brought_up_to_date_until_the_learner_changes_it_and_comes_back_if_it_is_deleted(course):
    shared, mine = course.material / "chapters" / "AGENTS.md", course.folder / "AGENTS.md"
    seen = []
    for version, edit in (("first", ""), ("second", "third"), ("third", ""), ("fourth", "theirs"), ("fifth", "")):
        shared.write_text(version)
        start.start(course)
        seen.append(mine.read_text())
        if edit:  # "third": the copying was killed halfway, so the page is there, and its base isn't
            mine.write_text(edit)
    assert seen == ["first", "second", "third", "fourth", "theirs"]
    mine.unlink()
    start.start(course)
    assert mine.read_text() == "fifth"


def test_a_renamed_notebook_is_found_and_not_made_again(course):
    start.start(course)
    mine = answer(course.folder / NAME)
    (course.folder / NAME).rename(course.folder / "tiny, my way.ipynb")
    assert start.start(course).new == []
    pull(course.material, tiny.source(3).replace("a given cell", "another given cell"))
    assert list(start.update(course).updated) == ["tiny, my way.ipynb"]
    assert ANSWER in text(course.folder / "tiny, my way.ipynb")
    assert "another given cell" in text(course.folder / "tiny, my way.ipynb")
    assert mine in [path.read_bytes() for path in (course.folder / "kept").iterdir()]


def test_a_page_that_the_course_has_renamed_is_renamed_with_the_answers_in_it(course, monkeypatch):
    monkeypatch.setattr(start, "RENAMED", {"tiny.ipynb": NAME, "another.ipynb": "91_another.ipynb"})
    now, before = course.folder / NAME, course.folder / "tiny.ipynb"
    start.start(course)
    mine = answer(now)
    now.rename(before)
    report = start.update(course)
    assert (report.new, report.updated, len(report.moved)) == ([], {}, 1)
    assert now.read_bytes() == mine

    before.write_bytes(mine)  # a tab that was still open has saved it again
    (told,) = start.update(course).moved
    assert NAME in told
    assert "tiny.ipynb" in told
    before.write_text("a damaged notebook")
    assert start.start(course).moved == []
    assert (now.read_bytes(), before.read_text()) == (mine, "a damaged notebook")


def test_a_folder_that_is_none_of_the_learners_is_refused(root, monkeypatch, capsys):
    monkeypatch.chdir(root)
    (root / "notes").write_text("")
    for name, keyword in (("chapters", "belongs"), ("solutions", "belongs"), ("notes", "file")):
        assert cli.main(["start", name]) == 2
        assert re.search(saying(name, keyword), capsys.readouterr().err)


def test_commands_find_the_folder_from_inside_it_and_from_the_repository_and_nowhere_else(
    course, tmp_path_factory, monkeypatch, capsys
):
    start.start(course)
    (course.folder / "deeper").mkdir()
    for place in (course.material, course.folder, course.folder / "deeper"):
        assert find_course(place) == course
    monkeypatch.chdir(course.folder)
    assert cli.main(["update", "--root", "nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert cli.main(["update"]) == 2
    assert "tplab start" in capsys.readouterr().err


# What was done in chapters/ before


def test_work_in_chapters_moves_over_and_chapters_is_as_git_has_it(root, course):
    pristine_bytes = (root / "chapters" / NAME).read_bytes()
    before = answer(root / "chapters" / NAME)
    (root / "chapters" / "helpers.py").write_text("x = 1")
    report = start.start(course)
    assert (root / "chapters" / NAME).read_bytes() == pristine_bytes
    assert ANSWER in text(course.folder / NAME)
    assert before in [path.read_bytes() for path in (course.folder / "kept").glob("90*")]
    assert (root / "chapters" / "helpers.py").read_text() == "x = 1"
    (told,) = report.moved
    assert re.search(saying(f"chapters/{NAME}", NAME, start.OTHERS), told)
    assert start.start(course) == start.Report()


def test_of_work_in_both_places_the_learners_notebook_stays_and_the_other_is_kept(root, course):
    start.start(course)
    here = answer(course.folder / NAME, "return 2 * x  # here")
    there = answer(root / "chapters" / NAME, "return x + x  # there")
    (told,) = start.start(course).moved
    (copy,) = (course.folder / "kept").iterdir()
    assert f"kept/{copy.name}" in told
    assert (copy.read_bytes(), (course.folder / NAME).read_bytes()) == (there, here)
    assert start.start(course) == start.Report()


def test_an_unreadable_notebook_is_kept_and_told_and_not_updated(root, course, monkeypatch, capsys):
    (root / "chapters" / NAME).write_text("{broken in chapters")
    assert len(start.start(course).problems) == 1
    answer(root / "chapters" / NAME)
    (course.folder / NAME).write_text("{broken in my_course")
    assert len(start.start(course).problems) == 1
    kept = b"\n".join(everything(course.folder).values())
    assert all(text in kept for text in (b"{broken in chapters", ANSWER.encode()))
    assert "raise NotImplementedError" in text(root / "chapters" / NAME)
    pull(course.material, tiny.source(4))
    monkeypatch.chdir(course.folder)
    assert cli.main(["update"]) == 1
    assert re.search(saying(NAME, "JSON", "tplab reset 90"), " ".join(capsys.readouterr().out.split()))
    assert (course.folder / NAME).read_text() == "{broken in my_course"


# Updates


def test_update_keeps_a_dated_copy_and_the_answer_and_may_skip_versions(course, monkeypatch, capsys):
    start.start(course)
    before = answer(course.folder / NAME)
    for version in ("second", "third"):
        pull(course.material, tiny.source(4).replace("a given cell", f"the {version} given cell"))
    monkeypatch.chdir(course.folder)
    assert cli.main(["update"]) == 0
    assert re.search(saying(NAME, "90.1"), capsys.readouterr().out)
    for words in (ANSWER, "exercise 90.4", "the third given cell"):
        assert words in text(course.folder / NAME)
    assert [path.read_bytes() for path in (course.folder / "kept").iterdir()] == [before]
    assert cli.main(["update"]) == 0
    assert re.fullmatch(r"\D+", capsys.readouterr().out), "a sentence that names no notebook"


# Killed at any moment


class Killed(BaseException):
    pass


def killed_at(step: int, monkeypatch: pytest.MonkeyPatch, work) -> bool:
    """Do `work`, and end it before its step-th change on disk. Returns whether it got that far."""
    count = 0

    def counted(function):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count > step:
                raise Killed
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for module, name in [(start, "replace"), (start, "keep")]:
            patch.setattr(module, name, counted(getattr(module, name)))
        patch.setattr(Path, "unlink", counted(Path.unlink))
        try:
            work()
        except Killed:
            return True
    return False


@pytest.mark.parametrize("work", ["start", "update"])
def test_a_kill_at_any_moment_loses_nothing_and_the_next_run_finishes(work, tmp_path, monkeypatch):
    def prepare(root: Path) -> Course:
        root.mkdir()
        tiny.make_unexecuted(root, tiny.source(2))
        course = Course(root, root / "my_course")
        if work == "update":
            start.start(course)
            answer(course.folder / NAME)
            pull(root, tiny.source(3))
        else:
            answer(root / "chapters" / NAME)
        return course

    def do(course: Course) -> None:
        (start.start if work == "start" else start.update)(course)

    whole = prepare(tmp_path / "whole")
    do(whole)
    wanted = everything(whole.folder)
    step = 0
    while True:
        course = prepare(tmp_path / f"killed-{step}")
        if not killed_at(step, monkeypatch, lambda course=course: do(course)):
            break
        kept = b"\n".join(everything(course.material).values())
        assert ANSWER.encode() in kept
        do(course)
        found = everything(course.folder)
        assert found.keys() == wanted.keys(), step
        assert {name for name in found if found[name] != wanted[name]} == set(), step
        assert everything(course.material / "chapters") == everything(whole.material / "chapters")
        step += 1
    assert step > 2


def test_git_ignores_the_learners_folder():
    assert f"/{OWN}/" in (ROOT / ".gitignore").read_text().splitlines()
