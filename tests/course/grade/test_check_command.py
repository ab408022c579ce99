"""`tplab check` in this process: what counts as an answer, the verdict on it, and what is printed."""

import os
import re
import shutil

import pytest

from tests.course.grade import in_process
from tests.course.grade.in_process import verdicts
from tplab.course.commands import cli
from tplab.course.learn.course_files import Course
from tplab.course.learn.start import start
from tplab.course.notebooks.kernels import DIED, STARTS, started

COUNT = 13  # more than there are ways to spoil a notebook


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    with in_process.course(tmp_path_factory.mktemp("tiny"), COUNT) as folder:
        yield folder


def swapped_with_check(mine, k):
    a, b = mine.place(f"exercise-90-{k}"), mine.place(f"check-90-{k}")
    mine.cells[a], mine.cells[b] = mine.cells[b], mine.cells[a]


def tags(mine, k):
    for id in (f"check-90-{k}", f"exercise-90-{k}"):
        mine.cell(id)["metadata"]["tags"] = ["raises-exception", "nbval-skip", "nbval-ignore-output", "skip-execution"]


def lost_ids(mine, k):
    for id in (f"check-90-{k}", f"exercise-90-{k}"):
        mine.cell(id).update(id="", metadata={})


def lost_ids_and_no_definition(mine, k):
    """As Colab does it: no ids, but the metadata is kept. The answer is an assignment, so no name gives it away."""
    cell = mine.cell(f"exercise-90-{k}")
    cell["source"] = cell["source"].replace(f"def double_{k}(x):\n    return", f"double_{k} = lambda x:")
    for id in (f"check-90-{k}", f"exercise-90-{k}"):
        mine.cell(id).pop("id")


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
    "tags": tags,
    "lost ids": lost_ids,
    "lost ids and no definition": lost_ids_and_no_definition,
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
    assert [note for note in notes if "90.1 " in note], "the edited check"
    if status == "failed":
        assert all("is 5." in said[str(k)].text for k in range(1, len(SPOILINGS) + 1))


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
    assert [status[str(k)] for k in (1, 2, 3, 4, 5, 6, 7)] == ["failed", "failed", "to do", *["failed"] * 4]
    assert [(said[k].status, said[k].text) for k in ("10",)] == [("waiting", "90.3")]
    assert (status["9"], status["11"]) == ("failed", "passed")
    texts = {"1": "SyntaxError", "4": "'undefined'", "5": "double_5", "6": "markdown", "9": "is 3."}
    assert [number for number, text in texts.items() if text not in said[number].text] == []
    assert len(notes) == 1
    assert "ZeroDivisionError" in notes[0]


def test_one_exercise_runs_only_what_it_needs(root, learner):
    learner.insert(0, "helper = 2")
    learner.insert(1, "1 / 0")
    learner.answer(1, "return helper * x")
    learner.cell("exercise-90-2")["source"] = "1 / 0\ndef double_2(x): return 2 * x"
    learner.answer(3, "return double_1(x)")
    said, notes = verdicts(root, learner, exercises=["90.3"])
    assert {number: verdict.status for number, verdict in said.items()} == {"3": "passed"}
    assert notes == []


def test_where_the_kernel_ended_is_told_for_all_that_was_not_run(root, learner, monkeypatch):
    """The run ends with a row of a kernel that died in a cell of this kind."""
    row = {"id": "x", "number": "90.1", "outcome": "failed", "died": True, "message": "Kernel dead"}
    for change, says in (
        ({"role": "own"}, "your own cells"),
        ({"role": "exercise"}, "90.1"),
        ({"role": "given"}, "cell x"),
        ({"role": "setup", "message": DIED}, "ipykernel_launcher"),
    ):
        monkeypatch.setattr(in_process.Run, "__iter__", lambda self, change=change: iter([row | change]))
        said, _ = verdicts(root, learner)
        assert {one.status for one in said.values()} == {"not run"}
        assert all(says in one.text for one in said.values())


def test_kernel_that_lost_its_ports_is_started_again():
    tries = []

    def start() -> str:
        tries.append(len(tries))
        if len(tries) < STARTS:
            raise RuntimeError(DIED)
        return "started"

    assert started(start) == "started"
    with pytest.raises(RuntimeError, match="other"):
        started(lambda: (_ for _ in ()).throw(RuntimeError("other")))


