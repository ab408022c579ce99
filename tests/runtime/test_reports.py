"""What a report or the output contains, and what it leaves out."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

import tplab
from tplab.runtime import transport, watch
from tplab.runtime.failures import name_cells_in
from tplab.runtime.forkserver import fork_server


def fails(program: Callable[[], object], p: int = 1) -> tplab.RankError:
    with pytest.raises(tplab.RankError) as caught:
        tplab.launch(program, p)
    return caught.value


# Errors


@pytest.fixture
def all_have_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run fails only once all ranks have, so a report has all of them, however late some are."""
    failed = watch.Watch._failed
    monkeypatch.setattr(watch.Watch, "_failed", lambda self, rank: all(map(failed, self.ranks)))


@pytest.mark.usefixtures("all_have_failed")
def test_long_reports_are_shortened_and_the_parts_of_an_exception_group_are_listed_with_their_lines() -> None:
    def recursion(n: int = 0) -> int:
        return recursion(n + 1)

    def long_message() -> None:
        raise ValueError("\n".join(map(str, range(5000))))

    def group() -> None:
        errors = [ValueError("first")]
        try:
            raise KeyError("second")
        except KeyError as error:
            errors.append(error)
        raise ExceptionGroup("several", errors)

    def program() -> None:
        dist.barrier()
        (recursion, recursion, long_message, group)[dist.get_rank()]()

    report = str(fails(program, 4))
    assert "ranks 0, 1 failed:" in report, "both ranks have the same report"
    assert len(report.splitlines()) < 60 + 120 + 30
    assert "over 900 more calls in between" in report
    assert "RecursionError: maximum recursion depth exceeded" in report
    assert "more lines ..." in report
    assert "ExceptionGroup: several (2 sub-exceptions)\n  1. ValueError: first\n  2. KeyError: 'second'" in report
    assert f'at File "{__file__}", line {group.__code__.co_firstlineno + 3}, in group' in report


@pytest.mark.usefixtures("all_have_failed")
def test_many_ranks_with_errors_of_their_own_are_counted() -> None:
    def program() -> None:
        dist.barrier()
        raise ValueError(f"rank {dist.get_rank()} is wrong")

    report = str(fails(program, 6))
    assert report.count("Traceback") == 4
    assert "ranks 4, 5 failed, too, each in its own way." in report


def test_a_cell_has_its_name_in_syntax_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    file = os.path.join(tempfile.gettempdir(), "ipykernel_17", "42.py")
    monkeypatch.setattr("tplab.runtime.failures._cell_names", {file: "cell [3]"})
    assert name_cells_in(f'  File "{file}", line 2\n    x = = 1') == "  cell [3], line 2\n    x = = 1"


# What can't be sent


def test_what_cannot_be_sent_is_named() -> None:
    lock = threading.Lock()
    holder = SimpleNamespace(inner=[1, lock])
    cases: list[tuple[Callable[..., object], dict[str, Any], str]] = [
        (lambda a, b: None, {"args": (1, {"x": [lock]})}, "args[1]['x'][0], of type lock, can't be sent"),
        (lambda x: None, {"kwargs": {"x": holder}}, "kwargs['x'].inner[1], of type lock, can't be sent"),
        (lambda: lock, {}, "the variable lock that the body of the lambda uses, of type lock, can't be sent"),
        (lambda x=lock: None, {}, "a default value of the lambda, of type lock, can't be sent"),
    ]
    for function, call, says in cases:
        with pytest.raises(TypeError) as caught:
            tplab.launch(function, 2, **call)
        assert says in str(caught.value)


def test_torchs_operators_can_be_sent() -> None:
    aten = torch.ops.aten
    for operator in (torch.ops, aten, aten.add, aten.add.Tensor, aten.relu.default):
        assert transport.loads(transport.dumps(operator)) is operator


# Output, processes and files


def test_a_program_that_closes_stdout_still_returns() -> None:
    ends = [lambda: sys.stdout.close(), lambda: os.close(1), lambda: setattr(sys, "stdout", None)]

    def program() -> int:
        ends[dist.get_rank()]()
        return 7

    assert tplab.launch(program, 3) == [7, 7, 7]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc says which signals a process ignores")
def test_a_process_survives_the_question_from_its_first_instruction_on() -> None:
    """It inherits that from the fork server, so there is no moment at which the question would end it."""
    tplab.launch(dist.get_rank, 1)
    status = Path(f"/proc/{fork_server()._process.pid}/status").read_text()
    ignored = int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn")), 16)
    assert ignored >> (signal.SIGUSR1 - 1) & 1


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, a process can't adopt its children's children")
def test_a_process_in_a_session_of_its_own_ends_with_the_run() -> None:
    def program() -> int:
        script = "import subprocess as s, time; print(s.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
        child = subprocess.Popen(
            [sys.executable, "-c", script], start_new_session=True, stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        return int(child.stdout.readline())

    (pid,) = tplab.launch(program, 1)
    if psutil.pid_exists(pid):
        psutil.wait_procs([psutil.Process(pid)], timeout=30)
    assert not psutil.pid_exists(pid)
