"""The picture of a transformer layer: a block per rank in each row, and what the four operators sent."""

from types import SimpleNamespace

import pytest
from matplotlib.colors import to_rgb

from tests.viz.pictures import boxes, places, texts
from tplab import viz
from tplab.viz.colors import NOBODY, rank_fill

SMALL, LARGE = (SimpleNamespace(kind="all_reduce", bytes=size) for size in (1024, 2048))
OTHER = SimpleNamespace(kind="reduce_scatter", bytes=4096)


def picture(p):
    return viz.layer([SMALL, LARGE] if p > 1 else [], [OTHER, SMALL] if p > 1 else [], ranks=p)


PICTURES = {f"p = {p}": lambda p=p: picture(p) for p in (1, 2, 8)}


@pytest.mark.parametrize("p", [1, 4])
def test_each_row_has_a_block_per_rank_and_says_below_f_and_g_what_they_sent(p) -> None:
    drawn = picture(p)
    at = places(drawn)
    assert len(boxes(drawn, to_rgb(NOBODY))) == 4, "norms and biases belong to everybody"
    for rank in range(p):
        for name, block in zip(("attention", "MLP"), boxes(drawn, rank_fill(rank)), strict=True):
            (place,) = at[name if p == 1 else f"{name}, rank {rank}"]
            assert place == pytest.approx(((block.x0 + block.x1) / 2, (block.y0 + block.y1) / 2))
    sent = ["all_reduce, 1.02 kB", "all_reduce, 1.02 kB", "reduce_scatter, 4.1 kB", "all_reduce, 2.05 kB"]
    ways = ["← backward", "forward →"] * 2
    expected = [f"{way}\n{size if p > 1 else 'nothing sent'}" for way, size in zip(ways, sent, strict=True)]
    assert [text for text in texts(drawn) if text.startswith(("←", "forward"))] == expected
    for letter, its in (("f", expected[0::2]), ("g", expected[1::2])):
        below = sorted({text: at[text] for text in its}.values())
        assert {x for x, _ in at[letter]} == {x for found in below for x, _ in found}
