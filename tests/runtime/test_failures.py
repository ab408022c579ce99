"""However a run goes wrong, it ends with a report that names the rank, the collective and the line.

A learner's first hour is made of these: each case is a mistake that somebody made. None of the programs that wait ends
by itself. `launch` gets a timeout only so that a missing diagnosis fails the test.
"""

import ctypes
import os
import re
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import ones
from torch.distributed import _functional_collectives as functional

import tplab
from tests import saying
from tplab.runtime import watch


def fails(program: Callable[[], object], p: int = 2, timeout: float = 60.0) -> tplab.RankError:
    with pytest.raises(tplab.RankError) as caught:
        tplab.launch(program, p, timeout=timeout)
    return caught.value


def line_of(program: Callable[[], object], offset: int) -> int:
    return program.__code__.co_firstlineno + offset


# One rank fails


def test_an_error_is_reported_with_its_rank_line_and_what_the_others_did() -> None:
    def program() -> None:
        if dist.get_rank() == 1:
            raise ValueError("no such head")
        dist.all_reduce(ones(4, 8))

    error = fails(program, 3)
    assert (error.rank, error.cause_type, error.cause_message) == (1, "ValueError", "no such head")
    report = str(error)
    assert report.startswith("rank 1 ")
    assert f'test_failures.py", line {line_of(program, 2)}, in program' in report
    never_joined = ("\nrank 1 ", "all_reduce #1 ([4, 8] float32, sum)", "ranks 0, 2")
    assert re.search(saying(*never_joined, "\n  rank 1:", "raised"), report)
    assert "tplab/runtime" not in report, "the launcher's own frames are noise"


def test_a_group_of_errors_is_reported_once_with_the_place_of_each() -> None:
    def fail() -> None:
        raise ValueError("no such head")

    def program() -> None:
        try:
            fail()
        except ValueError as error:
            raise ExceptionGroup("two are wrong", [error, KeyError("bias")]) from None

    error = fails(program, 1)
    assert error.cause_type == "ExceptionGroup"
    assert error.cause_message.startswith("two are wrong (2 sub-exceptions)\n")
    report = str(error)
    assert report.count("Traceback") == 1
    place = f'File "{__file__}", line {line_of(fail, 1)}, in fail\n'
    assert re.search(saying("1. ValueError: no such head\n", place, "2. KeyError: 'bias'"), report)
    assert "rank.py" not in report


def exits(how: Callable[[], object]) -> Callable[[], None]:
    def program() -> None:
        dist.barrier()  # both have imported what they need, and rank 0 has only one step to go
        if dist.get_rank() == 1:
            time.sleep(0.3)
            how()
        dist.all_reduce(ones(2))

    return program


def crashes() -> None:
    ctypes.string_at(0)


DEATHS = [
    (lambda: os._exit(0), ["rank 1", "status 0"]),
    (lambda: signal.raise_signal(signal.SIGKILL), ["rank 1", "SIGKILL", "memory"]),
    (crashes, ["rank 1", "SIGSEGV", "test_failures.py", f"line {line_of(crashes, 1)}", "crashes"]),
    (lambda: sys.exit("bad flag"), ["rank 1", "SystemExit: bad flag"]),
]


@pytest.mark.parametrize(("how", "says"), DEATHS)
def test_a_rank_that_dies_is_named_and_the_rank_that_lost_it_is_not_blamed(how: Callable, says: list[str]) -> None:
    error = fails(exits(how))
    assert error.rank == 1
    waits = ("\n  rank 0:", "all_reduce #2 ([2] float32, sum)", "test_failures.py")
    assert re.search(saying(*says, *waits), str(error))
    assert ("SIGSEGV" in str(error)) == (how is crashes)
    assert "Connection" not in str(error)


def test_a_result_that_cannot_travel_names_its_rank_and_type() -> None:
    error = fails(lambda: (i for i in range(3)))
    assert error.cause_type == "TypeError"
    assert re.search(saying("rank 0", "type generator"), error.cause_message)


# Ranks that wait for what never comes, or call something else


def skips_the_second(rank: int) -> None:
    dist.all_reduce(ones(2))
    if rank != 2:
        dist.all_reduce(ones(4, 8))


