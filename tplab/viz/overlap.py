"""Computation and communication of each rank over time, with two lanes per rank, and all runs to the same scale."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from tplab.trace.rank_trace import LANES, RankTrace, Span
from tplab.viz.blocks import centered, text_width
from tplab.viz.colors import INK, RED, WIDTH, Picture, rank_color, style, tint

_ROOM = WIDTH - 1.2  # inches from the left end of a lane to the right


def overlap(runs: Mapping[str, Sequence[RankTrace]], *, title: str | None = None) -> Picture:
    """Plot what `tplab.trace.trace_rank` recorded in each run. Computation is solid, and communication is hatched.

    While a collective is in flight and the rank computes nothing, its lane is red.

    runs: a dict that maps each run's name to the traces of all ranks

    The share of communication that was hidden is shown above each run, together with the `slow_link`, if there was one.
    Raises ValueError for a run in which nothing was traced.
    """
    for name, traces in runs.items():
        if not any(trace.spans for trace in traces):
            raise ValueError(f"nothing was traced in {name!r}: is the program inside `with trace_rank()`?")
    longest = max(_end(traces) - _begin(traces) for traces in runs.values()) * 1e3
    height = sum(0.62 + 0.44 * len(traces) for traces in runs.values()) + 0.75 + 0.3 * bool(title)
    with style():
        picture = Picture(figsize=(WIDTH, height), layout="constrained")
        each = "; ".join(map(_headline, runs, runs.values()))
        picture.caption = title or f"computing and communicating: {each}"
        if title:
            picture.suptitle(title, x=0.01, ha="left", fontsize=10.5, fontweight="bold")
        rows = [len(traces) for traces in runs.values()]
        places = picture.subplots(len(runs), 1, squeeze=False, gridspec_kw={"height_ratios": rows})[:, 0]
        for axes, (name, traces) in zip(places, runs.items(), strict=True):
            _lanes(axes, traces, longest)
            axes.set_title(_headline(name, traces), fontsize=9.5, fontweight="normal")
        places[-1].set_xlabel("milliseconds")
        handles = [
            Patch(facecolor="#B8B8B8", edgecolor=INK, label="computes"),
            Patch(facecolor=tint(RED, 0.6), label="waits"),
            Patch(facecolor="white", edgecolor=INK, hatch="////", label="communicates"),
        ]
        picture.legend(handles=handles, ncols=3, loc="outside lower right")
    picture.description = f"Two lanes per rank, for computation and communication: {each}."
    return picture


def _lanes(axes: Axes, traces: Sequence[RankTrace], longest: float) -> None:
    begin = _begin(traces)
    for index, trace in enumerate(traces):
        for span in merged(trace.spans, longest / 1e3 / 100):
            _bar(axes, 2 * index + LANES.index(span.lane), span, begin, rank_color(trace.rank), longest)
        for start, end in trace.waits:
            axes.barh(2 * index, (end - start) * 1e3, 0.84, left=(start - begin) * 1e3, color=tint(RED, 0.6))
    axes.set_yticks([2 * index + 0.5 for index in range(len(traces))], [f"rank {trace.rank}" for trace in traces])
    axes.set_ylim(2 * len(traces) - 0.4, -0.6)
    axes.set_xlim(0, longest * 1.01)
    axes.tick_params(left=False)
    axes.grid(axis="x")


def merged(spans: Sequence[Span], small: float) -> list[Span]:
    """Return the spans with each series of neighbors in a lane that are shorter than `small` seconds made into one."""
    drawn: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.lane, span.start)):
        last = drawn[-1] if drawn else None
        if (
            last
            and last.lane == span.lane
            and max(last.end - last.start if last.name else 0, span.end - span.start, span.start - last.end) < small
        ):
            drawn[-1] = replace(last, name="", end=max(last.end, span.end))
        else:
            drawn.append(span)
    return drawn


def _bar(axes: Axes, lane: int, span: Span, begin: float, color: str, longest: float) -> None:
    left, width = (span.start - begin) * 1e3, (span.end - span.start) * 1e3
    computes = span.lane == "compute"
    axes.barh(
        lane, width, 0.84, left=left, linewidth=0.7, color=tint(color, 0.6) if computes else "white",
        edgecolor=color if computes else INK, hatch="" if computes else "////",
    )  # fmt: skip
    if span.name and width / longest * _ROOM > text_width(span.name, 7.5) + 0.1:
        box = {"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
        centered(axes, left + width / 2, lane, span.name, 7.5, bbox=box)


def _headline(name: str, traces: Sequence[RankTrace]) -> str:
    shares = [f"{trace.hidden_share:.0%}" for trace in traces if trace.lane("communicate")]
    if not shares:
        return f"{name}: nothing was communicated"
    listed = ", ".join(shares[:-1]) + " and " + shares[-1] if len(shares) > 1 else shares[0]
    links = "".join(f", {link}" for link in dict.fromkeys(trace.link for trace in traces) if link)
    return f"{name}: {listed} of the communication hidden{links}"


def _begin(traces: Sequence[RankTrace]) -> float:
    return min(span.start for trace in traces for span in trace.spans)


def _end(traces: Sequence[RankTrace]) -> float:
    return max(span.end for trace in traces for span in trace.spans)
