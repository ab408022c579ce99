"""A kernel that loses its ports is started again; what a run leaves behind is ended, and only the learner's is told."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from tplab.course.grading.check_notebook import NO_START, Note, Verdict, check_notebook
from tplab.course.grading.run import Run, end_all
from tplab.course.notebooks.cells import Cell
from tplab.course.notebooks.kernels import PACKAGE_ROOT
from tplab.course.notebooks.outputs import execute

SLEEP = "import time; time.sleep(1000)"


@pytest.fixture
def started() -> Iterator[list[psutil.Process]]:
    """Processes for a test to end; `OURS` in their command line makes them look like the runtime's."""
    processes = [subprocess.Popen([sys.executable, "-c", SLEEP, name]) for name in ("a cell's", "tplab.runtime")]
    yield [psutil.Process(process.pid) for process in processes]
    for process in processes:
        process.kill()
        process.wait()


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def test_all_are_ended_and_those_of_a_cell_counted(started: list[psutil.Process]) -> None:
    assert end_all(lambda: alive(started)) == 1
    assert alive(started) == []


def test_a_process_that_is_ending_already_is_nobodys(started: list[psutil.Process]) -> None:
    """Linux takes the command line away first: a rank that was just killed has none."""
    for process in started:
        process.cmdline = list  # an empty one
    assert end_all(lambda: alive(started)) == 0
    assert alive(started) == []


LAUNCHER = """
import runpy, sys
from pathlib import Path
here = Path(__file__).parent
starts = here / "starts"
starts.write_text(starts.read_text() + "x")
if len(starts.read_text()) <= {fails}:
    sys.exit("Address already in use")
sys.path[:] = [folder for folder in sys.path if folder != str(here)]
runpy.run_module("ipykernel_launcher", run_name="__main__")
"""


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Path]:
    """kernels(fails): as many kernels end at once as if a port were taken; returns the file that counts all starts."""

    def make(fails: int) -> Path:
        (tmp_path / "ipykernel_launcher.py").write_text(LAUNCHER.format(fails=fails))
        (tmp_path / "starts").write_text("")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(PACKAGE_ROOT)]))
        monkeypatch.setattr(
            "tplab.course.notebooks.kernels.PACKAGE_ROOT", tmp_path
        )  # which stands first in a kernel's path
        return tmp_path / "starts"

    return make


def test_kernel_that_lost_its_ports_is_started_again(kernels, tmp_path: Path) -> None:
    starts = kernels(fails=2)
    (row,) = Run([Cell("code", "6 * 7", "a", {"tags": ["nbval-ignore-output"]})], tmp_path)
    assert row["outcome"] == "passed"
    assert starts.read_text() == "xxx"


def test_a_chapters_kernel_that_lost_its_ports_is_started_again(kernels, tmp_path: Path) -> None:
    starts = kernels(fails=1)
    done = execute(new_notebook(cells=[new_code_cell("6 * 7")]), tmp_path)
    assert done.cells[0].outputs[0].data["text/plain"] == "42"
    assert starts.read_text() == "xx"


def test_kernel_that_never_starts_is_told_as_that(kernels, tmp_path: Path) -> None:
    starts = kernels(fails=100)
    source = {"exercise-90-1": "x = 1", "check-90-1": 'check("90.1", x)'}
    marks = {"exercise-90-1": {"exercise": "90.1"}, "check-90-1": {"check": "90.1", "title": "One"}}
    cells = [Cell("code", source[id], id, {"tplab": marks[id]}) for id in source]
    said = list(check_notebook(cells, tmp_path / "mine.ipynb", learner=cells))
    assert [(one.status, one.text) for one in said if isinstance(one, Verdict)] == [("not run", NO_START)]
    assert [one for one in said if isinstance(one, Note)] == []
    assert starts.read_text() == "xxx"
