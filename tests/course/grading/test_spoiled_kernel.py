"""`tplab check` and cells that end the kernel, hold it up, flood it or leave something behind.

Each kind: a wrong answer does not pass, a right one is not refused, the message can be understood, the learner's file
is untouched to the byte, and no process is left.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.course import tiny
from tplab.course.grading.check_notebook import Note, Verdict, check_notebook
from tplab.course.notebooks.cells import read_notebook

pytestmark = pytest.mark.slow

RIGHT, WRONG = "return x + x", "return x + 2"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        tiny.make(folder, tiny.source(6))
    return folder


class Said:
    """What `tplab check` says about a notebook, with the processes that were there before and after."""

    def __init__(self, root: Path, learner: tiny.Learner, **options):
        path = learner.save(root / "chapters" / "mine.ipynb")
        before = path.read_bytes()
        self.mark = f"spoiled-{os.getpid()}-{time.monotonic_ns()}"
        os.environ["SPOILED"] = self.mark
        reference = read_notebook(root / "solutions" / "90_tiny.ipynb")
        stream = list(check_notebook(reference, path, **options))
        self.status = {said.number.removeprefix("90."): said.status for said in stream if isinstance(said, Verdict)}
        self.text = {said.number.removeprefix("90."): said.text for said in stream if isinstance(said, Verdict)}
        self.notes = [said.text for said in stream if isinstance(said, Note)]
        assert path.read_bytes() == before
        assert self.left() == []

    def left(self) -> list[str]:
        """Processes of this check that are still there, by their environment or as our children."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.pid != os.getpid() and process.environ().get("SPOILED") == self.mark:
                    found.append(" ".join(process.cmdline()))
            except psutil.Error:
                continue
        return found


@pytest.fixture
def check(root, monkeypatch) -> Callable[..., Said]:
    """`check(own cell, answer, ...)`: exercise 1 is right; the answer to exercise 2 stands below the own cell."""
    monkeypatch.setenv("PYTHONPATH", str(root))
    monkeypatch.setenv("SPOILED", "")

    def run(own: str, answer: str = "", **options) -> Said:
        mine = tiny.Learner(root / "chapters" / "90_tiny.ipynb")
        mine.answer(1, RIGHT)
        mine.answer(2, answer or RIGHT)
        mine.answer(3, WRONG)
        mine.answer(4, RIGHT)
        if own:
            mine.insert(mine.place("exercise-90-2"), own)
        return Said(root, mine, **options)

    return run


ALL = {"1": "passed", "2": "passed", "3": "failed", "4": "passed", "5": "to do", "6": "to do"}
STOPPED = {"1": "passed", "2": "not run", "3": "not run", "4": "not run", "5": "not run", "6": "not run"}

# Own cells that end the kernel
ENDS = {
    "os._exit": "import os; os._exit(0)",
    "killed by a signal": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "crash": "import ctypes; ctypes.string_at(0)",
}


@pytest.mark.parametrize("kind", ENDS)
def test_own_cell_that_ends_the_kernel(check, kind):
    said = check(ENDS[kind])
    assert said.status == STOPPED
    assert said.text["2"] == "The kernel ended in one of your own cells."
    assert said.notes == ["One of your own cells failed: The kernel's process ended while it ran."]


# Own cells that do no harm to what stands below them
HARMLESS = {
    "sys.exit": ("import sys; sys.exit(3)", "SystemExit: 3"),
    "input": ("answer = input('How many ranks? ')", "StdinNotImplementedError"),
    "getpass": ("import getpass; getpass.getpass()", "StdinNotImplementedError"),
    "keyboard interrupt": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "own stdout": ("import io, sys; sys.stdout = io.StringIO()", ""),
    "own displayhook": ("import sys; sys.displayhook = lambda value: None", ""),
    "folder changed": ("import os; os.chdir('/'); os.environ.clear()", ""),
    "float64 everywhere": ("import torch; torch.set_default_dtype(torch.float64)", ""),
    "many flushed prints": ("for i in range(5000): print(i, flush=True)", ""),
    "names deleted": ("del check, double_1", ""),
    "a cell magic": ("%%time\nfor i in range(3): pass", ""),
    "an unknown magic": ("%%no_such_magic\n1", "UsageError"),
}


def test_own_cells_that_do_no_harm(root, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(root))
    mine = tiny.Learner(root / "chapters" / "90_tiny.ipynb")
    mine.answer(1, "print('to see it', file=__import__('sys').stderr); print(x); return x + x")
    mine.answer(2, RIGHT)
    mine.answer(3, WRONG)
    for source, _ in HARMLESS.values():
        mine.insert(mine.place("check-90-1"), source)
        mine.insert(mine.place("exercise-90-3"), source)
    said = Said(root, mine)
    assert [said.status[k] for k in "123"] == ["passed", "passed", "failed"]
    notes = " ".join(said.notes)
    assert [kind for kind, (_, error) in HARMLESS.items() if error not in notes] == []


IN_THE_ANSWER = {
    "sys.exit": "import sys; sys.exit(0)",
    "input": "return int(input('x?')) or 6",
    "an error that has no text": "raise type('Odd', (Exception,), {'__str__': lambda self: 1 / 0})",
    "a generator": "yield 6",
    "a number that only claims to be six": "return type('Six', (float,), {'__repr__': lambda self: '6'})(5)",
}


