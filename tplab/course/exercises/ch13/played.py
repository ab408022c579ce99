"""The checks of exercises 13.1, a schedule that beats GPipe, and 13.5, one with a smaller bubble.

The checks judge a schedule by its time and its memory. They play its lists on the clock of chapter 11, and they don't
use the course's own schedules.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from tplab.cost import clock
from tplab.course.checks.describe import describe
from tplab.course.checks.forms.alone import Alone, Call
from tplab.course.checks.observation import Claim, NotRun, Observed, Seen
from tplab.course.checks.trials import exercise
from tplab.pipeline.schedules import Action

Lists = list[list[tuple[str, int]]]  # for each rank, the (kind, micro-batch) of its actions
Key = tuple[str, int, int]  # kind, micro-batch, rank
UNITS = {"F": 1, "B": 2, "I": 1, "W": 1}

FORM = "there's one list of actions per rank"
ONCE = "every rank has each action once"
ENDS = "the schedule comes to an end"
TIME = "it takes no longer than GPipe"
BUBBLE = "the bubble is at most half of (p - 1)/m"
SHELF = "no shelf is larger than it has to be"
COUNT = "number of actions per rank"
DRAWN = "drawn"
SHOWN = 40  # units of time that fit into a line


def run(kinds: str, fast: str, most: Callable[[int, int, int], int]) -> Callable[[Any, Call], Seen]:
    """Return the function that plays an answer's lists.

    kinds:  the actions that every micro-batch needs, as in "FB"
    fast:   the claim about the time, TIME or BUBBLE
    most:   (p, m, rank) -> the size of the shelf
    """

    def play(answer: Any, call: Call) -> Seen:
        p, m = call.given
        rows = answer(p, m)
        seen: Observed = {FORM: Claim(_malformed(rows, p, kinds))}
        later = [ONCE, ENDS, SHELF, fast, COUNT]
        if not seen[FORM]:
            lists = [[(action.kind, action.micro_batch) for action in row] for row in rows]
            seen |= _costs(lists, kinds, m, fast, most)
        return [seen | {name: NotRun("something above is wrong") for name in later if name not in seen}]

    return play


def _costs(lists: Lists, kinds: str, m: int, fast: str, most: Callable[[int, int, int], int]) -> Observed:
    p = len(lists)
    wrong = [f"rank {rank}: {text}" for rank, row in enumerate(lists) if (text := _not_once(row, m, kinds))]
    seen: Observed = {ONCE: Claim("; ".join(wrong[:2]))}
    if wrong:
        return seen | {DRAWN: written(lists)}
    try:
        timing = clock.play(_operations(lists))
    except clock.OrderError as error:
        return seen | {ENDS: Claim(_circle(error)), DRAWN: written(lists)}
    allowed = [most(p, m, rank) for rank in range(p)]
    full = [(rank, size) for rank, row in enumerate(lists) if (size := shelf(row, kinds[-1])) > allowed[rank]]
    return seen | {
        COUNT: [len(row) for row in lists],
        ENDS: Claim(""),
        SHELF: Claim(
            "; ".join(
                f"rank {rank} has {size} micro-batches on its shelf, and {allowed[rank]} would be enough"
                for rank, size in full[:3]
            )
        ),
        fast: Claim(_too_slow(timing.total, p, m, fast)),
        DRAWN: drawing(timing),
    }


def _too_slow(total: float, p: int, m: int, fast: str) -> str:
    gpipe = 3 * (m + p - 1)
    if fast == TIME:
        alone = " That's as slow as a single machine." if total == 3 * m * p and p > 1 else ""
        return f"it takes {total:g} units of time, and GPipe takes {gpipe}.{alone}" if total > gpipe else ""
    bubble, published = total / (3 * m) - 1, (p - 1) / (3 * m)
    text = f"the bubble is {bubble:.3f}; half of (p - 1)/m is {(p - 1) / m / 2:.3f}, and ZB-H1 has {published:.3f}"
    return text if bubble > (p - 1) / m / 2 + 1e-9 else ""


def _malformed(rows: Any, p: int, kinds: str) -> str:
    """Say why an answer isn't a list of p lists of actions, or return ""."""
    if not isinstance(rows, (list, tuple)) or len(rows) != p:
        return f"{describe(rows)} was returned instead of {p} lists"
    for rank, row in enumerate(rows):
        if not isinstance(row, (list, tuple)):
            return f"for rank {rank}, there's {describe(row)} instead of a list"
        for action in row:
            if not isinstance(action, Action) or action.kind not in kinds or action.chunk:
                what = str(action) if isinstance(action, Action) else f"{action!r:.60}"
                return f"the list of rank {rank} contains {what}"
    return ""


