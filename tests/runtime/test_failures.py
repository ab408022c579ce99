"""However a run goes wrong, it ends with a report that names the rank, the collective and the line.

A learner's first hour is made of these: each case is a mistake that somebody made. None of the programs that wait ends
by itself. `launch` gets a timeout only so that a missing diagnosis fails the test.
"""

import ctypes
import os
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
    assert report.startswith("rank 1 failed:")
    assert f'test_failures.py", line {line_of(program, 2)}, in program' in report
    assert "rank 1 never joined all_reduce #1 ([4, 8] float32, sum); ranks 0, 2 are waiting in it." in report
    assert "rank 1: has raised an error" in report
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
    assert f'1. ValueError: no such head\n  at File "{__file__}", line {line_of(fail, 1)}, in fail\n' in report
    assert "2. KeyError: 'bias'" in report
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
    (lambda: os._exit(0), "rank 1 exited with status 0 before its function returned"),
    (lambda: signal.raise_signal(signal.SIGKILL), "rank 1 was ended by SIGKILL (if you did not do that, the machine"),
    (crashes, f"test_failures.py line {line_of(crashes, 1)} in crashes"),
    (lambda: sys.exit("bad flag"), "SystemExit: bad flag"),
]


@pytest.mark.parametrize(("how", "says"), DEATHS)
def test_a_rank_that_dies_is_named_and_the_rank_that_lost_it_is_not_blamed(how: Callable, says: str) -> None:
    error = fails(exits(how))
    assert error.rank == 1
    assert says in str(error)
    assert ("rank 1 was ended by SIGSEGV" in str(error)) == (how is crashes)
    assert "rank 0: is waiting in all_reduce #2 ([2] float32, sum), called at" in str(error)
    assert "Connection" not in str(error)


def test_a_result_that_cannot_travel_names_its_rank_and_type() -> None:
    error = fails(lambda: (i for i in range(3)))
    assert error.cause_type == "TypeError"
    assert "rank 0 returned a value (of type generator) that cannot travel" in str(error)


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
    "rank 1 never joined all_reduce #1 ([2] float32, sum) of group [0, 1]; rank 0 is waiting in it.",
    "first if rank == 0 else second)\n          in the group created at",
    "first = dist.new_group([0, 1])\n  rank 1: is waiting in all_reduce #1",
    "second = dist.new_group([0, 1])\n",
    "Some ranks are in more than one group of the same ranks",
]
# fmt: off
CASES = {  # the number of ranks, what each does given its rank, and words of the report
    "a skipped collective":
                        (4, skips_the_second,
                         ["rank 2 never joined all_reduce #2 ([4, 8] float32, sum); ranks 0, 1, 3 are waiting in it.",
                          "rank 2: has returned",
                          f"test_failures.py line {line_of(skips_the_second, 3)} in skips_the_second"]),
    "two receives":     (2, lambda rank: dist.recv(ones(2), src=1 - rank),
                         ["rank 1 never sends to rank 0 (message #1); rank 0 is waiting in recv from rank 1 ([2]",
                          "have one side send first"]),
    "two large sends":  (2, lambda rank: dist.send(ones(1 << 20), dst=1 - rank), ["rank 1 never receives from rank 0"]),
    "another tag":      (2, another_tag, ["rank 0 sends to rank 1 with tag 1, but rank 1 expects a message with tag"]),
    "a lost message":   (2, sends_and_returns,
                         ["rank 0 began to send message #1 to rank 1 and has returned; rank 1 is waiting in recv",
                          "Keep the handle that dist.isend returns"]),
    "one absent, from a functional collective":
                        (2, lambda rank: rank or functional.all_reduce(ones(3), "sum", dist.group.WORLD) + 1,
                         ["rank 1 never joined all_reduce #1 ([3] float32, sum)"]),
    "new_group or a barrier":
                        (3, new_group_skipped_for_a_barrier,
                         ["rank 1 never joined new_group #1 (ranks [0, 1, 2]); ranks 0, 2 are waiting",
                          "ranks 0, 2 never joined barrier #1; rank 1 is waiting in it."]),
    "new_group by its members":
                        (4, new_group_by_its_members,
                         ["the ranks don't create the same groups in the same order (new_group #1):",
                          "rank 0: new_group #1 (ranks [0, 1]) at", "rank 3: new_group #1 (ranks [2, 3]) at"]),
    "a receive from any rank":
                        (3, receive_from_any_after_the_last_message,
                         ["none of ranks 1, 2 sends to rank 0 with tag 0; rank 0 is waiting in recv"]),
    "crossed groups":   (3, crossed_groups, CROSSED),
    "a thread that receives":
                        (2, joins_a_thread_that_receives,
                         ["rank 1 never sends to rank 0 (message #1); rank 0 is waiting in recv from rank 1"]),
    "another shape, in a program that catches its error":
                        (2, catches_its_error,
                         ["collective #1 is not the same on all ranks", "rank 0: all_reduce #1 ([2] float32, sum) at",
                          "rank 1: all_reduce #1 ([3] float32, sum) at"]),
    "another shape in a line that agreed before":
                        (2, agrees_until_the_last_time, ["rank 1: all_reduce #300 ([3] float32, sum) at"]),
    "another collective":
                        (2, lambda rank: dist.broadcast(ones(2), src=0) if rank else dist.all_reduce(ones(2)),
                         ["rank 1: broadcast #1 ([2] float32, root 0) at",
                          "rank 0: all_reduce #1 ([2] float32, sum) at"]),
    "another message":  (2, lambda rank: dist.recv(ones(2), src=0) if rank else dist.send(ones(3), dst=1),
                         ["message #1 from rank 0 to rank 1 is not the same on both sides"]),
}
# fmt: on


