"""What the ranks communicate, in calls and bytes, by kind of collective."""

from typing import Any

from tplab.common import units
from tplab.runtime import Record
from tplab.runtime.records import Total
from tplab.viz.colors import FAINT, INK, NOBODY, WIDTH, Picture, chart, rank_color, rank_hatch, style, tint


def traffic(record_or_results: Any, *, title: str | None = None, scale: int | None = None) -> Picture:
    """Draw a bar per kind of collective. Its length is the number of bytes, and its label shows the calls and bytes.

    If the ranks have different numbers for a kind of collective, each rank has its own bar, in its own color. Bytes are
    message sizes, counted the way nccl-tests counts them.

    record_or_results: the result of `launch`, or a record
    scale:             the number of bytes that fill the width, to give several pictures the same scale (None: the
                       most bytes of any bar)
    """
    record: Record = getattr(record_or_results, "record", record_or_results)
    kinds = list(dict.fromkeys(collective.kind for collective in record))
    bars = [bar for kind in kinds for bar in _bars(record, kind)]
    each = "; ".join(f"{k} on {_whose(r)}, {t.calls} calls, {units.size(t.bytes)}" for k, r, t in bars)
    caption = title or f"traffic: {each or 'none'}"
    with style():
        height = 0.75 + 0.27 * len(bars) + 0.18 * max(0, len(kinds) - 1)
        picture, axes = chart(WIDTH, max(height, 1.0), caption, title)
        if not bars:
            axes.text(0.5, 0.5, "no collectives: nothing was sent", ha="center", va="center", transform=axes.transAxes)
            axes.set_axis_off()
            picture.description = "There are no bars, because nothing was sent."
            return picture
        most = scale or max(total.bytes for _, _, total in bars) or 1
        y, places, names = 0.0, [], []
        for index, (kind, rank, total) in enumerate(bars):
            if index and bars[index - 1][0] != kind:
                y += 0.6
            color = INK if rank is None else rank_color(rank)
            fill = NOBODY if rank is None else tint(color, 0.55)
            axes.barh(y, total.bytes, 0.74, color=fill, edgecolor=color, hatch=rank_hatch(rank), linewidth=1)
            text = f"{total.calls} {'call' if total.calls == 1 else 'calls'}, {units.size(total.bytes)}"
            axes.text(total.bytes + 0.012 * most, y, text, va="center", fontsize=9)
            places.append(y)
            names.append(f"{kind}, {_whose(rank)}" if not index or bars[index - 1][0] != kind else _whose(rank))
            y += 1
        axes.set_yticks(places, names)
        axes.set_ylim(y - 0.4, -0.6)
        axes.set_xlim(0, most * 1.32)
        axes.tick_params(left=False)
        axes.spines["bottom"].set_visible(False)
        axes.spines["left"].set_color(FAINT)
        axes.set_xticks([])
    picture.description = f"Bars of bytes: {each}."
    return picture


def _bars(record: Record, kind: str) -> list[tuple[str, int | None, Total]]:
    """Return (kind, rank, totals) for each rank that calls this kind, or (kind, None, totals) if all have the same."""
    totals = {rank: total for rank in record.ranks if (total := record.totals(rank).get(kind))}
    first, *others = totals.values()
    if len(totals) == len(record.ranks) and all(total == first for total in others):
        return [(kind, None, first)]
    return [(kind, rank, total) for rank, total in totals.items()]


def _whose(rank: int | None) -> str:
    return "each rank" if rank is None else f"rank {rank}"
