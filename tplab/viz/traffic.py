"""What the ranks communicate, in calls and bytes, by kind of collective."""

from tplab.common import units
from tplab.runtime import Results
from tplab.viz.colors import FAINT, INK, NOBODY, WIDTH, Picture, chart, style


def traffic(results: Results, *, title: str, scale: int) -> Picture:
    """Draw a bar per kind of collective. Its length is the number of bytes, and its label shows the calls and bytes.

    Bytes are message sizes, counted the way nccl-tests counts them. Raises ValueError if the ranks don't all
    communicate the same, because there's only one bar for all of them.

    results: what `launch` returned
    scale:   the number of bytes that fill the width, so that several pictures have the same scale
    """
    record = results.record
    totals = record.totals(0)
    for rank in range(len(results)):
        if record.totals(rank) != totals:
            raise ValueError(f"traffic draws what all ranks communicate, but rank {rank} differs from rank 0")
    texts = [f"{units.count(total.calls, 'call')}, {units.size(total.bytes)}" for total in totals.values()]
    with style():
        picture, axes = chart(WIDTH, max(0.75 + 0.45 * len(totals) - 0.18, 1.0), title)
        places = [1.6 * index for index in range(len(totals))]
        for y, total, text in zip(places, totals.values(), texts, strict=True):
            axes.barh(y, total.bytes, 0.74, color=NOBODY, edgecolor=INK, linewidth=1)
            axes.text(total.bytes + 0.012 * scale, y, text, va="center", fontsize=9)
        axes.set_yticks(places, [f"{kind}, each rank" for kind in totals])
        axes.set_ylim(1.6 * len(totals) - 1, -0.6)
        axes.set_xlim(0, scale * 1.32)
        axes.tick_params(left=False)
        axes.spines["bottom"].set_visible(False)
        axes.spines["left"].set_color(FAINT)
        axes.set_xticks([])
    each = "; ".join(f"{kind} on each rank, {text}" for kind, text in zip(totals, texts, strict=True))
    picture.description = f"Bars of bytes: {each}."
    return picture
