"""Chapter 11: export traces for ui.perfetto.dev and chrome://tracing ("Trace Event Format", Google 2016).

one process per rank, with one row per lane:             rank 0   compute       ██ mm ██  █████ mm █████
                                                                  communicate            ▒▒ all_reduce ▒▒
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tplab.trace.rank_trace import LANES, RankTrace, Span


def chrome_trace(traces: Sequence[RankTrace]) -> dict[str, Any]:
    """Convert traces to the Trace Event Format, with one process per rank and one row per lane, in microseconds.

    Overlapping spans of a lane, such as two collectives in flight, get separate rows.
    """
    zero = min((span.start for trace in traces for span in trace.spans), default=0.0)
    events: list[dict[str, Any]] = []
    for trace in traces:
        rank = trace.rank
        events.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}})
        events.append({"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}})
        rows = [(lane, row) for lane in LANES for row in rows_of(trace.lane(lane))]
        for number, (lane, row) in enumerate(rows):
            place = {"pid": rank, "tid": number}
            events.append({"ph": "M", **place, "name": "thread_name", "args": {"name": lane}})
            events.append({"ph": "M", **place, "name": "thread_sort_index", "args": {"sort_index": number}})
            for span in row:
                times = {"ts": (span.start - zero) * 1e6, "dur": (span.end - span.start) * 1e6}
                events.append({"ph": "X", **place, "name": span.name, "cat": lane, **times, "args": span.about})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def rows_of(spans: Iterable[Span]) -> list[list[Span]]:
    """Distribute the spans over as few rows as possible so that no spans overlap within a row."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: span.start):
        free = next((row for row in rows if row[-1].end <= span.start), None)
        if free is None:
            rows.append([span])
        else:
            free.append(span)
    return rows


def save_chrome_trace(path: str | Path, traces: Sequence[RankTrace]) -> Path:
    """Write the traces to a file that ui.perfetto.dev can open, and return its path. Perfetto runs in your browser."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(chrome_trace(traces)), encoding="utf-8")
    return path
