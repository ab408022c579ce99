"""Where marks are put on a stream. Marks of their own stand for a GPU's here: their time is how many came before."""

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from tplab import launch
from tplab.runtime import hooks
from tplab.runtime.streams import StreamWaits


class Mark:
    """A mark of a stream on which nothing takes time but putting marks there."""

    placed, reached = 0, 10**6

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at = -1

    def record(self) -> None:
        Mark.placed += 1
        self.at = Mark.placed

    def query(self) -> bool:
        return self.at <= Mark.reached

    def elapsed_time(self, later: "Mark") -> int:
        return later.at - self.at


def something_else(count: int) -> None:
    """Work of the stream that is no communication, as long as `count` marks."""
    Mark.placed += count


def shares(program: str) -> tuple[float, int]:
    """On a rank: which share of a block the stream stood still, and how many marks there were."""
    Mark.placed = 0
    x, stream = torch.ones(8), StreamWaits(Mark)
    with hooks.marked(stream):
        something_else(3)
        if program == "blocking":
            dist.all_reduce(x)
        elif program == "beside a product":
            work = dist.all_reduce(x, async_op=True)
            something_else(10)
            work.wait()
        elif program == "functional":
            y = functional.all_reduce(x, "sum", dist.group.WORLD)
            something_else(10)
            functional.wait_tensor(y)
        elif program == "in a thread that nobody records":
            with hooks.unrecorded():
                dist.all_reduce(x)
    placed = Mark.placed
    dist.all_reduce(x)
    assert Mark.placed == placed, "a mark outside of the block"
    return stream.share, placed


def test_what_travels_beside_a_product_is_not_waited_for() -> None:
    """Each collective has two pairs of marks, one apart: around its start, and around the wait for it."""
    wholes = {"blocking": 8, "beside a product": 18, "functional": 18}
    expected = [(2 / whole, whole + 1) for whole in wholes.values()]
    nothing = ["nothing", "in a thread that nobody records"]
    found = launch(lambda: [shares(program) for program in [*wholes, *nothing]], 2)
    assert list(found) == [expected + [(0.0, 5)] * 2] * 2


def test_a_block_is_over_when_the_stream_has_come_to_its_last_mark(monkeypatch) -> None:
    stream = StreamWaits(Mark)
    assert not stream.is_over
    with hooks.marked(stream):
        assert not stream.is_over
    monkeypatch.setattr(Mark, "reached", Mark.placed - 1)
    assert not stream.is_over
    monkeypatch.setattr(Mark, "reached", Mark.placed)
    assert stream.is_over
    assert stream.share == 0.0
