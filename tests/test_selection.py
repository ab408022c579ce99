"""`tests/selection.py`: the daily shares add up to everything, and a change reaches the tests that depend on it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import ROOT
from tests.selection import Files, changed_since
from tplab.common.imports import ImportGraph

FUNCTIONS = """
import pytest

def test_plain(): pass

@pytest.mark.nightly
def test_at_night(): pass

@pytest.mark.share(4)
@pytest.mark.parametrize("n", range(10))
def test_shared(n): pass

@pytest.mark.share(9)
@pytest.mark.parametrize("n", range(3))
def test_fewer_than_its_shares(n): pass
"""
WHOLE_FILE = """
import pytest

pytestmark = pytest.mark.share(3)

def test_a(): pass
def test_b(): pass
def test_c(): pass
def test_d(): pass

@pytest.mark.nightly
def test_at_night_too(): pass
"""


def collected(folder: Path, *options: str) -> set[str]:
    """The tests in a folder that pytest selects."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-c", os.devnull]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run([*command, *options], cwd=folder, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return set(re.findall(r"^\S+::(\S+)$", run.stdout, re.MULTILINE))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("shares")
    shutil.copy(ROOT / "tests" / "conftest.py", made)
    (made / "test_functions.py").write_text(FUNCTIONS)
    (made / "test_whole_file.py").write_text(WHOLE_FILE)
    return made


def test_daily_shares_take_turns_and_add_up_to_everything_but_the_nightly_tests(folder: Path) -> None:
    everything = collected(folder)
    assert len(everything) == 20
    days = [collected(folder, "--part", "daily", "--turn", str(turn)) for turn in range(7, 7 + 4)]
    assert set.union(*days) == everything - {"test_at_night", "test_at_night_too"}
    for day in days:
        assert "test_plain" in day
        assert 2 <= sum(name.startswith("test_shared") for name in day) <= 3
        assert sum(name.startswith("test_fewer") for name in day) == 1
        assert 1 <= len(day & {"test_a", "test_b", "test_c", "test_d"}) <= 2


def test_nightly_part_is_what_the_daily_part_leaves_out(folder: Path) -> None:
    turn = ["--turn", "5"]
    day, night = (collected(folder, "--part", part, *turn) for part in ("daily", "nightly"))
    assert not day & night
    assert day | night == collected(folder)


def test_of_too_many_tests_shares_take_turns(folder: Path) -> None:
    everything = collected(folder)
    shares = [collected(folder, "--at-most", "7", "--turn", str(turn)) for turn in range(4, 4 + 3)]
    assert sorted(test for share in shares for test in share) == sorted(everything)
    assert all(6 <= len(share) <= 7 for share in shares)
    assert collected(folder, "--at-most", "20", "--turn", "1") == everything


REACHED = {  # what changes -> tests that it must reach, and one that it must not
    "a module, through imports": (
        "tplab/tensor/linear.py",
        ["tests/tensor/test_linear.py", "tests/gpt/test_model.py"],
        "tests/common/test_units.py",
    ),
    "a module, through its room": (
        "tplab/tensor/rotary.py", ["tests/tensor/test_attention.py"], "tests/tensor/test_cross_entropy.py",
    ),
    "a module, through ranks": ("tplab/runtime/rank.py", ["tests/tensor/test_linear.py"], "tests/common/test_units.py"),
    "a program that a test starts by its name": (
        "tplab/capstone/__main__.py", ["tests/capstone/test_main.py"], "tests/tensor/test_linear.py",
    ),
    "any module": ("tplab/tensor/linear.py", ["tests/test_architecture.py"], "tests/common/test_files.py"),
    "a module, through emulated GPUs": (
        "tplab/runtime/stream_watch.py", ["tests/emulated_gpu/test_on_emulated_gpus.py"], "tests/common/test_files.py",
    ),
    "the test itself": ("tests/tensor/test_linear.py", ["tests/tensor/test_linear.py"], "tests/tensor/test_mlp.py"),
    "a file that a test reads": ("README.md", ["tests/test_house.py"], "tests/tensor/test_linear.py"),
    "a chapter's source": (
        "solutions/04_parallel_linear.py",
        ["tests/course/test_chapters.py::test_wrong_answer_is_caught[4.1 no bias]"],
        "tests/course/test_chapters.py::test_wrong_answer_is_caught[5.2 no bias]",
    ),
    "a chapter's check": (
        "tplab/course/exercises/ch04/checks.py",
        ["tests/course/test_chapters.py::test_right_answer_passes[4.1]"],
        "tests/course/test_chapters.py::test_right_answer_passes[9.1]",
    ),
    "the driver of all checks": (
        "tplab/course/checks/cases.py",
        ["tests/course/test_chapters.py::test_right_answer_passes[4.1]"],
        "tests/tensor/test_linear.py",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changed", "reached", "not_reached"), REACHED.values(), ids=REACHED)
def test_change_reaches_the_tests_that_depend_on_it(changed: str, reached: list[str], not_reached: str) -> None:
    assert (ROOT / changed).exists()
    files = Files(ImportGraph(ROOT, "tplab", "tests", "benchmarks", mentions=ROOT / "tests"), {ROOT / changed})

    def reach(test: str) -> bool:
        path = ROOT / test.partition("::")[0]
        assert path.exists()
        return files.reach(SimpleNamespace(nodeid=test, path=path))

    assert [test for test in reached if not reach(test)] == []
    assert not reach(not_reached)


def test_commit_that_does_not_exist_is_refused() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    with pytest.raises(pytest.UsageError, match="--reached no-such-commit: fatal"):
        changed_since("no-such-commit")