def _not_once(row: Sequence[tuple[str, int]], m: int, kinds: str) -> str:
    """Say which actions are missing from a rank's list, there twice, or invalid, or return ""."""
    counts, wanted = Counter(row), [(kind, k) for kind in kinds for k in range(m)]
    said = [f"{kind}{k} is missing" for kind, k in wanted if not counts[kind, k]]
    said += [f"{kind}{k} is there {count} times" for (kind, k), count in counts.items() if count > 1]
    said += [f"{kind}{k}, but there are only {m} micro-batches" for kind, k in counts if not 0 <= k < m]
    return ", ".join(said[:2]) + (", .." if len(said) > 2 else "")


def _operations(lists: Lists) -> Iterator[clock.Operation[Key]]:
    last = len(lists) - 1
    back = "I" if any(kind == "I" for row in lists for kind, _ in row) else "B"
    for rank, row in enumerate(lists):
        for kind, k in row:
            needs: list[Key] = [] if kind == "F" else [("I" if kind == "W" else "F", k, rank)]
            if kind == "F" and rank > 0:
                needs.append(("F", k, rank - 1))
            if kind == back and rank < last:
                needs.append((back, k, rank + 1))
            yield clock.Operation((kind, k, rank), UNITS[kind], needs, rank=rank)


def _circle(error: clock.OrderError) -> str:
    """Describe the circle of actions that wait for each other."""
    links = [
        f"{one.name[0]}{one.name[1]} on rank {one.rank} waits for {needed[0]}{needed[1]} on rank {needed[2]}"
        for one, needed in error.circle
    ]
    return ", and ".join(links)


def shelf(row: Iterable[tuple[str, int]], last: str) -> int:
    """Return the most micro-batches that are between their F and their last action (B or W) at the same time."""
    most = count = 0
    for kind, _ in row:
        count += {"F": 1, last: -1}.get(kind, 0)
        most = max(most, count)
    return most


def written(lists: Lists) -> str:
    return "\n".join(f"rank {rank}  " + " ".join(f"{kind}{k}" for kind, k in row) for rank, row in enumerate(lists))


def drawing(timing: clock.Timing[Key]) -> str:
    """Draw which action each rank works on at which time, with three characters per unit of time."""
    lines = []
    for (rank, _), spans in sorted(timing.lanes.items()):
        cells = ["..."] * int(timing.total)
        for span in spans:
            kind, k, _ = span.operation.name
            for place in range(int(span.start), int(span.end)):
                cells[place] = f"{kind}{k}".ljust(3) if place == span.start else "-- "
        lines.append(f"rank {rank}  {''.join(cells[:SHOWN])}" + (" and so on" if len(cells) > SHOWN else ""))
    return "\n".join([*lines, f"{timing.total:g} units of time"])


def _calls(name: str, sizes: Sequence[tuple[int, int]]) -> Callable[[torch.Generator], Iterator[Call]]:
    return lambda generator: (
        Call((p, m), f"{name}({p}, {m})", shows=lambda seen: seen[0].get(DRAWN, "")) for p, m in sizes
    )


def _right(kinds: str) -> Callable[[Call], Seen]:
    return lambda call: [{COUNT: [len(kinds) * call.given[1]] * call.given[0]}]


exercise(
    "13.1", "Beat GPipe", takes=["schedule"],
    trials=[
        Alone(
            calls=_calls("schedule", [(2, 3), (4, 8), (1, 3), (4, 4), (4, 2), (3, 1), (8, 11)]), right=_right("FB"),
            run=run("FB", TIME, lambda p, m, rank: min(m, p - rank)),
        )
    ],
    passed="Your schedule is as fast as GPipe, and rank r never has more than min(m, p - r) micro-batches on its "
    "shelf.",
)  # fmt: skip

exercise(
    "13.5", "Fill the bubble (optional)", takes=["fill_bubble"],
    trials=[
        Alone(
            calls=_calls("fill_bubble", [(2, 4), (4, 8), (3, 3), (4, 16), (8, 9), (1, 2)]), right=_right("FIW"),
            run=run("FIW", BUBBLE, lambda p, m, rank: p),
        )
    ],
    passed="Your bubble is at most half as large as that of 1F1B, and no shelf ever holds more than p micro-batches.",
)  # fmt: skip
