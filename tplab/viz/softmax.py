"""A softmax assembled from shards, with each rank's logits, their exponentials, and its share of the probability."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from matplotlib.axes import Axes

from tplab.viz.colors import FAINT, INK, WIDTH, Picture, rank_color, rank_fill, rank_hatch, style

_ROWS = {  # entry: (label, key of a per-rank value, its name, key of a value shared by all ranks, its name)
    "logits": ("logits z", "max", "max", "m", "m"),
    "exp": ("exp(z - m)", "sum", "sum", "S", "S"),
    "softmax": ("softmax", "", "", "", ""),
    "gradient": ("softmax\n- one-hot", "", "", "", ""),
}


def softmax(parts: Sequence[Mapping[str, Any]], *, target: int | None = None, title: str | None = None) -> Picture:
    """Draw one token's softmax over the columns of all ranks, as they computed it.

    parts:  each rank's "logits" [v/p], their "max", the common "m", "exp" [v/p], its "sum", the common "S",
            "softmax" [v/p] and, optionally, the "gradient" [v/p]; other entries are ignored
    target: the id whose column is marked
    """
    rows = [name for name in _ROWS if all(name in part for part in parts)]
    if not rows or rows[0] != "logits":
        raise ValueError('softmax needs the "logits" of every rank')
    columns = [len(part["logits"]) for part in parts]
    with style():
        picture = Picture(figsize=(WIDTH, 0.75 + 1.35 * len(rows)), layout="constrained")
        picture.caption = title or f"a softmax over {sum(columns)} columns of {len(parts)} ranks"
        picture.suptitle(title or "", fontsize=10.5, fontweight="bold", x=0.02, ha="left")
        grid = picture.subplots(len(rows), 1, sharex=True, squeeze=False)[:, 0]
        for axes, name in zip(grid, rows, strict=True):
            _row(axes, name, parts, columns, target)
        _ids(grid[-1], columns, target)
    picture.description = (
        f"Bars for {sum(columns)} columns on {len(parts)} ranks, in rows from top to bottom: {', '.join(rows)}."
    )
    return picture


def _row(axes: Axes, name: str, parts: Sequence[Mapping[str, Any]], columns: Sequence[int], target: int | None) -> None:
    called, own, own_name, common, common_name = _ROWS[name]
    values = [torch.as_tensor(part[name]).tolist() for part in parts]
    finite = [value for part in values for value in part if abs(value) != float("inf")]
    low, high = min([0.0, *finite]), max([0.0, *finite])
    room = (high - low) or 1.0
    axes.set_ylim(low - (0.14 * room if low < 0 else 0), high + 0.5 * room)
    start = 0
    for rank, (part, heights) in enumerate(zip(parts, values, strict=True)):
        for column, height in enumerate(heights, start):
            if abs(height) == float("inf"):
                axes.text(column, low + 0.02 * room, "-∞", ha="center", va="bottom", fontsize=9)
                continue
            axes.bar(column, height, 0.8, facecolor=rank_fill(rank), edgecolor=rank_color(rank), hatch=rank_hatch(rank))
        said = [f"{own_name} {_number(part[own])}"] if own in part else []
        middle, top = start + (columns[rank] - 1) / 2, high + 0.47 * room
        axes.text(middle, top, "\n".join([f"rank {rank}", *said]), ha="center", va="top", fontsize=9, linespacing=1.25)
        start += columns[rank]
        if start < sum(columns):
            axes.axvline(start - 0.5, color=FAINT, linewidth=0.8, linestyle=(0, (3, 2)))
    if common in parts[0]:
        axes.text(
            1.01, 0.96, "all ranks\n" + f"{common_name} = {_number(parts[0][common])}", transform=axes.transAxes,
            fontsize=9, fontweight="bold", va="top", linespacing=1.25,
        )  # fmt: skip
    if name == "logits" and common in parts[0]:
        axes.axhline(float(parts[0][common]), color=INK, linewidth=1, linestyle=(0, (4, 2)))
    if target is not None:
        axes.axvspan(target - 0.5, target + 0.5, color="#000000", alpha=0.07, linewidth=0, zorder=0)
    axes.axhline(0, color=FAINT, linewidth=0.8)
    axes.set_ylabel(called)
    axes.set_xlim(-0.6, sum(columns) - 0.4)
    axes.tick_params(bottom=False, labelbottom=False)


def _ids(axes: Axes, columns: Sequence[int], target: int | None) -> None:
    axes.tick_params(labelbottom=True)
    axes.set_xticks(range(sum(columns)))
    axes.set_xlabel("id" + ("" if target is None else f"; the grey stripe is the target, {target}"))


def _number(value: Any) -> str:
    number = float(value)
    return "-∞" if number == -float("inf") else f"{number:.2f}" if abs(number) < 100 else f"{number:.0f}"
