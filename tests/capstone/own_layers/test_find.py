"""The learner's layers, read from their library: `tplab.capstone.own_layers.find`."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests import ROOT
from tests.capstone.a_few_steps import SMALL
from tests.capstone.own_layers.libraries import Libraries, solution
from tplab.capstone.own_layers.find import NotReady, find_answers
from tplab.course.learn import library
from tplab.course.learn.course_files import Course, all_chapters
from tplab.course.learn.my_tp import FOR_A_GPT
from tplab.course.learn.start import start

MINE = solution("5.2").replace("    def forward(", "    # as I understand it\n    def forward(")


@pytest.fixture(scope="module")
def libraries(tmp_path_factory) -> Libraries:
    return Libraries(tmp_path_factory.mktemp("libraries"))


@pytest.fixture(scope="module")
def blank(tmp_path_factory) -> Course:
    course = Course(ROOT, tmp_path_factory.mktemp("blank") / "my_course")
    start(course)
    return course


@pytest.fixture
def started(blank, tmp_path) -> Course:
    """A learner's folder with blank chapters and an empty library."""
    return Course(ROOT, Path(shutil.copytree(blank.folder, tmp_path / "my_course")))


def forget(course: Course, *exercises: str) -> None:
    """Take answers out of a library."""
    path = course.memory / library.STORE
    stored = json.loads(path.read_text())
    for exercise in exercises:
        del stored["exercises"][exercise]
    path.write_text(json.dumps(stored))
    library.write(course, library.load(course))


def rewrite(course: Course, exercise: str, source: str) -> None:
    """Write an answer into the learner's notebook."""
    path = all_chapters(course)[int(exercise.partition(".")[0])].learner
    notebook = json.loads(path.read_text())
    cell = next(cell for cell in notebook["cells"] if cell["metadata"].get("tplab", {}).get("exercise") == exercise)
    cell["source"] = source
    path.write_text(json.dumps(notebook))


def test_what_is_in_the_library_is_the_learners_unless_it_was_copied(libraries):
    course = libraries.course({"5.2": MINE})
    answers = find_answers(course.folder)
    assert set(answers.whose) == set(FOR_A_GPT)
    assert {exercise for exercise, whose in answers.whose.items() if whose == "yours"} == {"5.2"}
    assert answers.checked["5.2"].startswith("passed on 20")
    counted = {exercise: count for exercise, count in answers.lines.items() if exercise in ("8.1", "8.2", "8.3")}
    (module,) = (one for one in library.modules(course) if one.chapter == 8)
    assert sum(counted.values()) == module.lines
    for name, text in answers.files.items():
        assert (course.folder / library.PACKAGE / name).read_text() == text, "the files are those of the package"
    assert "# as I understand it" in answers.files["mlp.py"]
    assert not any("import tplab" in text or "from tplab" in text for text in answers.files.values())


def test_a_blank_course_lists_all_that_is_to_do_and_the_command(started):
    with pytest.raises(NotReady) as error:
        find_answers(started.folder)
    for exercise in FOR_A_GPT:
        assert f"  {exercise} " in str(error.value)
    assert "tplab check 3 4 5 6 7 8 10 14" in str(error.value)
    assert "ColumnParallelLinear: isn't written yet" in str(error.value)


def test_the_courses_solutions_train_where_one_says_so(started, libraries):
    answers, right = find_answers(started.folder, missing="tplab"), libraries.answers()
    code = {
        name: [line for line in text.splitlines() if not line.startswith("# Exercise")]
        for name, text in right.files.items()
    }
    for name, text in answers.files.items():
        assert [line for line in text.splitlines() if not line.startswith("# Exercise")] == code[name]
    assert set(answers.whose.values()) == {"the course's solution"}
    assert answers.checked["5.2"] == "in place of one that isn't written yet"