def test_answers_that_are_no_answers(root, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(root))
    mine = tiny.Learner(root / "chapters" / "90_tiny.ipynb")
    for k, body in enumerate(IN_THE_ANSWER.values(), 1):
        mine.answer(k, body)
    said = Said(root, mine)
    assert list(said.status.values()) == ["failed"] * len(IN_THE_ANSWER) + ["to do"]
    assert "your code raised SystemExit" in said.text["1"]
    assert "SystemExit: 0" in said.text["1"]
    assert "your code raised EOFError" in said.text["2"]
    assert "your code raised Odd" in said.text["3"]
    assert "generator object" in said.text["4"]
    assert "is 6" in said.text["5"]


TOLD = "this line would end the kernel, and with it all that the notebook has computed: take it out"
ASKS = {
    "exit()": TOLD,
    "quit()": TOLD,
    "get_ipython().kernel.do_shutdown(False)": "double_3 can't be handed to the process",
}


@pytest.mark.parametrize("line", ASKS)
def test_kernel_that_a_cell_asks_to_end(root, monkeypatch, line):
    """IPython ends the kernel some time after such a line, in whichever cell it is then: here it does not end."""
    monkeypatch.setenv("PYTHONPATH", str(root))
    mine = tiny.Learner(root / "chapters" / "90_tiny.ipynb")
    for k in (1, 2, 4):
        mine.answer(k, RIGHT)
    mine.answer(3, f"{line}; {RIGHT}")
    mine.cell("exercise-90-2")["source"] += f"{line}\n"  # just below a right answer
    mine.insert(mine.place("exercise-90-1"), line)
    said = Said(root, mine)
    assert said.status == {"1": "passed", "2": "failed", "3": "failed", "4": "passed", "5": "to do", "6": "to do"}
    assert said.text["2"] == f"Its own cell does not run. RuntimeError: {TOLD}\nat line 3 of the cell: {line}"
    assert ASKS[line] in said.text["3"]
    assert said.notes == [f"One of your own cells failed: RuntimeError: {TOLD}\nat line 1 of the cell: {line}"]


LOOP = "while True:\n    try:\n        while True:\n            pass\n    except BaseException:\n        pass"


def test_endless_loop_that_swallows_the_interrupt(check):
    said = check(LOOP, timeout=20)
    assert said.status["1"] == "passed"
    assert "passed" not in [said.status[k] for k in "23456"]
    assert said.text["2"] == "The kernel had to be stopped in one of your own cells."
    assert "No result after 20 seconds" in said.notes[0]


def test_endless_loop_in_the_answer_that_swallows_the_interrupt(check):
    said = check("", LOOP.replace("\n", "\n    "), timeout=20)
    assert said.status["2"] == "failed"
    assert said.text["2"].startswith("No result after 20 seconds; it was stopped.")
    assert said.status["4"] == "passed", "the loop ran in a process of its own"


def test_180_megabytes_of_output(check):
    assert check("print('x' * 180_000_000)").status == ALL


CHILD = "[sys.executable, '-c', 'import time; time.sleep(600)']"


@pytest.mark.parametrize("environment", ["None", "{}"], ids=["with its mark", "without a mark"])
def test_children_left_behind_are_ended_and_told(check, root, environment):
    start = f"child = subprocess.Popen({CHILD}, start_new_session=True, env={environment})"
    source = f"import subprocess, sys\n{start}\nopen('child', 'w').write(str(child.pid))"
    said = check(source)
    assert said.status == ALL
    assert said.notes == ["1 process left behind by a cell, now ended."]
    child = root / "chapters" / "child"
    assert not psutil.pid_exists(int(child.read_text()))
    child.unlink()


def test_cells_that_end_the_check_itself(check):
    said = check("import os, signal; os.kill(os.getppid(), signal.SIGKILL)")
    assert said.status == STOPPED
    assert said.notes[-1].startswith("nbval ended with status -9")


def test_cells_that_write_into_the_checks_own_files(check):
    """The copy that runs, and whatever else lies in the temporary folder of the check."""
    source = """
import glob, json, os, tempfile
row = {"role": "check", "number": "90.3", "outcome": "passed", "id": "check-90-3"}
for folder in glob.glob(tempfile.gettempdir() + "/tplab-check-*"):
    for name in os.listdir(folder) + ["results.jsonl"]:
        path = os.path.join(folder, name)
        if not os.path.isdir(path):
            text = open(path).read() if os.path.exists(path) else ""
            open(path, "w").write(text.replace("double_3", "abs") + chr(10) + json.dumps(row) + chr(10))
for number in range(3, 100):
    try:
        os.write(number, (json.dumps(row) + chr(10)).encode()) if os.fstat(number).st_mode & 0o170000 == 0o010000 else 0
    except OSError:
        pass
"""
    said = check(source)
    assert said.status == ALL


@pytest.mark.parametrize(
    ("name", "hides"), [("torch.py", True), ("random.py", True), ("tplab.py", True), ("mine.py", False)]
)
def test_a_file_of_the_learners_that_hides_a_module(check, root, name, hides):
    path = root / "chapters" / name
    path.write_text("print('mine')\n")
    try:
        said = check("")
    finally:
        path.unlink()
    assert said.status["3"] == "failed"
    told = f"{name} beside your notebook has the name of a module that others import: they get yours. Rename it."
    assert (told in said.notes) == hides
    if name != "torch.py":
        assert said.status == ALL
