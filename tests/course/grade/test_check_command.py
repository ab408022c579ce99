"""`tplab check` in this process: what counts as an answer, the verdict on it, and what is printed."""

import copy
import json
import os
import re
import shutil
from unittest.mock import Mock

import pytest

from tests import saying
from tests.course.grade import in_process
from tests.course.grade.in_process import verdicts
from tplab.course.commands import cli
from tplab.course.learn.course_files import Course
from tplab.course.learn.start import start
from tplab.course.notebooks.cells import read_notebook
from tplab.course.notebooks.kernels import DIED, STARTS, started

COUNT = 13  # more than there are ways to spoil a notebook


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    with in_process.course(tmp_path_factory.mktemp("tiny"), COUNT) as folder:
        yield folder


def swapped_with_check(mine, k):
    a, b = mine.place(f"exercise-90-{k}"), mine.place(f"check-90-{k}")
    mine.cells[a], mine.cells[b] = mine.cells[b], mine.cells[a]


def stub(k: int) -> str:
    return f'def double_{k}(x):\n    raise NotImplementedError("exercise 90.{k}")'


def answer_in_a_new_cell(mine, k):
    """The stub stays where it is; the answer stands in a cell of the learner's own below it."""
    source = mine.cell(f"exercise-90-{k}")["source"]
    mine.cell(f"exercise-90-{k}")["source"] = stub(k)
    mine.insert(mine.place(f"exercise-90-{k}") + 1, source)


SPOILINGS = {
    "edited check": lambda mine, k: mine.cell(f"check-90-{k}").update(source=f'"Exercise 90.{k} passed: Double {k}"'),
    "deleted check": lambda mine, k: mine.cells.pop(mine.place(f"check-90-{k}")),
    "doubled check": lambda mine, k: mine.insert(mine.place(f"check-90-{k}"), "'passed'", id=f"check-90-{k}"),
    "swapped with check": swapped_with_check,
    "answer in a new cell": answer_in_a_new_cell,
    "experiment below": lambda mine, k: mine.insert(mine.place(f"check-90-{k}") + 1, f"def double_{k}(x): return 0"),
    "stub between answer and check": lambda mine, k: mine.insert(mine.place(f"check-90-{k}"), stub(k)),
    "split": lambda mine, k: mine.insert(mine.place(f"exercise-90-{k}"), "factor = 2", id=f"exercise-90-{k}"),
}


def spoiled(learner, body: str):
    for k, spoil in enumerate(SPOILINGS.values(), 1):
        learner.answer(k, body)
        spoil(learner, k)
    return learner


@pytest.mark.parametrize(("body", "status"), [("return x + 2", "failed"), ("return x + x", "passed")])
def test_however_a_notebook_was_edited_the_answer_alone_decides(root, learner, body, status):
    said, notes = verdicts(root, spoiled(learner, body))
    assert {name: said[str(k)].status for k, name in enumerate(SPOILINGS, 1)} == dict.fromkeys(SPOILINGS, status)
    assert said[str(COUNT)].status == "to do"
    assert [note for note in notes if re.search(r"\b90\.1\b", note)], "the edited check"
    if status == "failed":
        assert all("is 5." in said[str(k)].text for k in range(1, len(SPOILINGS) + 1))


# Notebooks as other programs save them and accidents leave them


def colab(mine):
    """Colab: format 4.0 without ids, and metadata of its own."""
    mine.content |= {"metadata": {"colab": {"provenance": []}}, "nbformat_minor": 0}
    for place, cell in enumerate(mine.cells):
        del cell["id"]
        cell["metadata"]["id"] = f"aB{place}_x"


def copied_on_windows(mine):
    """Copied cell by cell into a new notebook: neither ids nor metadata are left, and lines end as on Windows."""
    for cell in mine.cells:
        cell["source"] = "".join(cell["source"]).replace("\n", "\r\n")
        del cell["id"]
        cell["metadata"] = {}


def doubled(mine):
    mine.content["cells"] = [copy.deepcopy(cell) for cell in mine.cells for _ in range(2)]


def all_in_one_cell(mine):
    """Every exercise merged into the first one's cell."""
    first, *others = (mine.cell(f"exercise-90-{k}") for k in (1, 2, 3))
    for other in others:
        first["source"] += "\n\n" + other["source"]
        mine.cells.remove(other)


@pytest.mark.parametrize("change", [colab, copied_on_windows, doubled, all_in_one_cell])
def test_whatever_became_of_a_notebook_the_same_answers_count(root, learner, change):
    learner.answer(1, "return x + x")
    learner.answer(2, "return x + 2")
    learner.answer(3, "return twice(x)")
    learner.insert(learner.place("exercise-90-3"), "def twice(x):\n    return 2 * x")
    change(learner)
    said, _ = verdicts(root, learner)
    assert [said[k].status for k in "1234"] == ["passed", "failed", "passed", "to do"]