def sends_and_returns(rank: int) -> None:
    if rank == 0:
        dist.isend(ones(2**20), 1)
        return
    time.sleep(0.5)  # the sender has gone
    dist.recv(torch.empty(2**20), 0)


def catches_its_error(rank: int) -> None:
    try:
        dist.all_reduce(ones(2 + rank))
    except Exception as error:
        print("caught", error)
    dist.barrier()


def agrees_until_the_last_time(rank: int) -> None:
    for turn in range(300):  # the slots of the board have been used more than once
        dist.all_reduce(ones(3 if (turn, rank) == (299, 1) else 2))


def new_group_skipped_for_a_barrier(rank: int) -> None:
    if rank != 1:
        dist.new_group([0, 1, 2])
    dist.barrier()


def new_group_by_its_members(rank: int) -> None:
    dist.all_reduce(ones(2), group=dist.new_group([0, 1] if rank < 2 else [2, 3]))


def receive_from_any_after_the_last_message(rank: int) -> None:
    if rank:
        dist.send(ones(2), 0)
        return
    for _ in range(3):
        dist.recv(ones(2))


def another_tag(rank: int) -> None:
    for tag in (0, 1 + rank):
        dist.recv(ones(2), 0, tag=tag) if rank else dist.send(ones(2), 1, tag=tag)


def crossed_groups(rank: int) -> None:
    first = dist.new_group([0, 1])
    second = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(ones(2), group=first if rank == 0 else second)
        dist.all_reduce(ones(2), group=second if rank == 0 else first)


def joins_a_thread_that_receives(rank: int) -> None:
    thread = threading.Thread(target=lambda: dist.recv(ones(2), 1 - rank))
    thread.start()
    thread.join()


def group_created_by_its_members_alone(rank: int) -> None:
    dist.new_group([0, 2])
    if rank < 2:
        dist.all_reduce(ones(2), group=dist.new_group([0, 1]))
    dist.barrier()


CROSSED = [
    ("rank 1", "all_reduce #1 ([2] float32, sum)", "group [0, 1]", "rank 0"),
    ("rank 0:", "all_reduce #1", "first if rank == 0 else second)\n", "first = dist.new_group([0, 1])"),
    ("rank 1:", "all_reduce #1", "first if rank == 0 else second)\n", "second = dist.new_group([0, 1])"),
    ("one group",),
]
# fmt: off
CASES = {  # the number of ranks, what each does given its rank, and what single lines of the report say
    "a skipped collective":
                        (4, skips_the_second,
                         [("rank 2", "all_reduce #2 ([4, 8] float32, sum)", "ranks 0, 1, 3"), ("rank 2:", "returned"),
                          ("test_failures.py", f"line {line_of(skips_the_second, 3)}", "skips_the_second")]),
    "two receives":     (2, lambda rank: dist.recv(ones(2), src=1 - rank),
                         [("rank 1", "rank 0", "message #1", "rank 0", "recv", "rank 1", "[2] float32"),
                          ("dist.batch_isend_irecv",)]),
    "two large sends":  (2, lambda rank: dist.send(ones(1 << 20), dst=1 - rank),
                         [("rank 1", "rank 0", "message #1", "rank 0", "send", "rank 1", "[1048576] float32")]),
    "another tag":      (2, another_tag, [("rank 0", "rank 1", "tag 1", "rank 1", "tag 2")]),
    "a lost message":   (2, sends_and_returns,
                         [("rank 0", "message #1", "rank 1", "returned", "rank 1", "recv"),
                          ("dist.isend", "wait()")]),
    "one absent, from a functional collective":
                        (2, lambda rank: rank or functional.all_reduce(ones(3), "sum", dist.group.WORLD) + 1,
                         [("rank 1", "all_reduce #1 ([3] float32, sum)", "rank 0")]),
    "new_group or a barrier":
                        (3, new_group_skipped_for_a_barrier,
                         [("rank 1", "new_group #1 (ranks [0, 1, 2])", "ranks 0, 2"),
                          ("ranks 0, 2", "barrier #1", "rank 1")]),
    "new_group by its members":
                        (4, new_group_by_its_members,
                         [("order", "new_group #1"), ("rank 0: new_group #1 (ranks [0, 1])",),
                          ("rank 3: new_group #1 (ranks [2, 3])",)]),
    "a receive from any rank":
                        (3, receive_from_any_after_the_last_message,
                         [("ranks 1, 2", "rank 0", "tag 0", "rank 0", "recv")]),
    "crossed groups":   (3, crossed_groups, CROSSED),
    "a thread that receives":
                        (2, joins_a_thread_that_receives,
                         [("rank 1", "rank 0", "message #1", "rank 0", "recv", "rank 1")]),
    "another shape, in a program that catches its error":
                        (2, catches_its_error,
                         [("collective #1",), ("rank 0: all_reduce #1 ([2] float32, sum)",),
                          ("rank 1: all_reduce #1 ([3] float32, sum)",)]),
    "another shape in a line that agreed before":
                        (2, agrees_until_the_last_time, [("rank 1: all_reduce #300 ([3] float32, sum)",)]),
    "another collective":
                        (2, lambda rank: dist.broadcast(ones(2), src=0) if rank else dist.all_reduce(ones(2)),
                         [("rank 1: broadcast #1 ([2] float32, root 0)",),
                          ("rank 0: all_reduce #1 ([2] float32, sum)",)]),
    "another message":  (2, lambda rank: dist.recv(ones(2), src=0) if rank else dist.send(ones(3), dst=1),
                         [("message #1", "rank 0", "rank 1", "same")]),
}
# fmt: on


