"""The picture of operations on the clock: what runs when, where the rank waits, and how long a result is kept."""

import pytest
from matplotlib.colors import to_hex

from tests.viz.pictures import texts
from tplab import viz
from tplab.cost.backward import mlp_backward
from tplab.cost.clock import OrderError
from tplab.viz.colors import RED, tint

WAITING = ["dZ", "dB", "dX", "start", "wait", "dA"]
HIDDEN = ["dZ", "dX", "start", "dB", "dA", "wait"]


def draw(order, **times):
    return viz.clock(mlp_backward(order, **times), kept="dY")


PICTURES = {
    "an order that waits": lambda: draw(WAITING)[-1],
    "an order that hides the message": lambda: draw(HIDDEN)[-1],
    "a message that takes four times as long": lambda: draw(HIDDEN, message=32)[-1],
    "one operation": lambda: draw(WAITING)[0],
}


def red(picture):
    return sum(
        bar.get_width() for bar in picture.axes[0].patches if to_hex(bar.get_facecolor()) == to_hex(tint(RED, 0.6))
    )


@pytest.mark.parametrize(
    ("order", "message", "total", "waits", "kept"),
    [(WAITING, 8, 28, 8, 10), (HIDDEN, 8, 20, 0, 15), (HIDDEN, 16, 26, 6, 15)],
)
def test_the_last_picture_shows_all_times(order, message, total, waits, kept):
    picture = draw(order, message=message)[-1]
    assert picture.caption == f"{total} ms in total, {waits} ms of them spent waiting"
    assert red(picture) == waits
    (line,) = picture.axes[0].lines
    assert list(line.get_xdata()) == [0, kept]
    assert "message" in texts(picture)


def test_there_is_a_picture_for_each_operation_that_takes_time_and_for_each_wait():
    assert [picture.caption.partition(",")[0] for picture in draw(WAITING)] == [
        "5 ms so far", "10 ms so far", "15 ms so far", "15 ms so far", "23 ms so far", "28 ms in total",
    ]  # fmt: skip
    assert [picture.caption.partition(" so")[0] for picture in draw(HIDDEN)][:-1] == ["5 ms", "10 ms", "10 ms", "15 ms"]


def test_an_order_that_is_impossible_or_unknown_is_refused():
    with pytest.raises(OrderError, match="'dX' on rank 0 can't start without 'dZ'"):
        draw(["dX", "dZ"])
    with pytest.raises(ValueError, match="'dY' is none of the steps"):
        mlp_backward(["dY"])
