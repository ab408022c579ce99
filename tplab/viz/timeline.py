"""A timeline with one lane per rank, which shows when it computes and when it is in a collective."""

from typing import Any

from matplotlib.patches import Patch

from tplab.viz.colors import INK, WIDTH, Picture, chart, rank_color, rows, style, tint

_KIND_HATCHES = ("////", "....", "\\\\\\\\", "xxxx", "----", "||||", "++++")


def timeline(results: Any, *, title: str | None = None) -> Picture:
    """Draw a lane for each rank of a `launch` run: solid while it computes, and hatched while it's in a collective."""
    record, spans = results.record, list(results.spans)
    kinds = list(dict.fromkeys(collective.kind for collective in record))
    hatches = {kind: _KIND_HATCHES[index % len(_KIND_HATCHES)] for index, kind in enumerate(kinds)}
    zero = min(began for began, _ in spans)
    last = max([*(returned for _, returned in spans), *(collective.end or 0.0 for collective in record)])
    p = len(spans)
    with style():
        caption = title or f"timeline of {p} ranks, {(last - zero) * 1000:.1f} ms"
        picture, axes = chart(WIDTH, 1.0 + 0.42 * p, title, caption)
        for rank in range(p):
            color = rank_color(rank)
            began, returned = spans[rank]
            axes.barh(
                rank, (returned - began) * 1000, 0.62, left=(began - zero) * 1000,
                color=tint(color, 0.75), edgecolor=color, linewidth=1,
            )  # fmt: skip
            for collective in record.of_rank(rank):
                begin, end = collective.start - zero, (collective.end or last) - zero
                axes.barh(
                    rank, (end - begin) * 1000, 0.62, left=begin * 1000,
                    color="white", edgecolor=INK, hatch=hatches[collective.kind], linewidth=0.8,
                )  # fmt: skip
        rows(axes, [f"rank {rank}" for rank in range(p)])
        axes.set_xlim(0, (last - zero) * 1000 * 1.01)
        axes.set_xlabel("milliseconds")
        axes.grid(axis="x")
        handles = [Patch(facecolor="#B8B8B8", edgecolor=INK, label="computes")]
        handles += [Patch(facecolor="white", edgecolor=INK, hatch=hatches[kind], label=f"in {kind}") for kind in kinds]
        axes.legend(
            handles=handles, ncols=min(4, len(handles)), loc="lower right", bbox_to_anchor=(1, 1.0), borderpad=0.1
        )
    each = "; ".join(f"rank {rank} is in {len(record.of_rank(rank))} collectives" for rank in range(p))
    picture.description = f"When each rank computes and when it is in a collective: {each}."
    return picture
