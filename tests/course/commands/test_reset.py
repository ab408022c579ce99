"""`tplab reset`: the first state comes back, and nothing that the learner wrote is lost."""

import json
import re
import time

import nbformat
import pytest

from tests import saying
from tests.course import tiny
from tplab.course.commands import cli, reset

ANSWER = "return 2 * x  # mine"


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


# A chapter


def test_chapter_comes_back_and_the_notebook_is_kept_by_date(root, path, first, learner, capsys):
    before = path.read_bytes()
    assert run(root, "90", "--yes") == 0
    assert path.read_bytes() == first
    assert kept(root) == [before]
    name = next((root / "chapters" / "kept").iterdir()).name
    assert time.strptime(name.rpartition("-")[0], "90_tiny-%Y-%m-%d-%H%M%S")
    assert f"kept/{name}" in capsys.readouterr().out


def test_two_copies_of_one_second_are_both_kept(root, path, learner, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda *_: "2026-11-21-101500")
    contents = []
    for answer in ("one", "two", "three"):
        learner.answer(1, f"return {answer!r}")
        contents.append(learner.save(path).read_bytes())
        assert run(root, "90", "--yes") == 0
    assert sorted(kept(root)) == sorted(contents)


def test_a_copy_that_the_learner_edited_stays_and_another_one_is_made(root, path, learner, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda *_: "2026-11-21-101500")
    before = path.read_bytes()
    assert run(root, "90", "--yes") == 0
    (copy,) = (root / "chapters" / "kept").iterdir()
    copy.write_bytes(b"edited")
    for _ in range(2):
        path.write_bytes(before)
        assert run(root, "90", "--yes") == 0
    assert sorted(kept(root)) == sorted([b"edited", before])
    assert copy.read_bytes() == b"edited"


def test_an_unreadable_or_missing_chapter_comes_back(root, path, first, capsys):
    path.write_bytes(b"\xff\xfe")
    assert run(root, "--exercise", "90.1", "--yes") == 2
    assert "tplab reset 90" in " ".join(capsys.readouterr().err.split())
    assert (path.read_bytes(), kept(root)) == (b"\xff\xfe", [])
    assert run(root, "90", "--yes") == 0
    assert (path.read_bytes(), kept(root)) == (first, [b"\xff\xfe"])
    path.unlink()
    assert run(root, "90") == 2
    assert "--yes" in " ".join(capsys.readouterr().err.split()), "there is nothing to keep"
    assert run(root, "90", "--yes") == 0
    assert path.read_bytes() == first
    assert len(kept(root)) == 1


def test_it_keeps_what_is_saved_while_it_asks(root, path, first, learner, monkeypatch):
    def answer_late():
        learner.answer(1, "return 'saved meanwhile'")
        learner.save(path)
        return "y"

    monkeypatch.setattr(reset.sys.stdin, "isatty", lambda: True, raising=False)
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
    assert re.search(saying("No space left on device", "somewhere"), " ".join(capsys.readouterr().err.split()))
    assert path.read_bytes() == before


def test_a_course_that_does_not_fit_together_is_refused(root, path, learner, capsys):
    before = path.read_bytes()
    tiny.write(root, tiny.source(2))
    assert run(root, "90", "--yes") == 2
    assert "make notebooks" in capsys.readouterr().err
    assert path.read_bytes() == before
    assert kept(root) == []


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


@pytest.mark.parametrize("missing", [(), ("exercise-90-1",), ("exercise-90-1", "check-90-1")])
def test_other_exercises_and_own_cells_stay_even_if_a_cell_of_the_exercise_is_missing(missing, root, path, learner):
    learner.cell("check-90-2")["source"] += "  # mine"
    learner.cells.remove(learner.cell("task-90-2"))
    learner.insert(learner.place("exercise-90-1") + 1, "", id="empty")
    learner.cells.insert(1, learner.cells.pop(learner.place("exercise-90-2")))
    for id in missing:
        learner.cells.remove(learner.cell(id))
    others = [cell for cell in learner.cells if cell["id"] not in ("exercise-90-1", "check-90-1")]
    learner.save(path)
    assert run(root, "--exercise", "90.1", "--yes") == 0
    after = tiny.Learner(path)
    assert [cell for cell in after.cells if cell["id"] not in ("exercise-90-1", "check-90-1")] == others
    assert after.place("exercise-90-1") < after.place("check-90-1")


def lost_ids(mine):
    for cell in mine.cells:
        del cell["id"]
    mine.content["nbformat_minor"] = 4


def check_edited_and_twice(mine):
    mine.cell("check-90-2")["source"] = "'passed'"
    mine.insert(mine.place("check-90-2") + 1, 'check("90.2", double_2)')


SECOND = "def double_2(x):\n    return x + x"
SPOILINGS = [
    lambda mine: [mine.cells.pop(mine.place(f"{kind}-90-2")) for kind in ("exercise", "check")],
    lambda mine: mine.cell("exercise-90-2").update(cell_type="markdown"),
    lambda mine: mine.insert(mine.place("exercise-90-2") + 1, SECOND),
    lambda mine: mine.insert(mine.place("exercise-90-2") + 1, SECOND, id="exercise-90-2"),
    lost_ids,
    check_edited_and_twice,
]


@pytest.mark.parametrize("spoil", SPOILINGS)
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


def test_without_anyone_to_ask_nothing_is_reset(root, learner, path, monkeypatch, capsys):
    before = path.read_bytes()
    monkeypatch.setattr(reset.sys.stdin, "isatty", lambda: False, raising=False)
    assert run(root, "90") == 2
    assert "--yes" in " ".join(capsys.readouterr().err.split())
    assert path.read_bytes() == before
