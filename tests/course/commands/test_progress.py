"""`tplab progress`: a pass is claimed for exactly the code that passed, whatever becomes of the files."""

import copy
import re
import shutil
import threading

import pytest

from tests import saying
from tests.course import tiny
from tests.course.grade import in_process
from tplab.course.commands import cli, progress, state
from tplab.course.commands.exercise_status import AS_SHOWN, Standing, standings
from tplab.course.grade.check_notebook import Verdict
from tplab.course.learn import course_files as places
from tplab.course.learn.course_files import find_course
from tplab.course.notebooks.cells import read_notebook

RIGHT, WRONG = "return 2 * x", "return 3 * x"
DAY = r"20\d\d-\d\d-\d\d"


def memory(root):
    return root / "chapters" / ".tplab"


def save(root, learner):
    return learner.save(root / "chapters" / "90_tiny.ipynb")


def record(root, **statuses: str) -> None:
    """What `tplab check` keeps once it has said this about the notebook as it is: record(root, e1="passed")."""
    files = places.chapter(find_course(root), 90)
    prints = state.fingerprints(read_notebook(files.reference), read_notebook(files.learner), root / "chapters")
    verdicts = [Verdict(f"90.{name[1:]}", "", status) for name, status in statuses.items()]
    assert state.record(memory(root), verdicts, prints) == []


def standing(root, number: int = 1) -> Standing:
    return standings(find_course(root))[0].exercises[number - 1]


def told(root, *arguments: str, capsys) -> str:
    assert cli.main(["progress", "--root", str(root), *arguments]) == 0
    return capsys.readouterr().out


# What is claimed


def test_only_chapters_that_one_is_in_are_unfolded(root, learner, capsys):
    for folder in ("solutions", "chapters"):
        shutil.copy(root / folder / "90_tiny.ipynb", root / folder / "91_tiny.ipynb")
    for k in (1, 2, 3):
        learner.answer(k, RIGHT)
    save(root, learner)
    record(root, e1="passed", e2="passed", e3="passed")
    text = told(root, capsys=capsys)
    assert text.startswith("3 of 6 ")
    assert text.count("Double") == 3, "those of the next chapter"


def test_check_is_what_progress_knows_of_but_not_the_check_of_a_copy(tmp_path, capsys):
    with in_process.course(tmp_path, 3) as root:
        learner = tiny.Learner(root / "chapters" / "90_tiny.ipynb")
        learner.answer(1, RIGHT)
        copied = learner.save(root / "chapters" / "90_copy.ipynb")
        assert cli.main(["check", "--exercise", "90.1", "--root", str(root), "--notebook", str(copied)]) == 0
        assert not (memory(root) / state.FILE).exists()
        learner.answer(2, WRONG)
        save(root, learner)
        assert cli.main(["check", "90", "--root", str(root)]) == 1
    found = standings(find_course(root))[0].exercises
    assert [one.status for one in found] == ["passed", "failed", "to do"]
    assert [one.note and bool(re.search(DAY, one.note)) for one in found] == [True, True, ""]
    capsys.readouterr()
    assert re.match(saying("1 of 3", "90.2"), told(root, capsys=capsys).splitlines()[0])


def course_expects_more(root, learner):
    path = root / "solutions" / "90_tiny.ipynb"
    path.write_text(path.read_text().replace("Right: the value.", "Right: the value, and its type."))


EDITED, NO_NOTE, GONE = "changed", "^$", "double_1"
PATCH = "import builtins\nsetattr(builtins, 'twice', len)"
CHANGES = [
    (lambda root, mine: mine.answer(1, WRONG), EDITED),
    (lambda root, mine: mine.answer(1, 'raise NotImplementedError("exercise 90.1")'), NO_NOTE),
    (lambda root, mine: mine.cell("helper").update(source="def twice(x):\n    return x * x"), EDITED),
    (lambda root, mine: mine.insert(mine.place("check-90-1"), "double_1 = len"), EDITED),
    (lambda root, mine: mine.insert(mine.place("check-90-1"), PATCH), EDITED),
    (lambda root, mine: mine.cells.pop(mine.place("exercise-90-1")), GONE),
    (lambda root, mine: (root / "chapters" / "mine.py").write_text("factor = 3\n"), EDITED),
    (course_expects_more, EDITED),
]


@pytest.fixture
def passed(root, learner):
    """Exercise 90.1 passed, by an answer that uses a helper in a cell of the learner's own, and a file beside."""
    (root / "chapters" / "mine.py").write_text("factor = 2\n")
    learner.insert(learner.place("exercise-90-1"), "def twice(x):\n    return 2 * x", id="helper")
    learner.answer(1, "return twice(x)")
    learner.answer(2, RIGHT)
    save(root, learner)
    record(root, e1="passed", e2="failed")
    assert standing(root).status == "passed"
    return learner


@pytest.mark.parametrize(("change", "note"), CHANGES)
def test_no_pass_is_claimed_for_code_or_a_check_that_changed(change, note, root, passed):
    change(root, passed)
    save(root, passed)
    assert standing(root).status == "to do"
    assert re.search(note, standing(root).note)


