"""`tplab check`: no spoiling of a notebook lets a wrong answer pass, or costs a right one its verdict."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time

import pytest

from tests.course import tiny
from tplab.course.grading.check_notebook import Note, Verdict, check_notebook
from tplab.course.learner.course_files import Course
from tplab.course.learner.start import start
from tplab.course.notebooks.cells import Unreadable, read_notebook
from tplab.course.tools import cli

COUNT = 26


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A chapter of 26 exercises, built once."""
    folder = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        tiny.make(folder, tiny.source(COUNT))
    return folder


@pytest.fixture
def learner(root, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(root))
    return tiny.Learner(root / "chapters" / "90_tiny.ipynb")


def verdicts(root, learner, **options) -> tuple[dict[str, Verdict], list[str]]:
    """What is said about each exercise, and the notes."""
    reference = read_notebook(root / "solutions" / "90_tiny.ipynb")
    path = learner.save(root / "chapters" / "mine.ipynb")
    stream = list(check_notebook(reference, path, **options))
    notes = [said.text for said in stream if isinstance(said, Note)]
    return {said.number: said for said in stream if isinstance(said, Verdict)}, notes


def edited_check(mine, k):
    mine.cell(f"check-90-{k}")["source"] = f'"Exercise 90.{k} passed: Double {k}"'


def deleted_check(mine, k):
    del mine.cells[mine.place(f"check-90-{k}")]


def doubled_check(mine, k):
    mine.insert(mine.place(f"check-90-{k}"), "'passed'", id=f"check-90-{k}")


def markdown_check(mine, k):
    cell = mine.cell(f"check-90-{k}")
    cell["cell_type"] = "markdown"


def swapped_with_check(mine, k):
    a, b = mine.place(f"exercise-90-{k}"), mine.place(f"check-90-{k}")
    mine.cells[a], mine.cells[b] = mine.cells[b], mine.cells[a]


def stale_outputs(mine, k):
    text = {"output_type": "stream", "name": "stdout", "text": "whatever\n"}
    mine.cell(f"check-90-{k}").update(outputs=[text], execution_count=99)


def cleared_outputs(mine, k):
    mine.cell(f"check-90-{k}").update(outputs=[], execution_count=None)


def tags(mine, k):
    for id in (f"check-90-{k}", f"exercise-90-{k}"):
        mine.cell(id)["metadata"]["tags"] = ["raises-exception", "nbval-skip", "nbval-ignore-output", "skip-execution"]


def comments(mine, k):
    for id in (f"check-90-{k}", f"exercise-90-{k}"):
        cell = mine.cell(id)
        cell["source"] = "# NBVAL_SKIP\n# NBVAL_IGNORE_OUTPUT\n" + "".join(cell["source"])


def own_check_function(mine, k):
    mine.insert(mine.place(f"check-90-{k}"), "def check(*answers):\n    return 'passed'")


def check_function_in_the_exercise(mine, k):
    cell = mine.cell(f"exercise-90-{k}")
    cell["source"] = "".join(cell["source"]) + "\ncheck = lambda *answers: 'passed'\n"


def patched_course(mine, k):
    source = "import tplab.course\nfrom tplab.course.checks import exercises, run_answer\n"
    source += "tplab.course.check = exercises.check = run_answer.fail = lambda *a, **k: None"
    mine.insert(mine.place(f"check-90-{k}"), source)


def patched_code(mine, k):
    source = "from tplab.course.checks import exercises, run_answer\ndef nothing(*a, **k): pass\n"
    source += "run_answer.fail.__code__ = nothing.__code__\nexercises.Verdict.__init__ = nothing"
    mine.insert(mine.place(f"check-90-{k}"), source)


def patched_register(mine, k):
    source = "from tplab.course.checks import exercises as checking\n"
    source += "checking._exercises.update(dict.fromkeys(checking._exercises, None))\n"
    source += (
        "import sys; sys.modules['tplab.course.checks.exercises'] = None; sys.modules['tplab.course'].check = print"
    )
    mine.insert(mine.place(f"check-90-{k}"), source)


def name_bound_again(mine, k):
    mine.insert(mine.place(f"check-90-{k}"), f"double_{k} = lambda x: 6")


def exception_hook(mine, k):
    source = "get_ipython().set_custom_exc((Exception,), lambda *a, **k: None)"
    mine.insert(mine.place(f"check-90-{k}"), source)
    mine.insert(mine.place(f"check-90-{k}") + 1, "get_ipython().custom_exceptions = ()")


