"""The picture of a whole model: one stripe per rank in each split block, and the messages beside their blocks."""

from matplotlib.patches import Rectangle

from tests.viz.pictures import texts
from tplab import viz
from tplab.viz import Block

BLOCKS = [
    Block("embedding", True, "chapter 7, passed on 2026-11-28", "131 kB"),
    Block("norm"),
    Block("MLP", True, "chapter 5, the course's solution", "131 kB", "131 kB"),
    Block("loss", True, "chapter 8, passed on 2026-11-28", "3 × 2.05 kB"),
]


def drawn(ranks):
    return viz.poster(BLOCKS, ranks=ranks, layer=slice(1, 3), times=12, title="a GPT")


PICTURES = {"a model": lambda: drawn(2)}


def test_every_split_block_has_a_stripe_per_rank():
    for ranks in (1, 2, 4):
        boxes = [patch for patch in drawn(ranks).axes[0].patches if isinstance(patch, Rectangle)]
        assert len(boxes) == 3 * ranks + 1 + len(BLOCKS)  # stripes, the gray block, and a frame around each block


def test_messages_and_authors_are_told_in_the_picture_and_in_its_description():
    picture = drawn(2)
    shown = texts(picture)
    assert shown.count("↓ 131 kB") == 2
    assert shown.count("↑ 131 kB") == 1
    assert "12 × this layer" in shown
    assert BLOCKS[0].said in shown
    assert "loss (3 × 2.05 kB)" in picture.description
    assert "Split over 2 ranks: embedding, MLP, loss." in picture.description
