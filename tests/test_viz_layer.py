"""The picture of a transformer layer: what is whole, what is shared out, and what its four operators sent."""

from types import SimpleNamespace

import pytest
from matplotlib.colors import to_rgb

from tests.pictures import assert_texts_apart, assert_texts_inside, texts
from tplab import viz
from tplab.viz.colors import NOBODY, rank_fill

SMALL, LARGE = (SimpleNamespace(kind="all_reduce", bytes=size) for size in (1024, 2048))
OTHER = SimpleNamespace(kind="reduce_scatter", bytes=4096)


def picture(p, **options):
    calls = [SMALL, LARGE] if p > 1 else []
    return viz.layer(calls, [OTHER, SMALL] if p > 1 else [], ranks=p, **options)


@pytest.mark.parametrize("post", [False, True])
@pytest.mark.parametrize("p", [1, 2, 4])
def test_texts_stay_in_the_frame_and_apart_and_the_picture_is_small(p, post) -> None:
    drawn = picture(p, post=post)
    assert_texts_inside(drawn)
    assert_texts_apart(drawn)
    png, shown = drawn._repr_png_()
    assert len(png) < 100_000
    assert shown["width"] <= 960
    assert png == drawn.png()


def test_each_operator_says_what_it_sent_and_in_which_direction() -> None:
    shown = [text for text in texts(picture(2)) if "\n" in text and "bias" not in text]
    assert shown == [
        "← backward\nall_reduce, 1 KiB",  # the attention's f, the last of the backward pass
        "forward →\nall_reduce, 1 KiB",
        "← backward\nreduce_scatter, 4 KiB",  # the MLP's f, the first of the backward pass
        "forward →\nall_reduce, 2 KiB",
    ]


def test_with_one_rank_nothing_is_sent() -> None:
    assert sum("nothing sent" in text for text in texts(picture(1))) == 4


def test_blocks_are_shared_out_and_norms_and_biases_belong_to_everybody() -> None:
    drawn = picture(4)
    filled = [patch.get_facecolor()[:3] for patch in drawn.axes[0].patches if patch.get_facecolor()[3]]
    assert all(filled.count(rank_fill(rank)) == 2 for rank in range(4))
    assert filled.count(to_rgb(NOBODY)) == 4
    names = [text for text in texts(drawn) if ", rank " in text]
    assert names == [f"{name}, rank {rank}" for name in ("attention", "MLP") for rank in range(4)]


def test_the_residual_leaves_before_the_norm_or_behind_it() -> None:
    def leaves(post):
        lines = [line for line in picture(2, post=post).axes[0].lines if len(line.get_xdata()) == 3]
        return [line.get_xdata()[0] for line in lines]

    norm = [patch.get_x() for patch in picture(2).axes[0].patches if patch.get_facecolor()[:3] == to_rgb(NOBODY)][0]
    assert all(x < norm for x in leaves(post=False))
    assert all(norm < x for x in leaves(post=True))
    assert len(leaves(post=True)) == 2


@pytest.mark.parametrize(("forward", "backward"), [([SMALL], [SMALL, SMALL]), ([SMALL, SMALL], [SMALL] * 3)])
def test_another_number_of_collectives_is_refused(forward, backward) -> None:
    with pytest.raises(ValueError, match="a layer communicates twice"):
        viz.layer(forward, backward, ranks=2)