def lost_ids(mine, k):
    for id in (f"check-90-{k}", f"exercise-90-{k}"):
        cell = mine.cell(id)
        cell.update(id="", metadata={})


def lost_ids_and_no_definition(mine, k):
    """As Colab does it: no ids, but the metadata is kept. The answer is an assignment, so no name gives it away."""
    cell = mine.cell(f"exercise-90-{k}")
    cell["source"] = cell["source"].replace(f"def double_{k}(x):\n    return", f"double_{k} = lambda x:")
    for id in (f"check-90-{k}", f"exercise-90-{k}"):
        mine.cell(id).pop("id")


def answer_in_a_new_cell(mine, k):
    """The stub stays where it is; the answer stands in a cell of the learner's own below it."""
    source = mine.cell(f"exercise-90-{k}")["source"]
    mine.cell(f"exercise-90-{k}")["source"] = f'def double_{k}(x):\n    raise NotImplementedError("exercise 90.{k}")'
    mine.insert(mine.place(f"exercise-90-{k}") + 1, source)


def doubled_stub_below(mine, k):
    stub = f'def double_{k}(x):\n    raise NotImplementedError("exercise 90.{k}")'
    mine.insert(mine.place(f"check-90-{k}") + 1, stub, id=f"exercise-90-{k}")


def experiment_below_the_check(mine, k):
    mine.insert(mine.place(f"check-90-{k}") + 1, f"def double_{k}(x):\n    return 0")


def stub_between_answer_and_check(mine, k):
    stub = f'def double_{k}(x):\n    raise NotImplementedError("exercise 90.{k}")'
    mine.insert(mine.place(f"check-90-{k}"), stub)


def split_exercise(mine, k):
    cell = mine.cell(f"exercise-90-{k}")
    mine.insert(mine.place(f"exercise-90-{k}"), "factor = 2\n", id=f"exercise-90-{k}")
    assert cell["source"]


def own_helper(mine, k):
    cell = mine.cell(f"exercise-90-{k}")
    mine.insert(mine.place(f"exercise-90-{k}"), f"def helper_{k}(x):\n    return x")
    cell["source"] = "".join(cell["source"]).replace("(x):\n    return ", f"(x):\n    x = helper_{k}(x)\n    return ")


def debug_prints(mine, k):
    cell = mine.cell(f"exercise-90-{k}")
    cell["source"] = "".join(cell["source"]).replace("    return", "    print('debug', x)\n    return")


SPOILINGS = [
    edited_check,
    deleted_check,
    doubled_check,
    markdown_check,
    swapped_with_check,
    stale_outputs,
    cleared_outputs,
    tags,
    comments,
    own_check_function,
    check_function_in_the_exercise,
    patched_course,
    patched_code,
    patched_register,
    name_bound_again,
    exception_hook,
    lost_ids,
    lost_ids_and_no_definition,
    answer_in_a_new_cell,
    doubled_stub_below,
    experiment_below_the_check,
    stub_between_answer_and_check,
    split_exercise,
    own_helper,
    debug_prints,
]


def spoiled(learner, body: str):
    for k, spoil in enumerate(SPOILINGS, 1):
        learner.answer(k, body)
        spoil(learner, k)
    return learner


def test_no_spoiling_lets_a_wrong_answer_pass(root, learner):
    said, _ = verdicts(root, spoiled(learner, "return x + 2"))
    for k, spoil in enumerate(SPOILINGS, 1):
        verdict = said[f"90.{k}"]
        assert verdict.status == "failed", spoil.__name__
        assert "is 5." in verdict.text or spoil in (tags, exception_hook), (spoil.__name__, verdict.text)


@pytest.mark.slow
def test_no_spoiling_costs_a_right_answer_its_verdict(root, learner):
    said, _ = verdicts(root, spoiled(learner, "return x + x"))
    failed = {
        spoil.__name__: said[f"90.{k}"] for k, spoil in enumerate(SPOILINGS, 1) if said[f"90.{k}"].status != "passed"
    }
    assert failed == {}
    assert said[f"90.{COUNT}"].status == "to do"