@pytest.mark.parametrize(("p", "program", "says"), CASES.values(), ids=CASES)
def test_a_deadlock_or_a_difference_between_the_ranks_is_explained_with_the_line(
    p: int, program: Callable[[int], object], says: list[tuple[str, ...]]
) -> None:
    error = fails(lambda: program(dist.get_rank()), p)
    assert isinstance(error, tplab.Deadlock)
    report = str(error)
    assert error.cause_type != "timeout"
    lines = re.split(r"\n(?!   )", report)  # a line that is indented further goes on with the one before
    assert [parts for parts in says if not any(re.search(saying(*parts), line) for line in lines)] == []
    first = program.__code__.co_firstlineno
    last = max(line for *_, line in program.__code__.co_lines() if line)
    places = (saying("test_failures.py", f"line {line}") + r"\b" for line in range(first, last + 1))
    assert any(re.search(place, report) for place in places)


def hangs() -> None:
    while True:
        pass


def test_a_rank_that_hangs_in_python_is_named_with_its_line_when_time_is_up() -> None:
    error = fails(lambda: hangs() if dist.get_rank() else dist.all_reduce(ones(2)), timeout=2)
    assert isinstance(error, tplab.Deadlock)
    patterns = [saying("2 s", "timeout=2", "rank 1:", __file__, f"line {line_of(hangs, at)}", "hangs") for at in (1, 2)]
    assert any(re.search(pattern, str(error)) for pattern in patterns)
    error = fails(hangs, timeout=1)
    assert not isinstance(error, tplab.Deadlock)
    assert error.cause_type == "timeout"


def test_a_rank_outside_a_group_that_did_not_create_it_is_named_although_gloo_goes_on() -> None:
    report = str(fails(lambda: group_created_by_its_members_alone(dist.get_rank()), 3))
    line = f"line {line_of(group_created_by_its_members_alone, 3)}"
    assert re.search(
        saying("rank 2", "new_group #2 (ranks [0, 1])", line, "group_created_by_its_members_alone"), report
    )


# Long reports


def test_long_reports_are_shortened() -> None:
    def recursion(n: int = 0) -> int:
        return recursion(n + 1)

    def program() -> None:
        try:
            recursion()
        except RecursionError:
            raise ValueError("\n".join(map(str, range(5000))))  # noqa: B904 (shows both)

    report = str(fails(program, 1))
    assert re.search(saying("900", "calls", "RecursionError: maximum recursion depth", "... 4900", "lines"), report)
    assert len(report.splitlines()) < 60 + 120


