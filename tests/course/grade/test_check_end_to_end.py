"""`tplab check` as a learner starts it: one run on a notebook with all that a kernel can be put through."""

import hashlib
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from tests import saying
from tests.course import tiny

COUNT = 14
CHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
open("child", "w").write(str(child.pid))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What one run says: `status` and `text` by exercise, `notes`, and the files of the learner's `folder`."""
    root = tmp_path_factory.mktemp("tiny")
    folder = tmp_path_factory.mktemp("mine")
    tiny.make_unexecuted(root, tiny.source(COUNT))
    mine = tiny.Learner(root / "chapters" / "90_tiny.ipynb")
    (folder / "my_helpers.py").write_text("def twice(x):\n    return 2 * x\n")
    mine.cell("exercise-90-1")["source"] = "from my_helpers import twice\ndef double_1(x):\n    return twice(x)"
    mine.answer(2, "print('debug', x)\n    return 2 * x")
    mine.answer(3, "return x + 2")
    mine.cell("check-90-3")["source"] = '"Exercise 90.3 passed: double_3\\n  Right: the value."'
    mine.answer(4, "return x + 2")
    mine.answer(5, "y = 2\n    return helper(x)")
    mine.insert(mine.place("exercise-90-5"), "def helper(x):\n    return x + None")
    mine.answer(6, "while True: pass")
    mine.answer(7, "return 2 * x")
    mine.cell("exercise-90-7")["source"] += "double_7.__module__ = 'tplab.tensor'"
    mine.answer(9, "return undefined")
    mine.answer(10, "return double_8(x)")
    mine.insert(mine.place("exercise-90-11"), CHILD)
    mine.answer(11, "return 2 * x")
    mine.answer(12, "import os; os._exit(0)")
    mine.answer(13, "return 2 * x")
    path = mine.save(folder / "90_mine.ipynb")
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    where = ["--root", str(root), "--notebook", str(path)]
    command = [sys.executable, "-m", "tplab", "check", "90", *where, "--timeout", "9"]
    environment = os.environ | {"PYTHONPATH": str(root), "COLUMNS": "200", "PYTEST_ADDOPTS": "--nonsense"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    print(done.stdout, done.stderr)
    told = re.split(r"^. 90\.(\d+) +Double \d+ +(.+?) *$", done.stdout, flags=re.MULTILINE)
    return SimpleNamespace(
        code=done.returncode, errors=done.stderr, out=done.stdout, folder=folder,
        status=dict(zip(told[1::3], told[2::3], strict=True)),
        text={number: " ".join(text.split()) for number, text in zip(told[1::3], told[3::3], strict=True)},
        unchanged=before == hashlib.sha256(path.read_bytes()).hexdigest(),
    )  # fmt: skip


def test_every_exercise_has_a_verdict(run):
    assert run.errors == ""
    assert run.code == 1
    assert f"3 of {COUNT}" in run.out
    status = dict(run.status)
    assert re.match(saying("waiting", "90.8"), status.pop("10"))
    passed = dict.fromkeys(("1", "2", "11"), "passed")  # with a file beside the notebook, and with prints
    failed = dict.fromkeys(("3", "4", "5", "6", "7", "9", "12"), "failed")
    assert status == {"8": "to do"} | passed | failed | dict.fromkeys(("13", "14"), "not run")


def test_the_reports_name_what_happened_and_the_learners_cells(run):
    for number, says in {
        "3": saying("is 5."),  # whatever the notebook's own check says
        "5": saying("90.5, line 3, in double_5", "return helper(x)", "line 2, in helper"),
        "6": saying("9 seconds"),
        "7": saying("tplab", "double_7"),
        "9": saying("'undefined'"),
        "12": saying("kernel"),  # noticed before the cell's time is up
        "13": saying("90.12"),
    }.items():
        assert re.search(says, run.text[number]), number
    assert "ipykernel" not in run.out


def test_nothing_is_left_and_the_notebook_is_unchanged(run):
    child = int((run.folder / "child").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    assert run.unchanged
    assert sorted(path.name for path in run.folder.iterdir() if path.suffix) == ["90_mine.ipynb", "my_helpers.py"]