def test_verdicts_say_what_is_the_matter(root, learner):
    learner.answer(1, "return x +")
    learner.answer(2, "return double_3(x)")
    learner.answer(4, "return undefined")
    del learner.cells[learner.place("exercise-90-5")]
    learner.cell("exercise-90-6")["cell_type"] = "markdown"
    learner.answer(7, "return double_1(x)")
    learner.cell("exercise-90-8")["source"] = "from tiny_checks import register as double_8"
    learner.cell("exercise-90-9")["source"] = "from tplab.course.notebooks.rewrite import task_heading as double_9"
    learner.answer(10, "return double_12(x)")
    learner.answer(12, "return 2 * x")
    said, notes = verdicts(root, learner)
    told = {number.removeprefix("90."): (verdict.status, verdict.text) for number, verdict in said.items()}
    assert told["1"] == ("failed", "Its own cell does not run. SyntaxError: invalid syntax (line 2 of the cell)")
    assert told["2"][0] == "failed"  # exercise 3 comes later: nothing to wait for
    assert told["3"] == ("to do", "")
    assert told["4"][0] == "failed"
    assert "name 'undefined' is not defined" in told["4"][1]
    assert told["5"] == ("failed", "Its cell is missing from the notebook; add a code cell that defines double_5.")
    assert told["6"] == ("failed", "Its cell is a markdown cell; turn it back into a code cell.")
    assert told["7"][0] == "failed"
    assert told["9"][0] == "failed"
    assert "double_9 is the course's own, from tplab.course.notebooks.rewrite" in told["9"][1]
    assert notes == []


def test_torch_that_loads_its_compiler_during_a_check_is_no_change(root, learner):
    learner.answer(1, "import torch._dynamo; return 2 * x")
    learner.answer(2, "import torch.export; torch.export.export(torch.nn.Identity(), (torch.ones(1),)); return 2 * x")
    learner.answer(3, "import torch; torch.compile(torch.nn.Identity(), backend='eager')(torch.ones(1)); return 2 * x")
    learner.answer(4, "import torch; torch.nn.Module.__init__ = lambda self: None; return 2 * x")
    said, _ = verdicts(root, learner, exercises=["90.1", "90.2", "90.3", "90.4"])
    assert [said[f"90.{k}"].status for k in (1, 2, 3, 4)] == ["passed", "passed", "passed", "failed"], said
    assert "your code changed torch.nn.Module.__init__" in said["90.4"].text


def test_answer_that_can_not_leave_the_notebook_is_told_why(root, learner):
    learner.insert(learner.place("exercise-90-1"), "import threading\nlock = threading.Lock()")
    learner.answer(1, "with lock: return 2 * x")
    learner.answer(2, "return 2 * x")
    said, _ = verdicts(root, learner, exercises=["90.1", "90.2"])
    assert said["90.1"].status == "failed"
    assert "double_1 can't be handed to the process that checks exercise 90.1: cannot pickle" in said["90.1"].text
    assert said["90.2"].status == "passed"


def test_each_check_begins_in_the_same_state(root, learner):
    count = "import math; math.calls = getattr(math, 'calls', 0) + 1; return 2 * x if math.calls == 1 else math.calls"
    for k in (1, 2):
        learner.answer(k, count)
    said, _ = verdicts(root, learner, exercises=["90.1", "90.2"])
    assert {verdict.status for verdict in said.values()} == {"passed"}


def test_waiting_for_an_earlier_exercise(root, learner):
    learner.answer(2, "return double_1(x)")
    said, _ = verdicts(root, learner)
    assert (said["90.2"].status, said["90.2"].text) == ("waiting", "90.1")


def test_failing_own_cell_is_only_a_note(root, learner):
    learner.answer(1, "return 2 * x")
    learner.insert(learner.place("exercise-90-1"), "1 / 0")
    said, notes = verdicts(root, learner)
    assert said["90.1"].status == "passed"
    assert notes == ["One of your own cells failed: ZeroDivisionError: division by zero\nat line 1 of the cell: 1 / 0"]


def test_kernel_ended_by_a_cell(root, learner):
    for k in (1, 2, 3):
        learner.answer(k, "return 2 * x")
    learner.insert(learner.place("exercise-90-3"), "import os; os._exit(0)")
    learner.cell("exercise-90-2")["source"] = "def double_2(x):\n    import os\n    os._exit(0)"
    said, _ = verdicts(root, learner)
    assert [said[f"90.{k}"].status for k in (1, 2, 3)] == ["passed", "failed", "not run"]
    assert said["90.2"].text == "Your answer ended the process that checked it, with os._exit for example."
    assert said["90.3"].text == "The kernel ended in one of your own cells."


def test_kernel_ended_by_a_cell_of_the_chapter(root, learner):
    learner.insert(0, "import os\ndef print(text): os._exit(0)")
    said, _ = verdicts(root, learner, everything=True)
    given = next(cell for cell in learner.cells if "a given cell" in "".join(cell["source"]))
    assert said["90.1"].text == f"The kernel ended in the chapter's cell {given['id']}."


