"""What a run of nbval leaves behind is ended, and only what a cell has started is told to the learner."""

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from tplab.course.run import end_all

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
