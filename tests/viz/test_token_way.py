"""The pictures of a token's way: who looks up which row, which vectors are zeros, and what was sent so far."""

import math
from dataclasses import replace

from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from tests.tensor.test_token_way import plain_way
from tests.viz.pictures import texts
from tplab import viz
from tplab.viz.colors import GOLD, RED

PICTURES = {
    f"p = {p}, {token}, step {step}": lambda p=p, token=token, step=step: viz.token_way(plain_way(p, token))[step]
    for p, token, steps in ((2, "saw", (0, 1, 3, 4, 5, 7)), (4, "saw", (2, 6, 8)), (1, "it", (8,)))
    for step in steps
}


def edges(picture: viz.Picture, color: str) -> int:
    """How many rectangles have an edge of this color and nothing inside, which marks a vector."""
    boxes = [patch for patch in picture.axes[0].patches if isinstance(patch, Rectangle)]
    return sum(to_hex(box.get_edgecolor()) == color.lower() and box.get_facecolor()[3] == 0 for box in boxes)


def test_there_is_a_picture_per_step_and_messages_are_counted() -> None:
    frames = viz.token_way(plain_way(2))
    counted = [next(text for text in texts(frame) if text.startswith("messages")) for frame in frames]
    assert [text.rpartition(" ")[2] for text in counted] == ["0"] * 4 + ["1"] * 4 + ["2"]
    assert len({frame.description for frame in frames}) == len(frames) == 9


def test_a_rank_without_the_row_finds_the_wrong_vector_and_then_zeros() -> None:
    frames = viz.token_way(plain_way(4))
    assert edges(frames[2], RED) == 2 * 3, "row 0 and what was found there, on three ranks"
    assert edges(frames[3], RED) == 0
    assert texts(frames[3]).count("zeros") == 3
    assert texts(frames[3]).count("its term") == 1
    assert edges(frames[3], GOLD) == 2, "the token's row, and its term"


def test_logits_of_padding_are_minus_infinity_and_the_last_step_is_red() -> None:
    frames = viz.token_way(plain_way(4))
    assert texts(frames[6]).count("−∞") == texts(frames[6]).count("padding") == 2
    assert edges(frames[8], RED) == 4, "the gradient of y, on every rank"


def test_the_sizes_of_messages_come_from_the_run() -> None:
    way = replace(plain_way(2), forward=(1, 77), backward=(1, 99))
    frames = viz.token_way(way)
    assert "77" in frames[4].description
    assert "99" in frames[8].description
    assert all(math.isfinite(part) for part in frames[8].get_size_inches())