def test_cell_out_of_time(root, learner):
    learner.answer(1, "while True: pass")
    learner.answer(2, "return 2 * x")
    said, _ = verdicts(root, learner, timeout=20)
    assert said["90.1"].text.startswith("No result after 20 seconds")
    assert said["90.2"].status == "passed"


def test_one_exercise_runs_only_what_it_needs(root, learner):
    learner.insert(0, "helper = 2")
    learner.insert(1, "import time; time.sleep(600)")
    learner.answer(1, "return helper * x")
    learner.cell("exercise-90-2")["source"] = "import time; time.sleep(600)\ndef double_2(x): return 2 * x"
    learner.answer(3, "return double_1(x)")
    said, _ = verdicts(root, learner, exercises=["90.3"])
    assert {number: verdict.status for number, verdict in said.items()} == {"90.3": "passed"}


def test_verdicts_stream(root, learner):
    learner.answer(1, "return 2 * x")
    learner.answer(2, "import time; time.sleep(4); return 2 * x")
    learner.save(root / "chapters" / "mine.ipynb")
    reference = read_notebook(root / "solutions" / "90_tiny.ipynb")
    stream = check_notebook(reference, root / "chapters" / "mine.ipynb")
    assert next(stream).number == "90.1"
    start = time.monotonic()
    assert next(stream).number == "90.2"
    assert time.monotonic() - start > 2
    stream.close()


def check(root, *arguments: str) -> int:
    return cli.main(["check", "--root", str(root), *arguments])


def test_exit_codes_and_what_is_printed(root, learner, capsys):
    path = str(learner.save(root / "chapters" / "mine.ipynb"))
    assert check(root, "90", "--notebook", str(root / "solutions" / "90_tiny.ipynb")) == 0
    assert f"{COUNT} of {COUNT} exercises pass." in capsys.readouterr().out
    assert check(root, "--exercise", "90.2", "--notebook", path) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert re.search(r"mine\.ipynb, saved \d\d:\d\d:\d\d, (just now|\d+ min ago)", out)
    assert re.search(r"○ 90\.2 Double 2 +to do", out)
    assert "0 of 1 exercise pass. Next: 90.2." in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["17"], "There is no chapter 17. There are: 90."),
        (["--exercise", "90.99"], "There is no exercise 90.99 in chapter"),
        (["--exercise", "x"], "tplab check --exercise 4.2"),
        (["4", "--exercise", "90.1"], "There is no exercise 90.1 here"),
        (["90", "--notebook", "nowhere.ipynb"], "There is no file nowhere.ipynb."),
        (["--notebook", "mine.ipynb"], "Say which chapter mine.ipynb is"),
        (["all", "--notebook", "90_mine.ipynb"], "One notebook is one chapter"),
        (["all", "--exercise", "90.1"], "Either all chapters or one exercise"),
    ],
)
def test_misuse_is_told_in_a_sentence(root, arguments, says, capsys):
    assert check(root, *arguments) == 2
    assert says in " ".join(capsys.readouterr().err.split())


