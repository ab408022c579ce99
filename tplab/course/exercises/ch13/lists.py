"""The checks for exercises 13.1 (GPipe) and 13.2 (1F1B), in which schedules are lists of actions.

A list is judged by its properties. It must be complete, its actions must not wait for each other in a cycle, it must
take the right time, and no more micro-batches may be live than necessary. (A micro-batch is live between its forward,
F, and its backward, B.) Nothing here comes from `tplab.pipeline.schedules` except the class Action. The time of a
schedule is the longest path through its dependency graph, and if this graph has a cycle, the schedule never ends.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any

import torch

from tplab.course.checks import Claim, Differences, NotRun, Observed, Question, Verdict, calling, exercise, fail, verify
from tplab.course.checks.describe import describe
from tplab.pipeline.schedules import Action

Item = tuple[str, int]  # kind ("F" or "B"), micro-batch
Place = tuple[int, str, int]  # rank, kind, micro-batch
Lists = Sequence[Sequence[Item]]

FORM = (
    "What comes out is a list of p lists, one for each rank, of actions such as `Action('F', 0)`. What does your "
    "function give back?"
)
ONCE = "every action once"
ENDS = "it comes to an end"
FIRST = "all forwards come before the first backward"
PEAK = "peak of live micro-batches"
TIME = "units of time"


def items(number: str, call: str, rows: Any, p: int) -> list[list[Item]]:
    """Convert the learner's lists to plain pairs. Raises CheckFailed unless there are p lists of F and B actions."""
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
    """Describe the actions in a rank's list that are missing, repeated, or invalid. Returns "" if there are none."""
    counts, wanted = Counter(row), [(kind, k) for kind in "FB" for k in range(m)]
    said = [f"{kind}{k} is not there" for kind, k in wanted if not counts[kind, k]]
    said += [f"{kind}{k} is there {count} times" for (kind, k), count in counts.items() if count > 1]
    said += [f"{kind}{k}, where micro-batches go from 0 to {m - 1}" for kind, k in counts if not 0 <= k < m]
    return ", ".join(said[:3]) + (", ..." if len(said) > 3 else "")


def peak(row: Iterable[Item]) -> int:
    """Return the largest number of micro-batches that are between their F and their B at the same time."""
    most = count = 0
    for kind, _ in row:
        count += 1 if kind == "F" else -1
        most = max(most, count)
    return most


def needed(rank: int, kind: str, k: int, p: int) -> list[Place]:
    """Return the actions, on this rank and its neighbors, that an action depends on."""
    if kind == "F":
        return [(rank - 1, "F", k)] if rank else []
    return [(rank, "F", k)] + ([(rank + 1, "B", k)] if rank < p - 1 else [])


def before(lists: Lists) -> dict[Place, list[Place]]:
    """Return the actions that must precede each action: its dependencies, and the previous action in its list."""
    graph = {}
    for rank, row in enumerate(lists):
        for place, (kind, k) in enumerate(row):
            earlier = [(rank, *row[place - 1])] if place else []
            graph[rank, kind, k] = earlier + needed(rank, kind, k, len(lists))
    return graph


def ends(lists: Lists, lasts: Callable[[Place], float]) -> dict[Place, float]:
    """Return the time at which each action ends. Raises CycleError if some actions wait for each other."""
    graph = before(lists)
    end: dict[Place, float] = {}
    for place in TopologicalSorter(graph).static_order():
        end[place] = max((end[earlier] for earlier in graph[place]), default=0.0) + lasts(place)
    return end


def total_time(lists: Lists, forward: float, backward: float) -> float:
    return max(ends(lists, lambda place: forward if place[1] == "F" else backward).values())


def idle_share(lists: Lists, forward: float, backward: float) -> float:
    """Return the idle time of all ranks together, divided by their working time."""
    working = sum(forward if kind == "F" else backward for row in lists for kind, _ in row)
    return len(lists) * total_time(lists, forward, backward) / working - 1


