"""`tplab reset`: the first state comes back, and nothing that the learner wrote is lost."""

import json
import os
import time

import nbformat
import pytest

from tests.course import tiny
from tests.course.grade.test_check_command import UNREADABLE
from tplab.course.tools import cli, reset
from tplab.course.tools import confirm as asking

ANSWER = "return 2 * x  # mine"


@pytest.fixture
def root(tmp_path):
    tiny.make_unexecuted(tmp_path, tiny.source(3))
    return tmp_path


@pytest.fixture
def path(root):
    return root / "chapters" / "90_tiny.ipynb"


@pytest.fixture
def first(path):
    """The notebook as the course gives it."""
    return path.read_bytes()


@pytest.fixture
def learner(path, first):
    """Exercises 90.1 and 90.2 are answered, 90.1 was checked, and a cell of the learner's own stands between them."""
    made = tiny.Learner(path)
    made.answer(1, ANSWER)
    made.answer(2, ANSWER)
    made.cell("check-90-1").update(outputs=[], execution_count=None)
    made.insert(made.place("exercise-90-2"), "mine = 3", id="mine")
    made.content["metadata"]["colour"] = "grün"
    made.save(path)
    return made


def run(root, *arguments: str) -> int:
    return cli.main(["reset", "--root", str(root), *arguments])


def kept(root) -> list[bytes]:
    return [path.read_bytes() for path in sorted((root / "chapters" / "kept").glob("*"))]


def cells(path) -> dict[str, dict]:
    return {cell.get("id"): cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]}


# A chapter


def test_chapter_comes_back_and_the_notebook_is_kept_by_date(root, path, first, learner, capsys):
    before = path.read_bytes()
    assert run(root, "90", "--yes") == 0
    assert path.read_bytes() == first
    assert kept(root) == [before]
    name = next((root / "chapters" / "kept").iterdir()).name
    assert time.strptime(name, "90_tiny-%Y-%m-%d-%H%M%S.ipynb")
    assert f"kept/{name}" in capsys.readouterr().out


def test_two_copies_of_one_second_are_both_kept(root, path, learner, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda *_: "2026-11-21-101500")
    contents = []
    for answer in ("one", "two", "three"):
        learner.answer(1, f"return {answer!r}")
        contents.append(learner.save(path).read_bytes())
        assert run(root, "90", "--yes") == 0
    assert sorted(kept(root)) == sorted(contents)


@pytest.mark.parametrize("name", UNREADABLE)
def test_unreadable_chapter_is_reset_and_kept(name, root, path, first, capsys):
    content, _ = UNREADABLE[name]
    path.write_bytes(content)
    assert run(root, "90", "--yes") == 0
    assert path.read_bytes() == first
    assert kept(root) == [content]


def test_missing_chapter_comes_back(root, path, first):
    path.unlink()
    assert run(root, "90", "--yes") == 0
    assert path.read_bytes() == first
    assert kept(root) == []


def test_first_state_needs_no_change(root, path, first, capsys):
    assert run(root, "90", "--yes") == 0
    assert "nothing to reset" in capsys.readouterr().out
    assert kept(root) == []


@pytest.mark.parametrize(("answer", "happens"), [("y", True), ("yes", True), ("", False), ("n", False), ("ye", False)])
def test_it_asks_first(answer, happens, root, path, first, learner, monkeypatch, capsys):
    monkeypatch.setattr(asking.sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda: answer)
    before = path.read_bytes()
    assert run(root, "90") == 0
    assert "Reset chapter 90? Your notebook is kept in kept/. [y/N]" in capsys.readouterr().out
    assert path.read_bytes() == (first if happens else before)
    assert kept(root) == ([before] if happens else [])


def test_without_anyone_to_ask_it_wants_yes(root, path, learner, capsys, monkeypatch):
    monkeypatch.setattr(asking.sys.stdin, "isatty", lambda: False, raising=False)
    before = path.read_bytes()
    assert run(root, "90") == 2
    assert "add --yes" in " ".join(capsys.readouterr().err.split())
    assert path.read_bytes() == before


