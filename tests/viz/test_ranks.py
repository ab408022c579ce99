"""Pictures of what ranks hold: heads, blocks, rows of a table, masks, groups, a token's way, and a whole model."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from matplotlib.collections import PatchCollection
from matplotlib.colors import to_hex, to_rgb
from matplotlib.patches import Rectangle

from tests.tensor.token_ways import plain_way
from tests.viz.pictures import boxes, fills, places, texts
from tplab import viz
from tplab.data.grid import Grid
from tplab.viz import Block
from tplab.viz.colors import GOLD, NOBODY, RED, rank_color, rank_fill, tint

GROUPED = [{"q": [2 * rank, 2 * rank + 1], "k": [rank // 2], "v": [rank // 2]} for rank in range(4)]
SMALL, LARGE = (SimpleNamespace(kind="all_reduce", bytes=size) for size in (1024, 2048))
OTHER = SimpleNamespace(kind="reduce_scatter", bytes=4096)

VOCAB = 10
TABLE = torch.arange(VOCAB)[:, None] + torch.tensor([0.1, 0.2])  # row 7 is 7.1 7.2
IDS, TOKENS = [1, 7, 4, 7, 9], ["the", "cat", "sat", "cat", "down"]

BLOCKS = [
    Block("embedding", True, "chapter 7, passed on 2026-11-28", "131 kB"),
    Block("norm"),
    Block("MLP", True, "chapter 5, the course's solution", "131 kB", "131 kB"),
    Block("loss", True, "chapter 8, passed on 2026-11-28", "3 × 2.05 kB"),
]


def layer(p: int) -> viz.Picture:
    return viz.layer([SMALL, LARGE], [OTHER, SMALL], ranks=p)


def lookup(p: int) -> viz.Picture:
    """Of what p ranks would return, by plain indexing."""
    rows = -(-VOCAB // p)
    padded = torch.cat([TABLE, torch.zeros(p * rows - VOCAB, 2)])
    held = []
    for start in range(0, p * rows, rows):
        foreign = torch.tensor([not start <= i < start + rows for i in IDS])
        vectors = padded[torch.tensor(IDS)] * ~foreign[:, None]
        held.append({"start": start, "table": padded[start : start + rows], "foreign": foreign, "vectors": vectors})
    found = [part | {"out": sum(other["vectors"] for other in held)} for part in held]
    return viz.lookup(IDS, found, vocab_size=VOCAB, tokens=TOKENS)


def mask(seed: int) -> torch.Tensor:
    return torch.rand(4, 16, generator=torch.Generator().manual_seed(seed)) < 0.7


def mesh(grid: Grid, rank: int = 0) -> viz.Picture:
    return viz.mesh({axis: grid.groups(axis) for axis in ("tp", "pp", "dp")}, rank=rank, title="a title")


PICTURES = {
    "grouped heads": lambda: viz.heads(GROUPED, title="which head lives where"),
    **{f"layer, p = {p}": lambda p=p: layer(p) for p in (2, 8)},
    "lookup, p = 2": lambda: lookup(2),
    "lookup, p = 4": lambda: lookup(4),
    "masks": lambda: viz.masks({"the residual stream": [mask(0)] * 8, "sharded": [mask(rank) for rank in range(8)]}),
    **{f"mesh {sizes}": lambda sizes=sizes: mesh(Grid(*sizes)) for sizes in ((4, 2, 4), (1, 1, 1))},
    **{
        f"way, p = {p}, {token}, step {step}": lambda p=p, token=token, step=step: viz.token_way(plain_way(p, token))[
            step
        ]
        for p, token, steps in ((2, "saw", (1, 5)), (4, "saw", (2, 6, 8)), (1, "it", (8,)))
        for step in steps
    },
    "a model": lambda: viz.poster(BLOCKS, ranks=2, layer=slice(1, 3), times=12, title="a GPT"),
}


def test_every_head_stands_in_the_color_of_its_rank_and_copies_are_dashed() -> None:
    picture = viz.heads(GROUPED, title="t")
    heads = [box for rank in range(4) for box in boxes(picture, rank_fill(rank))]
    names = [f"{row}{head}" for held in GROUPED for row in held for head in held[row]]
    for name, box in zip(names, heads, strict=True):
        assert any(box.contains(*place) for place in places(picture)[name])
    dashed = [patch for patch in picture.axes[0].patches if patch.get_linestyle() == "--"]
    assert len(dashed) == 4 * 2, "K and V, which two ranks share"


@pytest.mark.parametrize("p", [2, 4])
def test_each_row_of_a_layer_has_a_block_per_rank_and_says_what_f_and_g_sent(p) -> None:
    drawn = layer(p)
    at = places(drawn)
    assert len(boxes(drawn, to_rgb(NOBODY))) == 4, "norms and biases belong to everybody"
    for rank in range(p):
        for name, block in zip(("attention", "MLP"), boxes(drawn, rank_fill(rank)), strict=True):
            (place,) = at[f"{name}, rank {rank}"]
            assert place == pytest.approx(((block.x0 + block.x1) / 2, (block.y0 + block.y1) / 2))
    sent = ["all_reduce, 1.02 kB", "all_reduce, 1.02 kB", "reduce_scatter, 4.1 kB", "all_reduce, 2.05 kB"]
    ways = ["← backward", "forward →"] * 2
    expected = [f"{way}\n{size}" for way, size in zip(ways, sent, strict=True)]
    assert [text for text in texts(drawn) if text.startswith(("←", "forward"))] == expected


def test_every_vector_has_the_color_of_the_rank_that_found_it() -> None:
    filled = fills(lookup(2))
    assert filled.count(rank_fill(0)) == 5 + 2 + 2  # its rows, its vectors (ids 1 and 4), and again in the sum
    assert filled.count(rank_fill(1)) == 5 + 3 + 3
    seen = texts(lookup(4))
    assert [seen.count(f"row {i}") for i in range(3)] == [1, 4, 0]  # id 9 is row 0 of rank 3
    assert seen.count("7.1") == 1 + 2 + 2  # in the table, twice found, twice in the sum


def test_kept_places_are_filled_where_they_stand_in_the_color_of_their_rank() -> None:
    shown = [mask(0), mask(1), mask(2).double() / 0.7, mask(3)]
    (axes,) = viz.masks({"above": shown[:2], "below": shown[2:]}).axes
    grids = [item for item in axes.collections if isinstance(item, PatchCollection)]
    for number, (grid, frame) in enumerate(zip(grids, axes.patches, strict=True)):
        corners = [path.get_extents() for path in grid.get_paths()]
        cell = corners[0].width
        found = {(round((box.y0 - frame.get_y()) / cell), round((box.x0 - frame.get_x()) / cell)) for box in corners}
        assert found == {tuple(place) for place in shown[number].nonzero().tolist()}
        assert tuple(grid.get_facecolor()[0][:3]) == pytest.approx(tint(rank_color(number % 2), 0.85))


@pytest.mark.parametrize("grid", [Grid(2, 2, 2), Grid(1, 4, 1)])
def test_every_rank_stands_in_every_axis_with_the_letter_of_its_group_and_the_chosen_ranks_groups_are_in_color(
    grid,
) -> None:
    shown = texts(mesh(grid))
    assert [shown.count(str(rank)) for rank in range(grid.size)] == [3] * grid.size
    groups = [group for axis in ("tp", "pp", "dp") for group in enumerate(grid.groups(axis))]
    letters = sorted("abcdefgh"[number] for number, group in groups for _ in group)
    assert sorted(text for text in shown if text and text in "abcdefgh") == letters
    for rank in (0, grid.size - 1):
        colored = [fill for fill in fills(mesh(grid, rank=rank)) if fill != to_rgb(NOBODY)]
        assert len(colored) == sum(len(group) for _, group in groups if rank in group)


def edges(picture: viz.Picture, color: str) -> int:
    """How many rectangles have an edge of this color and nothing inside, which marks a vector."""
    drawn = [patch for patch in picture.axes[0].patches if isinstance(patch, Rectangle)]
    return sum(to_hex(box.get_edgecolor()) == color.lower() and box.get_facecolor()[3] == 0 for box in drawn)


def test_a_tokens_way_has_a_picture_per_step_with_the_wrong_vectors_zeros_padding_and_messages() -> None:
    frames = viz.token_way(plain_way(4))
    assert len({frame.description for frame in frames}) == len(frames) == 9
    counted = [next(text for text in texts(frame) if text.startswith("messages")) for frame in frames]
    assert [text.rpartition(" ")[2] for text in counted] == ["0"] * 4 + ["1"] * 4 + ["2"]
    assert edges(frames[2], RED) == 2 * 3, "row 0 and what was found there, on three ranks"
    assert edges(frames[3], RED) == 0
    assert texts(frames[3]).count("zeros") == 3
    assert edges(frames[3], GOLD) == 2, "the token's row, and its term"
    assert texts(frames[6]).count("−∞") == texts(frames[6]).count("padding") == 2
    assert edges(frames[8], RED) == 4, "the gradient of y, on every rank"
    frames = viz.token_way(replace(plain_way(2), forward=(1, 77), backward=(1, 99)))
    assert "77" in frames[4].description
    assert "99" in frames[8].description
