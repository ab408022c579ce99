"""Lists of actions, judged by what must hold for them: complete, without a circle, how long they take, what is live.

Nothing here comes from `tplab.pipeline.schedules` but the class Action. Time is the longest path through the graph of
what must come before what; a cycle in this graph is a schedule that never ends.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any

import torch

from tplab.course.checks import Claim, NotRun, Observed, fail
from tplab.course.checks.describe import describe
from tplab.pipeline.schedules import Action

Item = tuple[str, int]  # "F" or "B", micro-batch
Place = tuple[int, str, int]  # rank, kind, micro-batch
Lists = Sequence[Sequence[Item]]

FORM = (
    "What comes out is a list of p lists, one for each rank, of actions such as `Action('F', 0)`. What does your "
    "function give back?"
)
ONCE = "every action once"
ENDS = "it comes to an end"


def items(number: str, call: str, rows: Any, p: int) -> list[list[Item]]:
    """The learner's lists as plain pairs; fails for what is no list of p lists of actions F and B."""
    if not isinstance(rows, (list, tuple)):
        fail(number, f"{call} gave {describe(rows)}, not a list of {p} lists.", FORM)
    if len(rows) != p or not all(isinstance(row, (list, tuple)) for row in rows):
        fail(number, f"{call} gave {describe(rows)}; a list of {p} lists is right.", FORM)
    for rank, row in enumerate(rows):
        for action in row:
            if not isinstance(action, Action) or action.kind not in ("F", "B") or action.chunk:
                what = f"the action {action}" if isinstance(action, Action) else f"{action!r:.60}"
                fail(number, f"{call}: the list of rank {rank} holds {what}.", FORM)
    return [[(action.kind, action.micro_batch) for action in row] for row in rows]


def actions(lists: Lists) -> list[list[Action]]:
    return [[Action(kind, k) for kind, k in row] for row in lists]


def not_once(row: Sequence[Item], m: int) -> str:
    """What is missing in a rank's list, there twice, or of no micro-batch that there is; "" if nothing is."""
    counts, wanted = Counter(row), [(kind, k) for kind in "FB" for k in range(m)]
    said = [f"{kind}{k} is not there" for kind, k in wanted if not counts[kind, k]]
    said += [f"{kind}{k} is there {count} times" for (kind, k), count in counts.items() if count > 1]
    said += [f"{kind}{k}, where micro-batches go from 0 to {m - 1}" for kind, k in counts if not 0 <= k < m]
    return ", ".join(said[:3]) + (", ..." if len(said) > 3 else "")


def peak(row: Iterable[Item]) -> int:
    """The most micro-batches between their F and their B at once."""
    most = count = 0
    for kind, _ in row:
        count += 1 if kind == "F" else -1
        most = max(most, count)
    return most


def needed(rank: int, kind: str, k: int, p: int) -> list[Place]:
    """What an action needs of its own rank and of its neighbours."""
    if kind == "F":
        return [(rank - 1, "F", k)] if rank else []
    return [(rank, "F", k)] + ([(rank + 1, "B", k)] if rank < p - 1 else [])


def before(lists: Lists) -> dict[Place, list[Place]]:
    """For each action those that must be done before it: what it needs, and the one before it in its list."""
    graph = {}
    for rank, row in enumerate(lists):
        for place, (kind, k) in enumerate(row):
            earlier = [(rank, *row[place - 1])] if place else []
            graph[rank, kind, k] = earlier + needed(rank, kind, k, len(lists))
    return graph


def ends(lists: Lists, lasts: Callable[[Place], float]) -> dict[Place, float]:
    """When each action ends. Raises CycleError where some wait for each other."""
    graph = before(lists)
    end: dict[Place, float] = {}
    for place in TopologicalSorter(graph).static_order():
        end[place] = max((end[earlier] for earlier in graph[place]), default=0.0) + lasts(place)
    return end


def total_time(lists: Lists, forward: float, backward: float) -> float:
    return max(ends(lists, lambda place: forward if place[1] == "F" else backward).values())


def idle_share(lists: Lists, forward: float, backward: float) -> float:
    """Idle time over working time, of all ranks together."""
    working = sum(forward if kind == "F" else backward for row in lists for kind, _ in row)
    return len(lists) * total_time(lists, forward, backward) / working - 1


def circle(error: CycleError) -> str:
    """ "F1 on rank 0 waits for B0 on rank 0, which waits for B0 on rank 1, ..." """
    chain = [f"{kind}{k} on rank {rank}" for rank, kind, k in reversed(error.args[1])]
    return f"{chain[0]} waits for " + ", which waits for ".join(chain[1:])


def random_lists(p: int, m: int, generator: torch.Generator) -> list[list[Item]]:
    """Lists that can run, in an order that nobody would choose."""
    rows: list[list[Item]] = [[] for _ in range(p)]
    left = {(rank, kind, k) for rank in range(p) for kind in "FB" for k in range(m)}
    while left:
        ready = sorted(place for place in left if left.isdisjoint(needed(*place, p)))
        rank, kind, k = ready[int(torch.randint(len(ready), (), generator=generator))]
        left.remove((rank, kind, k))
        rows[rank].append((kind, k))
    return rows


def observed(lists: Lists, m: int, p: int) -> list[Observed]:
    """For each rank what its list is like; the time of all is that of F = 1 and B = 2."""
    missing = [not_once(row, m) for row in lists]
    try:
        span: Any = total_time(lists, 1, 2) if not any(missing) else NotRun("an action is missing or there twice")
        stuck = ""
    except CycleError as error:
        span, stuck = NotRun("the schedule never ends"), circle(error)
    except KeyError:
        span, stuck = NotRun("an action is missing"), ""
    return [
        {
            ONCE: Claim(missing[rank]),
            ENDS: Claim(stuck),
            "peak of live micro-batches": peak(lists[rank]),
            "units of time": span,
        }
        for rank in range(p)
    ]


def expected(p: int, m: int, peaks: Sequence[int]) -> list[Mapping[str, Any]]:
    return [{"peak of live micro-batches": peaks[rank], "units of time": (m + p - 1) * 3.0} for rank in range(p)]