def test_what_is_saved_while_it_asks_is_what_is_kept(root, path, first, learner, monkeypatch):
    def answer_late():
        learner.answer(1, "return 'saved meanwhile'")
        learner.save(path)
        return "y"

    monkeypatch.setattr(asking.sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", answer_late)
    assert run(root, "90") == 0
    assert path.read_bytes() == first
    assert b"saved meanwhile" in kept(root)[0]


@pytest.mark.parametrize("step", ["keep", "replace"])
def test_a_full_disk_costs_nothing(step, root, path, learner, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device", "somewhere")

    before = path.read_bytes()
    monkeypatch.setattr(reset, step, full)
    assert run(root, "90", "--yes") == 2
    assert "was not changed: No space left on device" in " ".join(capsys.readouterr().err.split())
    assert path.read_bytes() == before


def test_a_link_stays_a_link(root, path, first, learner):
    elsewhere = path.rename(root / "elsewhere.ipynb")
    os.symlink(elsewhere, path)
    assert run(root, "90", "--yes") == 0
    assert path.is_symlink()
    assert elsewhere.read_bytes() == first


@pytest.mark.parametrize("spoil", ["gone", "other cells"])
def test_a_course_that_does_not_fit_together_is_refused(spoil, root, path, learner, capsys):
    before = path.read_bytes()
    solution = root / "solutions" / "90_tiny"
    if spoil == "gone":
        solution.with_suffix(".py").unlink()
    else:
        tiny.write(root, tiny.source(2))
    assert run(root, "90", "--yes") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert ("git pull" if spoil == "gone" else "Build it: tplab build 90") in said
    assert path.read_bytes() == before
    assert kept(root) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "tplab reset 4, or tplab reset --exercise 4.2"),
        (["90", "--exercise", "90.1"], "Say what to begin anew"),
        (["17"], "There is no chapter 17. There are: 90."),
        (["--exercise", "90.9"], "There is no exercise 90.9 in chapter"),
        (["--exercise", "four"], "tplab reset --exercise 4.2"),
    ],
)
def test_misuse_is_told_in_a_sentence(arguments, says, root, learner, path, capsys):
    before = path.read_bytes()
    assert run(root, *arguments, "--yes") == 2
    assert says in " ".join(capsys.readouterr().err.split())
    assert path.read_bytes() == before


# An exercise


def test_exercise_comes_back_and_every_other_cell_stays(root, path, first, learner):
    before, pristine = path.read_bytes(), {cell["id"]: cell for cell in json.loads(first)["cells"]}
    assert run(root, "--exercise", "90.1", "--yes") == 0
    assert kept(root) == [before]
    after = json.loads(path.read_text(encoding="utf-8"))
    for old, new in zip(json.loads(before)["cells"], after["cells"], strict=True):
        assert new == (pristine[old["id"]] if old["id"] in ("exercise-90-1", "check-90-1") else old)
    assert after["metadata"]["colour"] == "grün"
    assert "grün" in path.read_text(encoding="utf-8")
    nbformat.validate(after)


def cell_gone(mine):
    del mine.cells[mine.place("exercise-90-2")]


def both_gone(mine):
    del mine.cells[mine.place("exercise-90-2")], mine.cells[mine.place("check-90-2")]


def turned_into_text(mine):
    mine.cell("exercise-90-2")["cell_type"] = "markdown"


def split(mine):
    mine.insert(mine.place("exercise-90-2") + 1, "def double_2(x):\n    return x + x")


def doubled(mine):
    mine.insert(mine.place("exercise-90-2") + 1, "def double_2(x):\n    return x + x", id="exercise-90-2")


def lost_ids(mine):
    for cell in mine.cells:
        del cell["id"]
    mine.content["nbformat_minor"] = 4


def check_edited(mine):
    mine.cell("check-90-2")["source"] = "'passed'"


def check_twice(mine):
    mine.insert(mine.place("check-90-2") + 1, 'check("90.2", double_2)')


@pytest.mark.parametrize(
    "spoil", [cell_gone, both_gone, turned_into_text, split, doubled, lost_ids, check_edited, check_twice]
)
def test_exercise_comes_back_whatever_became_of_its_cells(spoil, root, path, first, learner):
    spoil(learner)
    before = learner.save(path).read_bytes()
    assert run(root, "--exercise", "90.2", "--yes") == 0
    assert kept(root) == [before]
    notebook = json.loads(path.read_text(encoding="utf-8"))
    nbformat.validate(notebook)
    sources = ["".join(cell["source"]) for cell in notebook["cells"]]
    pristine = ["".join(cell["source"]) for cell in json.loads(first)["cells"]]
    assert [source for source in sources if source != "mine = 3" and ANSWER not in source] == [
        source for source in pristine if "double_1(x)" not in source
    ]
    assert "mine = 3" in sources


@pytest.mark.parametrize("name", UNREADABLE)
def test_exercise_of_an_unreadable_notebook_is_refused(name, root, path, capsys):
    content, says = UNREADABLE[name]
    path.write_bytes(content)
    assert run(root, "--exercise", "90.1", "--yes") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert says in said
    assert "tplab reset 90 (it keeps a copy of the file)" in said
    assert path.read_bytes() == content
    assert kept(root) == []