UNREADABLE = {
    "empty": (b"", "the file is empty"),
    "cut short": (b'{"cells": [{"cell_type": "code", "sou', "Was it cut short"),
    "merge marks": (b'{\n<<<<<<< HEAD\n"cells": []\n=======\n>>>>>>> x\n}', "marks of a git merge"),
    "a number without end": (b'{"cells": [], "n": ' + b"1" * 5000 + b"}", "thousands of digits"),
    "not text": (b"\xff\xfe\x00\x00", "not a text file in UTF-8"),
    "a list": (b"[]", "no list of cells"),
    "format 3": (b'{"worksheets": []}', "format 3"),
    "no cells": (b'{"cells": 3}', "no list of cells"),
    "a cell that is none": (b'{"cells": [3]}', "its cell 1 is not a cell"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_unreadable_file_is_told_what_is_wrong_with_it(root, name, tmp_path, capsys):
    content, says = UNREADABLE[name]
    path = tmp_path / "90_tiny.ipynb"
    path.write_bytes(content)
    with pytest.raises(Unreadable, match=re.escape(says)):
        read_notebook(path)
    assert check(root, "90", "--notebook", str(path)) == 2
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


@pytest.fixture
def nothing_runs(monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("nothing has to run here")

    monkeypatch.setattr("tplab.course.grading.check_notebook.Run", never)


def test_blank_exercises_are_to_do_without_running_anything(two_chapters, nothing_runs, capsys):
    assert check(two_chapters, "90") == 1
    out = " ".join(capsys.readouterr().out.split())
    assert f"0 of {COUNT} exercises pass. Next: 90.1." in out
    assert "You have no copies" not in out


def test_what_is_to_do_is_told_without_loading_torch_or_nbval(two_chapters):
    program = f"""
import sys
from tplab.course.tools import cli
assert cli.main(["check", "90", "--root", {str(two_chapters)!r}]) == 1
assert not {{"torch", "nbval", "pytest"}} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_word_that_is_no_chapter_is_refused(root, capsys):
    with pytest.raises(SystemExit):
        check(root, "abc")
    assert "'abc' is no chapter: give its number, such as 4, or start, or all" in capsys.readouterr().err


def test_where_nobody_has_started_the_blank_chapters_are_checked_and_that_is_said(two_chapters, capsys):
    shutil.rmtree(two_chapters / "my_course")
    assert check(two_chapters, "--exercise", "90.1") == 1
    assert capsys.readouterr().out.startswith("You have no copies of your own here yet")


@pytest.mark.parametrize(
    "write",
    [
        lambda learner: learner.answer(1, "return 2 * x"),
        lambda learner: learner.insert(learner.place("check-90-1"), "def double_1(x):\n    return 2 * x"),
        lambda learner: learner.cell("exercise-90-1").update(
            source='def double_1(x):\n    return 2 * x\n    raise NotImplementedError("exercise 90.1")'
        ),
    ],
)
def test_an_answer_wherever_it_is_runs(write, two_chapters, learner, capsys):
    write(learner)
    learner.save(two_chapters / "my_course" / "90_tiny.ipynb")
    assert check(two_chapters, "--exercise", "90.1") == 0
    assert "1 of 1 exercise passes." in capsys.readouterr().out


def test_without_a_chapter_it_asks_and_suggests_the_one_that_one_is_in(
    two_chapters, learner, nothing_runs, monkeypatch, capsys
):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)

    def asked(typed: str) -> str:
        monkeypatch.setattr("builtins.input", lambda: typed)
        assert check(two_chapters) == 1
        return capsys.readouterr().out

    assert "Enter alone means 90." in (out := asked("")), "nothing is begun, whenever the copies were made"
    assert "Chapter 90" in out
    assert "Chapter 91" in asked("91")
    assert f"0 of {2 * COUNT} exercises pass in 2 chapters." in asked("all")
    learner.answer(2, "return 2 * x")
    learner.save(two_chapters / "my_course" / "91_tiny.ipynb")
    monkeypatch.setattr("builtins.input", lambda: "90")
    assert check(two_chapters) == 1
    assert "Enter alone means 91." in capsys.readouterr().out
    monkeypatch.setattr("builtins.input", lambda: "both")
    assert check(two_chapters) == 2
    assert "'both' is no chapter number" in capsys.readouterr().err


def test_without_anybody_to_ask_it_says_what_to_write_and_all_means_all(two_chapters, nothing_runs, capsys):
    assert check(two_chapters) == 2
    assert "Say which chapter to check: tplab check 4, or tplab check all" in " ".join(capsys.readouterr().err.split())
    assert check(two_chapters, "all") == 1
    assert f"0 of {2 * COUNT} exercises pass in 2 chapters." in capsys.readouterr().out


def test_folder_instead_of_a_file(root, tmp_path):
    assert check(root, "90", "--notebook", str(tmp_path)) == 2


def test_learners_file_stays_as_it_is(root, learner, capsys):
    learner.answer(1, "return 2 * x")
    path = learner.save(root / "chapters" / "mine.ipynb")
    before = hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns
    assert check(root, "90", "--notebook", str(path)) == 1
    assert (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns) == before
    assert sorted(found.name for found in path.parent.iterdir()) == ["90_tiny.ipynb", "mine.ipynb"]


def test_notebook_runs_in_the_learners_folder(root, learner, tmp_path):
    (tmp_path / "my_helpers.py").write_text("def twice(x):\n    return 2 * x\n")
    learner.cell("exercise-90-1")["source"] = "from my_helpers import twice\ndef double_1(x):\n    return twice(x)"
    path = learner.save(tmp_path / "90_mine.ipynb")
    reference = read_notebook(root / "solutions" / "90_tiny.ipynb")
    said = list(check_notebook(reference, path, exercises=["90.1"]))
    assert said == [Verdict("90.1", "Double 1", "passed")]