def test_a_byte_order_mark_and_the_line_ends_of_windows_change_nothing(learner, tmp_path):
    learner.answer(1, "return x + x  # größer")
    plain = learner.save(tmp_path / "plain.ipynb")
    text = json.dumps(learner.content, ensure_ascii=False, indent=1).replace("\n", "\r\n")
    (tmp_path / "changed.ipynb").write_bytes(text.encode("utf-8-sig"))
    assert read_notebook(tmp_path / "changed.ipynb") == read_notebook(plain)


# Verdicts


def test_verdicts_say_what_is_the_matter(root, learner):
    learner.answer(1, "return x +")
    learner.answer(2, "return double_3(x)")
    learner.answer(4, "return undefined")
    del learner.cells[learner.place("exercise-90-5")]
    learner.cell("exercise-90-6")["cell_type"] = "markdown"
    learner.answer(7, "return double_5(x)")
    learner.answer(8, "return double_1(x)")
    learner.cell("exercise-90-9")["source"] = "double_9 = int"
    learner.answer(10, "return double_3(x)")
    learner.insert(learner.place("exercise-90-11"), "1 / 0")
    learner.answer(11, "return 2 * x")
    said, notes = verdicts(root, learner)
    status = {number: verdict.status for number, verdict in said.items()}
    failed = dict.fromkeys(("1", "2", "4", "5", "6", "7", "8", "9"), "failed")
    assert status == failed | dict.fromkeys(("3", "12", "13"), "to do") | {"10": "waiting", "11": "passed"}
    texts = {"1": "SyntaxError", "4": "'undefined'", "5": "double_5", "6": "markdown", "9": "is 3.", "10": "90.3"}
    assert [number for number, text in texts.items() if text not in said[number].text] == []
    assert len(notes) == 1
    assert "ZeroDivisionError" in notes[0]


def test_one_exercise_runs_only_what_it_needs(root, learner):
    learner.insert(0, "helper = 2")
    learner.insert(1, "1 / 0")
    learner.insert(2, "globals().update(zero=0)")
    learner.answer(1, "return helper * x")
    learner.cell("exercise-90-2")["source"] = "1 / 0\ndef double_2(x): return 2 * x"
    learner.answer(3, "return double_1(x) + zero")
    said, notes = verdicts(root, learner, exercises=["90.3"])
    assert {number: verdict.status for number, verdict in said.items()} == {"3": "passed"}
    assert notes == []


def test_a_kernel_that_died_before_it_ran_anything_is_started_again():
    start = Mock(side_effect=[RuntimeError(DIED)] * (STARTS - 1) + ["started"])
    assert started(start) == "started"


def check(root, *arguments: str) -> int:
    return cli.main(["check", "--root", str(root), *arguments])


def test_exit_codes_and_what_is_printed(root, learner, capsys):
    path = str(learner.save(root / "chapters" / "mine.ipynb"))
    assert check(root, "90", "--notebook", str(root / "solutions" / "90_tiny.ipynb")) == 0
    assert f"{COUNT} of {COUNT}" in capsys.readouterr().out
    assert check(root, "--exercise", "90.2", "--notebook", path) == 1
    assert re.match(saying("0 of 1", "90.2"), capsys.readouterr().out.splitlines()[-1])


UNREADABLE = {
    "cut short": (b'{"cells": [{"cell_type": "code", "sou', "JSON"),
    "merge marks": (b'{\n<<<<<<< HEAD\n"cells": []\n=======\n>>>>>>> x\n}', "git"),
    "not text": (b"\xff\xfe\x00\x00", "utf-8"),
    "a cell that is none": (b'{"cells": [3]}', "format 4"),
}


def test_unreadable_file_is_told_what_is_wrong_with_it(root, tmp_path, capsys):
    path = tmp_path / "90_tiny.ipynb"
    for content, says in UNREADABLE.values():
        path.write_bytes(content)
        assert check(root, "90", "--notebook", str(path)) == 2
        assert says in " ".join(capsys.readouterr().err.split())
        assert path.read_bytes() == content


def test_without_a_number_it_is_the_chapter_that_one_is_in_and_all_means_all(root, learner, tmp_path, capsys):
    for folder in ("solutions", "chapters"):
        shutil.copytree(root / folder, tmp_path / folder)
        shutil.copy(root / folder / "90_tiny.ipynb", tmp_path / folder / "91_tiny.ipynb")

    def checked(*arguments: str) -> str:
        assert check(tmp_path, *arguments) == 1
        return " ".join(capsys.readouterr().out.split())

    assert "tplab start" in checked("90"), "where nobody has started, the blank chapters are checked"
    start(Course(tmp_path, tmp_path / "my_course"))
    os.utime(tmp_path / "my_course" / "90_tiny.ipynb", (1, 1))
    assert "Chapter 90" in checked(), "nothing is begun, whenever the copies were made"
    learner.answer(2, "return 2 * x")
    learner.save(tmp_path / "my_course" / "91_tiny.ipynb")
    learner.save(tmp_path / "my_course" / "90_tiny.ipynb")
    os.utime(tmp_path / "my_course" / "90_tiny.ipynb", (1, 1))
    assert "Chapter 91" in checked()
    assert re.search(saying(f"2 of {2 * COUNT}", "2 chapters"), checked("all"))
