"""Ranks that wait for each other outside the usual collectives: creating groups, monitored_barrier, messages.

None of these programs ends by itself. `launch` gets a timeout only so that a missing diagnosis fails the test soon.
"""

import threading
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist
from torch import ones

import tplab

LIMIT = 25.0


def report_of(program: Callable[[int], object], p: int) -> str:
    with pytest.raises(tplab.Deadlock) as caught:
        tplab.launch(lambda: program(dist.get_rank()), p, timeout=LIMIT)
    assert "not finished after" not in str(caught.value)
    return str(caught.value)


def new_group_skipped_for_a_barrier(rank: int) -> None:
    if rank != 1:
        dist.new_group([0, 1, 2])
    dist.barrier()


def new_group_by_its_members(rank: int) -> None:
    dist.all_reduce(ones(2), group=dist.new_group([0, 1] if rank < 2 else [2, 3]))


def monitored_barrier_by_one(rank: int) -> None:
    if rank == 0:
        dist.monitored_barrier()


def another_barrier(rank: int) -> None:
    dist.monitored_barrier() if rank else dist.barrier()


def receive_from_any_after_the_last_message(rank: int) -> None:
    if rank:
        dist.send(ones(2), 0)
        return
    for _ in range(3):
        dist.recv(ones(2))


def another_tag(rank: int) -> None:
    for tag in (0, 1 + rank):
        dist.recv(ones(2), 0, tag=tag) if rank else dist.send(ones(2), 1, tag=tag)


def many_groups(rank: int) -> None:
    groups = [dist.new_group([0, 1]) for _ in range(135)]  # as many words as the table had once, and some more
    for group in groups:
        dist.all_reduce(ones(1), group=group)
    if rank == 0:
        dist.all_reduce(ones(1), group=groups[-1])


def crossed_groups(rank: int) -> None:
    first = dist.new_group([0, 1])
    second = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(ones(2), group=first if rank == 0 else second)
        dist.all_reduce(ones(2), group=second if rank == 0 else first)


def crossed_with_the_default_group(rank: int) -> None:
    other = dist.new_group()
    for group in (other, None) if rank == 0 else (None, other):
        dist.all_reduce(ones(2), group=group)


def local_groups_crossed(rank: int) -> None:
    groups = [dist.new_group([0, 1], use_local_synchronization=True) for _ in range(12)]
    for group in groups if rank else reversed(groups):
        dist.monitored_barrier(group=group)


def many_outstanding(rank: int) -> None:
    works = [dist.all_reduce(ones(i + 1), async_op=True) for i in range(600 if rank == 0 else 5)]
    works[5 - rank].wait()


def left_without_waiting(rank: int) -> None:
    if rank < 2:
        work = dist.all_reduce(ones(2), async_op=True)
        if rank == 0:
            work.wait()


def waits_for_the_future_of_a_collective(rank: int) -> None:
    if rank == 0:
        dist.all_reduce(ones(2), async_op=True).get_future().wait()
    else:
        dist.recv(ones(2), 0)


def joins_a_thread_that_receives(rank: int) -> None:
    thread = threading.Thread(target=lambda: dist.recv(ones(2), 1 - rank))
    thread.start()
    thread.join()