@pytest.mark.parametrize(("p", "program", "says"), CASES.values(), ids=CASES)
def test_a_deadlock_or_a_difference_between_the_ranks_is_explained_with_the_line(
    p: int, program: Callable[[int], object], says: list[str]
) -> None:
    error = fails(lambda: program(dist.get_rank()), p)
    assert isinstance(error, tplab.Deadlock)
    report = str(error)
    assert "not finished after" not in report
    assert [words for words in says if words not in report] == []
    first = program.__code__.co_firstlineno
    last = max(line for *_, line in program.__code__.co_lines() if line)
    assert any(f"test_failures.py line {line} in " in report for line in range(first, last + 1))


def hangs() -> None:
    while True:
        pass


def test_a_rank_that_hangs_in_python_is_named_with_its_line_when_time_is_up() -> None:
    error = fails(lambda: hangs() if dist.get_rank() else dist.all_reduce(ones(2)), timeout=2)
    assert isinstance(error, tplab.Deadlock)
    assert "not finished after 2 s (timeout=2)" in str(error)
    lines = [f"rank 1: runs Python at {__file__} line {line_of(hangs, offset)} in hangs" for offset in (1, 2)]
    assert any(line in str(error) for line in lines)
    error = fails(hangs, timeout=1)
    assert not isinstance(error, tplab.Deadlock)
    assert error.cause_type == "timeout"


def test_a_rank_outside_a_group_that_did_not_create_it_is_named_although_gloo_goes_on() -> None:
    report = str(fails(lambda: group_created_by_its_members_alone(dist.get_rank()), 3))
    assert "rank 2 never joined new_group #2 (ranks [0, 1])." in report
    line = line_of(group_created_by_its_members_alone, 3)
    assert f"line {line} in group_created_by_its_members_alone" in report


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
    assert "over 900 more calls in between" in report
    assert "RecursionError: maximum recursion depth exceeded" in report
    assert "more lines ..." in report
    assert len(report.splitlines()) < 60 + 120


# What would end in silence, or in a crash


def test_a_tensor_that_is_not_one_block_of_memory_is_refused() -> None:
    error = fails(lambda: dist.all_reduce([ones(1).expand(4), ones(4, 8)[:, ::2]][dist.get_rank()]))
    assert error.cause_type == "ValueError"
    assert str(error).count("fill one block of memory") == 2


def test_a_collective_on_a_group_one_is_no_member_of_is_an_error() -> None:
    def program() -> None:
        group = dist.new_group([0])
        dist.all_reduce(ones(2), group=group)

    error = fails(program)
    assert error.rank == 1
    assert "rank 1 calls all_reduce on a group that it is no member of" in str(error)
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
    assert str(error).startswith("rank 1 exited with status 3")


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