def circle(error: CycleError) -> str:
    """Describe the cycle in words, as in "F1 on rank 0 waits for B0 on rank 0, which waits for B0 on rank 1, ..."."""
    chain = [f"{kind}{k} on rank {rank}" for rank, kind, k in reversed(error.args[1])]
    return f"{chain[0]} waits for " + ", which waits for ".join(chain[1:])


def in_turn(p: int, m: int) -> Lists:
    """Return 1F1B's lists. A rank runs an F if fewer than p - rank micro-batches are live, and otherwise a B."""
    rows: list[list[Item]] = []
    for rank in range(p):
        row: list[Item] = []
        forward = backward = 0
        while backward < m:
            if forward < m and forward - backward < p - rank:
                row.append(("F", forward))
                forward += 1
            else:
                row.append(("B", backward))
                backward += 1
        rows.append(row)
    return rows


def random_lists(p: int, m: int, generator: torch.Generator) -> list[list[Item]]:
    """Return lists in a random order that runs to its end, although no one would choose it."""
    rows: list[list[Item]] = [[] for _ in range(p)]
    left = {(rank, kind, k) for rank in range(p) for kind in "FB" for k in range(m)}
    while left:
        ready = sorted(place for place in left if left.isdisjoint(needed(*place, p)))
        rank, kind, k = ready[int(torch.randint(len(ready), (), generator=generator))]
        left.remove((rank, kind, k))
        rows[rank].append((kind, k))
    return rows


def observed(lists: Lists, m: int, p: int) -> list[Observed]:
    """Return what the check compares on each rank. The time is that of the full schedule, with F = 1 and B = 2."""
    missing = [not_once(row, m) for row in lists]
    try:
        span: Any = total_time(lists, 1, 2) if not any(missing) else NotRun("an action is missing or there twice")
        stuck = ""
    except CycleError as error:
        span, stuck = NotRun("the schedule never ends"), circle(error)
    except KeyError:
        span, stuck = NotRun("an action is missing"), ""
    return [{ONCE: Claim(missing[rank]), ENDS: Claim(stuck), PEAK: peak(lists[rank]), TIME: span} for rank in range(p)]


def expected(p: int, m: int, peaks: Sequence[int]) -> list[Mapping[str, Any]]:
    """Return the right peak and time on each rank for p ranks and m micro-batches, with F = 1 and B = 2."""
    return [{PEAK: peaks[rank], TIME: (m + p - 1) * 3.0} for rank in range(p)]


# Exercise 13.1

GPIPE_SIZES = ((2, 3), (1, 2), (4, 8), (3, 1), (4, 2), (8, 5))  # (p, m)

GPIPE_QUESTIONS = (
    Question(
        lambda d: ONCE in d.names,
        "Every rank takes every micro-batch forward once and backward once: 2m actions. Which micro-batches does your "
        "loop go over, and on which rank does it do something else?",
    ),
    Question(
        lambda d: ENDS in d.names,
        "Go round the circle: each of these actions waits for the next one. What does an F need, and of whom? And a "
        "B? In which order must rank 1 take the micro-batches, if rank 0 sends them in order?",
    ),
    Question(
        lambda d: FIRST in d.names,
        "In GPipe no rank goes backward before it has taken all m micro-batches forward. Where does a B stand before "
        "an F?",
    ),
    Question(
        lambda d: TIME in d.names,
        "It runs, but ranks wait longer than they have to. In which order does each rank get its micro-batches from "
        "the neighbour, forward and backward, and in which order does its list take them?",
    ),
)