def test_what_is_written_but_has_not_passed_is_named_and_not_trained_with(started):
    rewrite(started, "5.2", MINE)
    with pytest.raises(NotReady, match=r"  5\.2   ParallelMLP: hasn't passed its check\n"):
        find_answers(started.folder)
    answers = find_answers(started.folder, missing="tplab")
    assert answers.whose["5.2"] == "the course's solution"
    assert "as I understand it" not in answers.files["mlp.py"]


HALF = ("3.2", "3.3", "4.1", "4.2", "5.2", "6.2")


@pytest.fixture
def half(started, libraries) -> Course:
    """A learner's folder with blank notebooks, and a library that ends with chapter 6. 5.2 is in their own words."""
    course = libraries.course({"5.2": MINE})
    shutil.copytree(started.folder, course.folder, dirs_exist_ok=True, ignore=lambda folder, names: [library.STORE])
    forget(course, *(exercise for exercise in FOR_A_GPT if exercise not in HALF))
    return course


def test_half_of_the_answers_train_and_it_is_said_which(half, capsys):
    rewrite(half, "8.3", solution("8.3") + "\n# not checked yet\n")
    answers = find_answers(half.folder, SMALL)
    rest = [exercise for exercise in FOR_A_GPT if exercise not in (*HALF, "8.3")]
    assert {exercise for exercise, whose in answers.whose.items() if whose == "yours"} == {"5.2"}
    assert all(answers.checked[exercise] == "in place of one that isn't written yet" for exercise in rest)
    assert "# as I understand it" in answers.files["mlp.py"]
    told = capsys.readouterr().out.splitlines()[-1]
    assert told.startswith(f"1 of the {len(answers.whose)} answers is yours: 5.2. ")
    copied = ", ".join(exercise for exercise in HALF[:-1] if exercise != "5.2")
    assert f"Your library has the course's solutions for {copied} and 6.2." in told
    missing = f"{', '.join(rest[:-1])} and {rest[-1]}"
    assert f"For {missing}, the course's solution is used, because your own answer isn't written yet." in told
    assert "For 8.3, the course's solution is used, because your own answer hasn't passed its check." in told
    with pytest.raises(NotReady, match="--missing tplab") as error:
        find_answers(half.folder, replace(SMALL, missing="error"))
    named = [line for line in str(error.value).splitlines() if line.startswith("  ")]
    assert len(named) == len(rest) + 1


def test_a_newer_answer_in_the_notebook_is_said(started, libraries, capsys):
    course = libraries.course({})
    shutil.copytree(started.folder, course.folder, dirs_exist_ok=True, ignore=lambda folder, names: [library.STORE])
    library.write(course, library.load(course))
    rewrite(course, "5.2", MINE)
    find_answers(course.folder, SMALL)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" on ")[0] for line in lines if "5.2" in line.split()] == ["You changed 5.2 after it passed"]


def test_a_package_edited_by_hand_is_refused(libraries):
    course = libraries.course({})
    path = course.folder / library.PACKAGE / "linear.py"
    path.write_text(path.read_text() + "\nmore = 1\n")
    with pytest.raises(NotReady, match=r"linear.py in .*my_tp was edited after the check"):
        find_answers(course.folder)


def test_the_library_is_found_from_every_folder_of_the_course(libraries, monkeypatch, tmp_path):
    shutil.copytree(libraries.base.folder, tmp_path / "my_course")
    (tmp_path / "chapters").mkdir()
    wanted = find_answers(tmp_path / "my_course", SMALL)
    for folder, name in (
        (tmp_path, "."),
        (tmp_path, "chapters"),
        (tmp_path / "my_course", "."),
        (tmp_path, "my_course"),
    ):
        monkeypatch.chdir(folder)
        assert find_answers(name, SMALL) == wanted


def test_a_folder_that_is_not_there_or_a_notebook_that_cannot_be_read_is_said(started):
    with pytest.raises(FileNotFoundError, match="there's no folder nowhere with your notebooks"):
        find_answers("nowhere")
    all_chapters(started)[4].learner.write_text("<<<<<<< HEAD")
    with pytest.raises(NotReady, match=r"4\.1 .*can't be read.*git merge"):
        find_answers(started.folder)
