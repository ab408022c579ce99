"""Who waits where, and can it end: the rules, on boards written by hand."""

import re

import pytest

from tests import saying
from tplab.runtime.board import CHANNELS, SLOTS, Board, Call, Entry, anonymous_file, board_bytes
from tplab.runtime.diagnosis import deadlocked, explain, snapshot

WORLD = (0, 1, 2)


def all_reduce(number: int, members: tuple[int, ...] = WORLD) -> Entry:
    return Entry(f"group {members}", number, "all_reduce", "[2] float32, sum", members, "train.py:7:step")


def message(kind: str, sender: int, receiver: int, number: int = 1, tag: int = 0) -> Entry:
    peer = receiver if kind == "send" else sender
    return Entry(
        f"{sender}>{receiver} tag {tag}", number, kind, "[2] float32", (sender, receiver), "train.py:9:step", peer
    )


@pytest.fixture
def boards() -> list[Board]:
    """The same memory, once per rank: each rank writes through a board of its own."""
    memory = anonymous_file(board_bytes(3))
    boards = [Board(memory, 3) for _ in WORLD]
    for rank in WORLD:
        boards[rank].set_state(rank, "running")
    return boards


def enter(boards: list[Board], rank: int, entry: Entry, wait: bool = True) -> None:
    call = Call(
        entry.channel, entry.kind, entry.signature, entry.members, entry.where, entry.peer, entry.created,
    )  # fmt: skip
    boards[rank].write(rank, call, entry.number)
    if wait:
        boards[rank].begin_wait(rank, call, entry.number)


def receive(rank: int, sender: int) -> Entry:
    return message("recv", sender, rank)


TWO, ALL = dict.fromkeys((0, 1), all_reduce(1)), dict.fromkeys(WORLD, all_reduce(1))
PAIR, CIRCLE = {0: receive(0, 1), 1: receive(1, 0)}, {rank: receive(rank, (rank + 1) % 3) for rank in WORLD}
SAYS = ["rank 2", "all_reduce #1 ([2] float32, sum)", "ranks 0, 1"]
SEND, SENDS = {0: message("send", 0, 1)}, ["rank 1", "rank 0", "message #1", "rank 0", "send", "rank 1"]
# fmt: off
WAITING = {  # what ranks wait in or have passed, which have returned, which can never go on, and how it is explained
    "for a rank that computes":              (TWO,                                {},    [],  [],        ""),
    "for a rank that has returned":          (TWO,                                {},    [2], [0, 1],    SAYS),
    "for a receive, of one that returned":   (SEND,                               {},    [1], [0],     SENDS),
    "in a collective that all have joined":  (ALL,                                {},    [],  [],        ""),
    "for ranks that went past and returned": ({0: ALL[0]},          {1: ALL[1], 2: ALL[2]}, [1, 2], [], ""),
    "in a chain up to one that computes":    ({0: receive(0, 1), 1: receive(1, 2)}, {},  [],  [],        ""),
    "in a circle of three":                  (CIRCLE,                             {},    [],  [0, 1, 2], ""),
    "for a circle of two":                   (PAIR | {2: ALL[2]},                 {},    [],  [0, 1, 2], ""),
    "on a GPU, for one that has returned":   ({},                                 TWO,   [2], [0, 1],    ""),
}
# fmt: on


@pytest.mark.parametrize(("waits", "past", "returned", "stuck", "says"), WAITING.values(), ids=WAITING)
def test_ranks_that_can_never_go_on_are_found(waits, past, returned, stuck, says, boards: list[Board]) -> None:
    for rank, entry in (waits | past).items():
        enter(boards, rank, entry, wait=rank in waits)
    for rank in returned:
        boards[0].set_state(rank, "returned")
    states = snapshot(boards[0])
    assert deadlocked(states) == stuck
    assert not says or re.search(saying(*says), explain(states).partition("\n")[0])


def test_of_several_differences_the_first_is_reported(boards: list[Board]) -> None:
    for number in (3, 4, 5):
        for rank in WORLD:
            enter(boards, rank, all_reduce(number)._replace(kind="broadcast" if rank == 1 else "all_reduce"), False)
    assert re.search(saying("#3", "rank 1", "broadcast #3"), explain(snapshot(boards[0])))


def test_entries_that_were_overwritten_still_count(boards: list[Board]) -> None:
    for number in range(1, 10 * SLOTS):
        for rank in WORLD:
            enter(boards, rank, all_reduce(number), wait=False)
        enter(boards, 2, message("send", 2, 0, number), wait=False)
    assert len(boards[1].entries(0)) <= SLOTS
    boards[0].set_state(2, "returned")
    assert deadlocked(snapshot(boards[0])) == []


def test_a_wait_keeps_its_text_while_its_slot_is_used_again(boards: list[Board]) -> None:
    enter(boards, 0, Entry("group", 1, "barrier", "", WORLD, "train.py:1:step"))
    for number in range(2, 3 * SLOTS):
        enter(boards, 0, Entry("group", number, "all_reduce", "", WORLD, "train.py:1:step"), wait=False)
    assert [(entry.kind, entry.number) for entry in boards[1].waits(0)] == [("barrier", 1)]


def test_more_channels_than_the_board_counts_are_never_called_a_deadlock(boards: list[Board]) -> None:
    for number in range(CHANNELS + 5):
        enter(boards, 2, Entry(f"group {number}", 1, "barrier", "", (0, 1, 2), "f:1:g"), wait=False)
    enter(boards, 0, Entry("one more", 1, "barrier", "", (0, 2), "f:1:g"))
    boards[0].set_state(2, "returned")
    assert deadlocked(snapshot(boards[0])) == []