@exercise("13.1", "GPipe as lists of actions")
def gpipe_lists(gpipe: Callable[..., Any]) -> Verdict:
    for p, m in GPIPE_SIZES:
        call = f"gpipe({p}, {m})"
        with calling(call):
            rows = gpipe(p, m)
        lists = items("13.1", call, rows, p)
        seen = observed(lists, m, p)
        for rank, row in enumerate(lists):
            kinds = "".join(kind for kind, _ in row)
            seen[rank][FIRST] = Claim("" if "BF" not in kinds else f"an F behind a B in {kinds}")
        verify("13.1", p, seen, expected(p, m, [m] * p), questions=GPIPE_QUESTIONS, note=f"m = {m}")
    return Verdict("Every rank has the same list, and holds m micro-batches when it turns round.")


# Exercise 13.2

ONE_F_ONE_B_SIZES = ((2, 3), (4, 8), (1, 3), (4, 4), (4, 2), (3, 1), (8, 11))  # (p, m)


def one_f_one_b_questions(peaks: Sequence[int], p: int, m: int) -> list[Question]:
    """Return the questions about lists in which each rank has this peak of live micro-batches."""
    right = [min(m, p - rank) for rank in range(p)]

    def holds(*wanted: Sequence[int]) -> Callable[[Differences], bool]:
        return lambda d: PEAK in d.names and any(list(peaks) == list(values) for values in wanted)

    return [
        Question(
            lambda d: ONCE in d.names and m < p,
            f"Here are fewer micro-batches than stages: {m} of them. How many forwards can a rank do before its first "
            "backward, if there are only m?",
        ),
        Question(
            lambda d: ONCE in d.names,
            "Every micro-batch goes forward once and backward once on every rank. How many forwards are left after "
            "the warm-up, and how many backwards are left when the forwards have run out?",
        ),
        Question(
            lambda d: ENDS in d.names,
            "Go round the circle: each of these actions waits for the next one. How many forwards must a rank give to "
            "the ranks after it before the first gradient can come back? Which rank needs most of them, the first or "
            "the last?",
        ),
        Question(
            holds([m] * p),
            "Every rank holds all m micro-batches: that is GPipe. When can a rank do its first backward?",
        ),
        Question(
            holds([value + 1 for value in right], [min(m, value + 1) for value in right]),
            "Every rank holds one micro-batch more than it has to. After the warm-up comes a forward, then a backward: "
            "is that forward in your warm-up already?",
        ),
        Question(
            holds([min(m, p)] * p),
            "Every rank holds as many as the first has to. The last stage can turn each micro-batch round at once. How "
            "many stages come after rank r?",
        ),
        Question(
            lambda d: PEAK in d.names and all(mine <= wanted for mine, wanted in zip(peaks, right, strict=True)),
            "Fewer micro-batches are live than may be, and the step takes longer: a rank waits for a gradient where it "
            "could go forward. How many stages come after rank r, and how many forwards is its warm-up?",
        ),
        Question(
            lambda d: PEAK in d.names,
            "Draw your lists for p = 2 and m = 3. How many micro-batches are between their F and their B on each rank "
            "after each action? p - r is right for rank r, and m if there are fewer.",
        ),
        Question(
            lambda d: TIME in d.names,
            "Each rank holds as few as it should, but ranks wait longer than they have to. Does every rank do one "
            "forward and one backward in turn, in the order of the micro-batches?",
        ),
    ]


@exercise("13.2", "1F1B as lists of actions")
def one_f_one_b_lists(one_f_one_b: Callable[..., Any]) -> Verdict:
    for p, m in ONE_F_ONE_B_SIZES:
        call = f"one_f_one_b({p}, {m})"
        with calling(call):
            rows = one_f_one_b(p, m)
        lists = items("13.2", call, rows, p)
        right = expected(p, m, [min(m, p - rank) for rank in range(p)])
        questions = one_f_one_b_questions([peak(row) for row in lists], p, m)
        verify("13.2", p, observed(lists, m, p), right, questions=questions, note=f"m = {m}")
    return Verdict("As quick as GPipe, with at most p - r live micro-batches on rank r, whatever m is.")