def test_a_pass_outlives_what_does_not_touch_it(root, passed):
    def still_passed() -> bool:
        save(root, passed)
        return standing(root).status == "passed"

    passed.insert(passed.place("check-90-1"), "double_1(21)")
    assert still_passed(), "an experiment"
    passed.answer(2, WRONG)
    assert still_passed(), "another answer"
    passed.cell("task-90-1")["source"] = "done!"
    assert still_passed(), "a text"
    for cell in passed.cells:
        cell.update({"outputs": [], "execution_count": None} if cell["cell_type"] == "code" else {})
        del cell["id"]
    assert still_passed(), "no outputs and no ids"


def test_going_back_to_the_code_that_passed_is_passed_again_until_a_check_says_otherwise(root, passed):
    kept = copy.deepcopy(passed.cell("exercise-90-1"))
    passed.answer(1, WRONG)
    save(root, passed)
    assert standing(root).status == "to do"
    passed.cell("exercise-90-1").update(kept)
    save(root, passed)
    record(root, e1="not run", e2="waiting")
    assert [one.status for one in standings(find_course(root))[0].exercises] == ["passed", "failed", "to do"]
    record(root, e1="failed")
    assert standing(root).status == "failed"


# What the notebook shows

PASS = {"output_type": "execute_result", "data": {"text/plain": ["Exercise 90.1 passed: Double 1\n", "  Right."]}}
PRINT = {"output_type": "stream", "name": "stdout", "text": "here\n"}
FAILURE = {"output_type": "error", "ename": "CheckFailed", "evalue": "Exercise 90.1: wrong", "traceback": []}
STUB = {"output_type": "error", "ename": "NotImplementedError", "evalue": "exercise 90.1", "traceback": []}
STOPPED = {"output_type": "error", "ename": "KeyboardInterrupt", "evalue": "", "traceback": []}
ANOTHER = {"output_type": "execute_result", "data": {"text/plain": "Exercise 90.11 passed: Double 11"}}
SHOWN = {
    "a pass below a print": ([PRINT, PASS], 2, "passed"),
    "a failure": ([FAILURE], 2, "failed"),
    "a stub": ([STUB], 2, "to do"),
    "a pass, then an error": ([PASS, STOPPED], 2, "to do"),
    "another exercise's pass": ([ANOTHER], 2, "to do"),
    "a pass from before the cell was run": ([PASS], 1, "to do"),
}


@pytest.mark.parametrize("name", SHOWN)
def test_what_the_notebook_shows_is_told_and_not_verified(name, root, learner):
    outputs, count, status = SHOWN[name]
    learner.answer(1, RIGHT)
    learner.cell("exercise-90-1")["execution_count"] = {1: 3, 2: 1}[count]
    learner.cell("check-90-1").update(outputs=outputs, execution_count=2)
    save(root, learner)
    found = standing(root)
    assert (found.status, found.note == AS_SHOWN) == (status, status != "to do")
    assert found.note
    assert EDITED not in found.note
    record(root, e1="failed")
    learner.answer(1, "return 4 * x")
    save(root, learner)
    assert standing(root).status == "to do", "that output was of other code"
    assert EDITED in standing(root).note


# Files in any state


def test_a_damaged_record_counts_as_empty_and_is_mended_by_the_next_check(root, learner):
    learner.answer(1, RIGHT)
    save(root, learner)
    memory(root).mkdir()
    for content in (b"", b"[]", b"\xff\xfe", b'{"exercises": [3]}', b'{"exercises": {"90.1": {"status": "passed"}}}'):
        (memory(root) / state.FILE).write_bytes(content)
        assert standing(root).status == "to do"
        record(root, e1="passed")
        assert standing(root).status == "passed"


def test_a_record_that_cannot_be_written_is_told(root, passed):
    """tests/common/test_files.py says that a file is replaced as a whole."""
    (root / "a file").write_text("where the folder should be")
    prints = {"90.1": state.Fingerprint("a", "b")}
    assert len(state.record(root / "a file", [Verdict("90.1", "", "passed")], prints)) == 1


def test_checks_that_end_at_the_same_moment_all_count(root):
    numbers = [f"90.{k}" for k in range(1, 25)]
    prints = {number: state.Fingerprint("a", "b") for number in numbers}
    start = threading.Barrier(len(numbers))

    def one(number):
        start.wait()
        state.record(memory(root), [Verdict(number, "", "passed")], prints)

    threads = [threading.Thread(target=one, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(state.load(memory(root))) == set(numbers)


def test_an_unreadable_notebook_is_told_and_the_rest_goes_on(root, capsys):
    path = root / "chapters" / "90_tiny.ipynb"
    path.write_bytes(b'{"cells": [{')
    cut_short = " ".join(told(root, capsys=capsys).split())
    path.unlink()
    gone = " ".join(told(root, capsys=capsys).split())
    for text, says in ((cut_short, "JSON"), (gone, " file ")):
        assert says in text
        assert "tplab reset 90" in text
        assert "0 of 3" in text


# How it is shown


def test_page_links_to_the_chapters_from_where_the_notebook_lies(root, learner, monkeypatch):
    learner.answer(1, RIGHT)
    save(root, learner)
    record(root, e1="passed")
    for folder, target in ((root / "chapters", "90_tiny.ipynb"), (root, "chapters/90_tiny.ipynb")):
        monkeypatch.chdir(folder)
        shown = progress.progress()
        assert re.findall(r'href="([^"]*)"', shown._repr_html_()) == [target, target]
        assert re.search(rf"✓ passed\b[^<]*{DAY}", shown._repr_html_())
        assert "width: 33%" in shown._repr_html_()
        assert re.match(saying("1 of 3", "90.2"), repr(shown).splitlines()[0])