ORDER = "the ranks don't create the same groups in the same order (new_group #1):"
SENDS = "rank 1 never sends to rank 0 (message #1); rank 0 is waiting in recv from rank 1 ([2] float32)."
CROSSED = [
    "rank 1 never joined all_reduce #1 ([2] float32, sum) of group [0, 1]; rank 0 is waiting in it.",
    "first if rank == 0 else second)\n          in the group created at",
    "first = dist.new_group([0, 1])\n  rank 1: is waiting in all_reduce #1",
    "second = dist.new_group([0, 1])\n",
    "Some ranks are in more than one group of the same ranks",
]
CROSSED_WITH_DEFAULT = [
    "other = dist.new_group()\n  rank 1: is waiting in all_reduce #1",
    "dist.all_reduce(ones(2), group=group)\n          in the default group",
]
# fmt: off
CASES: dict[Callable[[int], object], tuple[int, list[str]]] = {  # the number of ranks, and words of the report
    new_group_skipped_for_a_barrier:  (3, ["rank 1 never joined new_group #1 (ranks [0, 1, 2]); ranks 0, 2 are waiting",
                                           "ranks 0, 2 never joined barrier #1; rank 1 is waiting in it."]),
    new_group_by_its_members:         (4, [ORDER, "rank 0: new_group #1 (ranks [0, 1]) at",
                                           "rank 3: new_group #1 (ranks [2, 3]) at"]),
    monitored_barrier_by_one:         (3, ["ranks 1, 2 never joined monitored_barrier #1; rank 0 is waiting in it."]),
    another_barrier:                  (2, ["rank 0: barrier #1 at", "rank 1: monitored_barrier #1 at"]),
    receive_from_any_after_the_last_message:
                                      (3, ["none of ranks 1, 2 sends to rank 0 with tag 0; rank 0 is waiting in recv"]),
    another_tag:                      (2, ["rank 0 sends to rank 1 with tag 1, but rank 1 expects a message with tag"]),
    many_groups:                      (2, ["rank 1 never joined all_reduce #2 ([1] float32, sum) of group [0, 1]"]),
    crossed_groups:                   (3, CROSSED),
    crossed_with_the_default_group:   (2, CROSSED_WITH_DEFAULT),
    local_groups_crossed:             (2, ["rank 1 never joined monitored_barrier #1 of group [0, 1]"]),
    many_outstanding:                 (2, ["rank 1 never joined all_reduce #6 ([6] float32, sum); rank 0 is waiting"]),
    left_without_waiting:             (3, ["rank 2 never joined all_reduce #1 ([2] float32, sum); "
                                           "rank 0 is waiting in it; rank 1 joined it and has returned."]),
    waits_for_the_future_of_a_collective:
                                      (2, ["rank 1 never joined all_reduce #1 ([2] float32, sum); rank 0 is waiting"]),
    joins_a_thread_that_receives:     (2, [SENDS]),
}
# fmt: on


@pytest.mark.parametrize("program", CASES, ids=lambda program: program.__name__)
def test_ranks_that_wait_for_each_other_are_reported_with_the_line(
    program: Callable[[int], object],
) -> None:
    p, says = CASES[program]
    report = report_of(program, p)
    assert [words for words in says if words not in report] == []
    first = program.__code__.co_firstlineno
    lines = range(first, max(line for *_, line in program.__code__.co_lines() if line) + 1)
    assert any(f"test_group_failures.py line {line} in " in report for line in lines)


def group_created_by_its_members_alone(rank: int) -> None:
    dist.new_group([0, 2])
    if rank < 2:
        dist.all_reduce(ones(2), group=dist.new_group([0, 1]))
    dist.barrier()


def test_a_rank_outside_a_group_that_did_not_create_it_is_named_although_gloo_goes_on() -> None:
    with pytest.raises(tplab.RankError) as caught:
        tplab.launch(lambda: group_created_by_its_members_alone(dist.get_rank()), 3)
    assert "rank 2 never joined new_group #2 (ranks [0, 1])." in str(caught.value)
    line = group_created_by_its_members_alone.__code__.co_firstlineno + 3
    assert f"line {line} in group_created_by_its_members_alone" in str(caught.value)


# Programs that are right. Each waits longer than a deadlock must last to be called one.


def a_thread_receives_while_another_computes(rank: int) -> None:
    thread = threading.Thread(target=lambda: dist.recv(ones(2), 1 - rank, tag=7))
    thread.start()
    for _ in range(2):
        time.sleep(1.2)
        dist.all_reduce(ones(3))
    dist.send(ones(2), 1 - rank, tag=7)
    thread.join()


def a_thread_sends_what_the_other_waits_for(rank: int) -> None:
    def later() -> None:
        time.sleep(1.5)
        dist.send(ones(2), 1 - rank)

    thread = threading.Thread(target=later)
    thread.start()
    dist.recv(ones(2), 1 - rank)
    thread.join()


def receives_from_slow_ranks(rank: int) -> None:
    if rank == 0:
        dist.recv(ones(2))
        dist.recv(ones(2))
    else:
        time.sleep(1.2 * rank)
        dist.send(ones(2), 0)


def creates_many_groups_and_sends_in_them(rank: int) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1, 2]), dist.new_group([2])]
    if rank < 2:
        dist.send(ones(2), 1, group=groups[0]) if rank == 0 else dist.recv(ones(2), 0, group=groups[0])
    dist.all_reduce(ones(2), group=groups[1])


RIGHT = {
    2: [a_thread_receives_while_another_computes, a_thread_sends_what_the_other_waits_for],
    3: [receives_from_slow_ranks, creates_many_groups_and_sends_in_them],
}  # fmt: skip


@pytest.mark.parametrize("p", RIGHT)
def test_programs_that_are_right_are_not_called_deadlocks(p: int) -> None:
    def program() -> list[str]:
        return [one.__name__ for one in RIGHT[p] if one(dist.get_rank()) is None]

    assert tplab.launch(program, p) == [[one.__name__ for one in RIGHT[p]]] * p
