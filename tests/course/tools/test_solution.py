"""`tplab solution`: the explained answer, after a question, and no file is touched."""

import ast
from unittest import mock

import pytest

from tests import ROOT
from tests.course import tiny
from tplab.course.grade.check_notebook import exercises_of
from tplab.course.learner.course_files import all_chapters, course_at
from tplab.course.notebooks.cells import read_notebook
from tplab.course.notebooks.rewrite import keep_solution
from tplab.course.tools import cli
from tplab.course.tools import confirm as asking
from tplab.course.tools.solution import exercise_source, without_docstrings

CHAPTERS = all_chapters(course_at(ROOT))


@pytest.fixture
def root(tmp_path):
    tiny.make_unexecuted(tmp_path, tiny.source(2))
    return tmp_path


def run(root, *arguments: str) -> int:
    return cli.main(["solution", "--root", str(root), *arguments])


def files(root) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_answer_its_hints_and_what_its_check_says(root, capsys):
    before = files(root)
    assert run(root, "90.2", "--yes") == 0
    out = capsys.readouterr().out
    assert "Exercise 90.2 · Double 2" in out
    assert "def double_2(x):\n    return 2 * x\n" in out
    assert "SOLUTION" not in out
    assert "to itself" in out
    assert "Exercise 90.2 passed: double_2" in out
    assert "double_1" not in out
    assert files(root) == before


def test_it_asks_first_and_without_anyone_to_ask_shows_nothing(root, monkeypatch, capsys):
    monkeypatch.setattr(asking.sys.stdin, "isatty", lambda: True, raising=False)
    for answer, shown in (("y", True), ("Yes ", True), ("", False), ("n", False), ("ye", False), (EOFError, False)):
        monkeypatch.setattr("builtins.input", mock.Mock(side_effect=[answer]))
        assert run(root, "90.1") == 0
        out = capsys.readouterr().out
        assert "tplab hint 90.1" in " ".join(out.split())
        assert ("return 2 * x" in out) == shown
    monkeypatch.setattr(asking.sys.stdin, "isatty", lambda: False, raising=False)
    assert run(root, "90.1") == 2
    said = capsys.readouterr()
    assert "add --yes" in " ".join(said.err.split())
    assert "return" not in said.out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["90.3"], "There are: 90.1, 90.2."),
        (["17.1"], "There are: 90."),
        (["90"], "tplab solution 4.2"),
        (["90.a"], "tplab solution 4.2"),
        (["90.1"], "The answers are in"),
    ],
)
def test_misuse_is_told_in_a_sentence(arguments, says, root, capsys):
    (root / "solutions" / "90_tiny.py").unlink()
    assert run(root, *arguments, "--yes") == 2
    assert says in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("number", CHAPTERS)
def test_every_answer_of_the_course_is_found_and_is_code(number):
    """The source is read here without jupytext; the notebook was made with it."""
    chapter = CHAPTERS[number]
    reference = read_notebook(chapter.reference)
    executed = {cell.marks["exercise"]: cell.source for cell in reference if "exercise" in cell.marks}
    assert list(executed) == list(exercises_of(reference))
    for exercise, source in executed.items():
        text = exercise_source(chapter.source, exercise)
        assert keep_solution(text) == source
        code, answer = without_docstrings(text)
        assert [node.name for node in ast.parse(code).body if hasattr(node, "name")] == [
            node.name for node in ast.parse(source).body if hasattr(node, "name")
        ]
        assert answer


MARKED = '''def f(x):
    """What it does.

    And more.
    """

    y = x
    ### BEGIN SOLUTION
    z = "a"

    ### END SOLUTION
    return z


class C:
    """Only a docstring."""
'''


def test_docstrings_go_and_the_answers_own_lines_are_known():
    code, answer = without_docstrings(MARKED)
    assert code.split("\n")[:5] == ["def f(x):", "    y = x", '    z = "a"', "", "    return z"]
    assert answer == {3, 4}
    assert '"""Only a docstring."""' in code
