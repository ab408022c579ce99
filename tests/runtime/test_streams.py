"""What a GPU's stream waits for, and for how long. A stream of gloo's works and counted marks stand for a GPU's.

tests/gpu/test_failures.py has more deadlocks, on GPUs.
"""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import saying
from tplab import launch
from tplab.runtime import devices, hooks
from tplab.runtime.board import Board, Call, anonymous_file, board_bytes, channel_of_messages
from tplab.runtime.failures import Deadlock
from tplab.runtime.streams import StreamWaits, StreamWatch


class Stream:
    """The works that a GPU's stream would wait for. Reading a value or synchronizing waits for all of them."""

    def __init__(self) -> None:
        self.works: list[dist.Work] = []
        self.torchs_wait = hooks.torchs_wait

    def wait(self, work: dist.Work, *_: Any) -> bool:
        self.works.append(work)
        return True

    def synchronize(self) -> None:
        while self.works:
            self.torchs_wait(self.works.pop(0))

    def event(self) -> "Event":
        return Event(self)


class Event:
    def __init__(self, stream: Stream) -> None:
        self.stream, self.works = stream, list[dist.Work]()

    def record(self) -> None:
        self.works = list(self.stream.works)

    def query(self) -> bool:
        return all(work.is_completed() for work in self.works)


def skips_one_of_several_on_a_stream() -> None:
    """As on a GPU, where no call waits, and the rank notices only when its function has returned."""
    stream, recorder = Stream(), hooks.active
    assert recorder is not None
    assert recorder.board is not None
    hooks.torchs_wait = stream.wait  # type: ignore[assignment]
    torch.cuda.synchronize = stream.synchronize  # type: ignore[assignment]
    devices._has_gpu = True
    recorder.watch = StreamWatch(recorder.rank, recorder.board, stream.event)
    recorder.watch.start()
    for step in range(3):
        if (dist.get_rank(), step) != (1, 1):
            dist.all_reduce(torch.ones(4))


def test_a_deadlock_on_a_stream_is_explained() -> None:
    with pytest.raises(Deadlock) as caught:
        launch(skips_one_of_several_on_a_stream, 2, timeout=30)
    never_joined = saying("\nrank 1 ", "all_reduce #3 ([4] float32, sum)", "rank 0", "\n  rank 0:")
    assert re.search(never_joined, str(caught.value))
    assert caught.value.cause_type != "timeout"


class Mark:
    """An event that is reached when it's told so."""

    def __init__(self) -> None:
        self.reached = False

    def record(self) -> None: ...

    def query(self) -> bool:
        return self.reached


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch):
    """A watch of this thread that counts it as blocked whenever it looks, its board, and the events that it created."""
    board, marks = Board(anonymous_file(board_bytes(1)), 1), list[Mark]()
    monkeypatch.setattr("tplab.runtime.streams.BLOCKED_LOOKS", 0)

    def new_mark() -> Mark:
        marks.append(Mark())
        return marks[-1]

    return StreamWatch(0, board, new_mark), board, marks


def call(name: str) -> Call:
    return Call("group", name, "", (0,), "train.py:1:step")


def shown(board: Board) -> list[str]:
    return [entry.kind for entry in board.waits(0)]


def test_the_oldest_unfinished_collective_is_shown_until_it_completes_and_then_the_next_one_of_the_same_line(watched):
    watch, board, marks = watched
    for number in (3, 4):
        watch.waits_for([(call("step"), number)])
    for mark, expected in zip([*marks, None], ([3], [4], []), strict=True):
        watch.look()
        assert [entry.number for entry in board.waits(0)] == expected
        if mark:
            mark.reached = True


def test_of_a_batch_the_message_without_a_partner_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """All messages of a batch complete together, so a send that was received doesn't end a wait for a receive."""
    memory = anonymous_file(board_bytes(2))
    board, of_other = Board(memory, 2), Board(memory, 2)
    monkeypatch.setattr("tplab.runtime.streams.BLOCKED_LOOKS", 0)
    watch = StreamWatch(0, board, Mark)

    def message(sender: int, kind: str) -> Call:
        return Call(channel_of_messages(sender, 1 - sender, 0), kind, "", (0, 1), "ring.py:1:step")

    send, receive = message(0, "send"), message(1, "recv")
    board.write(0, send, 1)
    board.write(0, receive, 1)
    of_other.write(1, message(0, "recv"), 1)
    watch.waits_for([(send, 1), (receive, 1)])
    watch.look()
    assert shown(board) == ["recv"]
    of_other.write(1, message(1, "send"), 1)
    watch.look()
    assert shown(board) == ["send"]


def test_a_call_that_was_refused_is_not_what_the_rank_is_blocked_in(watched) -> None:
    watch, board, _ = watched
    watch.calls([(call("refused"), 1)])
    watch.look()
    assert shown(board) == ["refused"]
    watch.called()
    watch.look()
    assert shown(board) == []


# How long: where marks are put on the stream


class TimedMark:
    """A mark of a stream on which nothing takes time but putting marks there."""

    placed = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at = -1

    def record(self) -> None:
        TimedMark.placed += 1
        self.at = TimedMark.placed

    def elapsed_time(self, later: "TimedMark") -> int:
        return later.at - self.at


def something_else(count: int) -> None:
    """Work of the stream that is no communication, as long as `count` marks."""
    TimedMark.placed += count


def share(*, asynchronous: bool) -> tuple[float, int]:
    """On a rank: which share of a block the stream stood still, and how many marks there were."""
    TimedMark.placed = 0
    x, stream = torch.ones(8), StreamWaits(TimedMark)
    with hooks.marked(stream):
        something_else(3)
        work = dist.all_reduce(x, async_op=asynchronous)
        if work is not None:
            something_else(10)
            work.wait()
    placed = TimedMark.placed
    dist.all_reduce(x)
    assert TimedMark.placed == placed, "a mark outside of the block"
    return stream.share, placed


def test_what_travels_beside_a_product_is_not_waited_for() -> None:
    """Each collective has two pairs of marks, one apart: around its start, and around the wait for it."""
    found = launch(lambda: [share(asynchronous=each) for each in (False, True)], 2)
    assert list(found) == [[(2 / whole, whole + 1) for whole in (8, 18)]] * 2