def check(root, *arguments: str) -> int:
    return cli.main(["check", "--root", str(root), *arguments])


def test_exit_codes_and_what_is_printed(root, learner, capsys):
    path = str(learner.save(root / "chapters" / "mine.ipynb"))
    assert check(root, "90", "--notebook", str(root / "solutions" / "90_tiny.ipynb")) == 0
    assert f"{COUNT} of {COUNT} exercises pass." in capsys.readouterr().out
    assert check(root, "--exercise", "90.2", "--notebook", path) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert re.search(r"mine\.ipynb, saved \w+ \d\d, \d\d:\d\d:\d\d", out)
    assert re.search(r"○ 90\.2 Double 2 +to do", out)
    assert "0 of 1 exercise pass. Next: 90.2." in out


UNREADABLE = {
    "empty": (b"", "not valid JSON"),
    "cut short": (b'{"cells": [{"cell_type": "code", "sou', "Was it cut short"),
    "merge marks": (b'{\n<<<<<<< HEAD\n"cells": []\n=======\n>>>>>>> x\n}', "marks of a git merge"),
    "a number without end": (b'{"cells": [], "n": ' + b"1" * 5000 + b"}", "digits"),
    "not text": (b"\xff\xfe\x00\x00", "utf-8"),
    "nested too deeply": (b"[" * 100_000, "recursion"),
    "format 3": (b'{"worksheets": []}', "format 4"),
    "a cell that is none": (b'{"cells": [3]}', "format 4"),
}


def test_unreadable_file_is_told_what_is_wrong_with_it(root, tmp_path, capsys):
    path = tmp_path / "90_tiny.ipynb"
    for content, says in UNREADABLE.values():
        path.write_bytes(content)
        assert check(root, "90", "--notebook", str(path)) == 2
        assert says in " ".join(capsys.readouterr().err.split())
        assert path.read_bytes() == content


@pytest.fixture
def two_chapters(root, tmp_path):
    """A learner's copies of two blank chapters, of which the second was saved last."""
    for folder in ("solutions", "chapters"):
        shutil.copytree(root / folder, tmp_path / folder)
        shutil.copy(root / folder / "90_tiny.ipynb", tmp_path / folder / "91_tiny.ipynb")
    start(Course(tmp_path, tmp_path / "my_course"))
    os.utime(tmp_path / "my_course" / "90_tiny.ipynb", (1, 1))
    return tmp_path


def test_an_answer_wherever_it_is_runs(two_chapters, learner, capsys):
    learner.insert(learner.place("check-90-1"), "def double_1(x):\n    return 2 * x")
    learner.cell("exercise-90-2")["source"] = (
        'def double_2(x):\n    return 2 * x\n    raise NotImplementedError("exercise 90.2")'
    )
    learner.save(two_chapters / "my_course" / "90_tiny.ipynb")
    for exercise in ("90.1", "90.2"):
        assert check(two_chapters, "--exercise", exercise) == 0
        assert "1 of 1 exercise passes." in capsys.readouterr().out
    shutil.rmtree(two_chapters / "my_course")
    assert check(two_chapters, "--exercise", "90.1") == 1, "where nobody has started, the blank chapters are checked"
    assert "no copies" in capsys.readouterr().out


def test_without_a_number_it_is_the_chapter_that_one_is_in_and_all_means_all(two_chapters, learner, capsys):
    def checked(*arguments: str) -> str:
        assert check(two_chapters, *arguments) == 1
        return capsys.readouterr().out

    out = checked()
    assert "Chapter 90" in out, "nothing is begun, whenever the copies were made"
    assert "no copies" not in out
    learner.answer(2, "return 2 * x")
    learner.save(two_chapters / "my_course" / "91_tiny.ipynb")
    learner.save(two_chapters / "my_course" / "90_tiny.ipynb")
    os.utime(two_chapters / "my_course" / "90_tiny.ipynb", (1, 1))
    assert "Chapter 91" in checked()
    assert f"2 of {2 * COUNT} exercises pass in 2 chapters." in checked("all")