# What would end in silence, or in a crash


def test_a_tensor_that_is_not_one_block_of_memory_is_refused() -> None:
    error = fails(lambda: dist.all_reduce([ones(1).expand(4), ones(4, 8)[:, ::2]][dist.get_rank()]))
    assert error.cause_type == "ValueError"
    for shape_and_strides in ("[4]", "[0]"), ("[4, 4]", "[8, 2]"):
        assert re.search(saying("all_reduce", *shape_and_strides, "memory", "x.contiguous()"), str(error))


def test_a_collective_on_a_group_one_is_no_member_of_is_an_error() -> None:
    def program() -> None:
        group = dist.new_group([0])
        dist.all_reduce(ones(2), group=group)

    error = fails(program)
    assert error.rank == 1
    assert re.search(saying("rank 1", "all_reduce", "member"), error.cause_message)
    assert "Invalid process group" not in str(error)


def test_ranks_that_move_while_they_are_looked_at_are_not_called_deadlocked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    same, moved = [0, 0], tmp_path / "moved"

    def progress(_: watch.Watch) -> object:
        """Nothing moves, then, while the ranks are read one after another, something does."""
        if same:
            return same.pop()
        moved.touch()
        return object()

    def until_it_has_moved() -> None:
        while not moved.exists():
            time.sleep(0.05)

    monkeypatch.setattr(watch, "SETTLED_SECONDS", 0.0)
    monkeypatch.setattr(watch, "deadlocked", lambda states, can_act=(): [0, 1])
    monkeypatch.setattr(watch.Watch, "_progress", progress)
    assert tplab.launch(until_it_has_moved, 2) == [None, None]


def test_an_end_that_is_seen_late_is_still_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    read_exit = watch.Watch._read_exit
    started = time.monotonic()

    def late(self, rank) -> None:
        if rank.pid is None or time.monotonic() - started > 3:
            read_exit(self, rank)

    monkeypatch.setattr(watch.Watch, "_read_exit", late)
    error = fails(exits(lambda: os._exit(3)))
    assert error.rank == 1
    assert re.search(saying("rank 1", "status 3"), str(error).partition("\n")[0])


# Programs that are right. Each waits longer than a deadlock must last to be called one.


def a_thread_receives_while_another_computes(rank: int) -> None:
    thread = threading.Thread(target=lambda: dist.recv(ones(2), 1 - rank, tag=7))
    thread.start()
    for _ in range(2):
        time.sleep(1.2)
        dist.all_reduce(ones(3))
    dist.send(ones(2), 1 - rank, tag=7)
    thread.join()


def receives_from_slow_ranks(rank: int) -> None:
    if rank == 0:
        dist.recv(ones(2))
        dist.recv(ones(2))
    else:
        time.sleep(1.2 * rank)
        dist.send(ones(2), 0)


@pytest.mark.parametrize(
    ("p", "program"), [(2, a_thread_receives_while_another_computes), (3, receives_from_slow_ranks)]
)
def test_programs_that_are_right_are_not_called_deadlocks(p: int, program: Callable[[int], None]) -> None:
    assert tplab.launch(lambda: program(dist.get_rank()), p) == [None] * p


def test_a_timer_may_end_a_deadlock_but_threads_that_only_serve_others_cannot() -> None:
    def program() -> None:
        from tplab.runtime.rank import _any_can_act

        def others_can_act() -> bool:
            return _any_can_act(threading.get_ident(), lambda thread: False)

        timer = threading.Timer(3600, dist.barrier)
        timer.start()
        end = time.monotonic() + 300
        while not others_can_act():
            assert time.monotonic() < end, "the timer counts as stuck"
        timer.cancel()
        timer.join()

        never = threading.Event()
        package = {"never": never}
        exec(compile("def wait(): never.wait(3600)", sysconfig.get_path("purelib") + "/bar.py", "exec"), package)
        threading.Thread(target=package["wait"], daemon=True).start()
        threading.Thread(target=never.wait, daemon=True).start()
        ThreadPoolExecutor(1).submit(int).result()
        assert not any(others_can_act() for _ in range(100))

    tplab.launch(program, 1)
