"""Chapter 13: check whether a schedule can run, and compute when each action starts.

Every rank works through its list, one action after another. An action starts when the rank has finished the previous
one and the action's inputs are available:

    F    the output of the previous stage
    B, I the gradient from the next stage, and the rank's own F
    W    the rank's own I

If actions wait for each other in a cycle, the schedule never ends. `check` detects that before anything is sent:

    rank 0, at its B of micro-batch 0, waits for B of micro-batch 0 from rank 1,
    which, at its F of micro-batch 1, waits for F of micro-batch 1 from rank 0

`simulate` computes when each action starts and ends, given their durations, with the clock of chapter 11. `bubble`
computes the resulting idle time, as a fraction of the working time.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tplab.cost import clock
from tplab.pipeline.schedules import KINDS, Action, Schedule

DURATIONS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}  # a backward pass has two matmuls per matmul in the forward pass

Durations = Mapping[str, float] | Callable[[int, Action], float]
Key = tuple[str, int, int]  # kind (I counts as B), stage, micro-batch


class ScheduleError(ValueError):
    """Raised for a schedule that is incomplete or would never end."""


@dataclass(frozen=True)
class Span:
    """An action with its start and end times."""

    action: Action
    start: float
    end: float


def simulate(schedule: Schedule, durations: Durations = DURATIONS) -> list[list[Span]]:
    """Return the start and end of each action, by rank.

    durations    how long each kind of action takes for all layers of a rank (with v chunks, an action takes 1/v of
                 that), or a function (rank, action) -> duration

    Raises ScheduleError for schedules that `check` rejects.
    """
    _check_complete(schedule)
    lasts = durations if callable(durations) else _by_kind(durations, schedule.chunks)
    actions = {_key(schedule, rank, action): action for rank, row in enumerate(schedule.actions) for action in row}
    operations = [
        clock.Operation(_key(schedule, rank, action), lasts(rank, action), _needs(schedule, rank, action), rank=rank)
        for rank, row in enumerate(schedule.actions)
        for action in row
    ]
    try:
        lanes = clock.play(operations).lanes
    except clock.OrderError as error:
        raise ScheduleError(f"this schedule never ends: {_circle(schedule, actions, error.circle)}") from None
    rows = [lanes.get((rank, "compute"), []) for rank in range(schedule.world_size)]
    return [[Span(actions[span.operation.name], span.start, span.end) for span in row] for row in rows]


def check(schedule: Schedule) -> None:
    """Raise ScheduleError if actions are missing or duplicated, or if the order is impossible. The message says why.

    Every micro-batch needs one F on each stage and either one B or both I and W. A forward-only schedule has only F.
    """
    simulate(schedule)


def bubble(spans: list[list[Span]]) -> float:
    """Return the ratio of idle time to working time over all ranks, which is (p-1)/m for GPipe and 1F1B."""
    every = [span for row in spans for span in row]
    total = max(span.end for span in every) - min(span.start for span in every)
    working = sum(span.end - span.start for span in every)
    return len(spans) * total / working - 1


def _by_kind(durations: Mapping[str, float], chunks: int) -> Callable[[int, Action], float]:
    return lambda rank, action: durations[action.kind] / chunks


# Dependencies


def _key(schedule: Schedule, rank: int, action: Action) -> Key:
    """Return the key of an action's result. I counts as B, because the previous stage waits only for I."""
    return ("B" if action.kind == "I" else action.kind), schedule.stage(rank, action.chunk), action.micro_batch


def _needs(schedule: Schedule, rank: int, action: Action) -> list[Key]:
    stage, k = schedule.stage(rank, action.chunk), action.micro_batch
    own: list[Key] = {"F": [], "W": [("B", stage, k)]}.get(action.kind, [("F", stage, k)])
    result = schedule.needs(rank, action)
    return own if result is None else [*own, ("F" if result[0] == "output" else "B", *result[1:])]


def _check_complete(schedule: Schedule) -> None:
    m, v, wanted = schedule.micro_batches, schedule.chunks, ("F", "B") if schedule.trains else ("F",)
    for rank, row in enumerate(schedule.actions):
        counts = Counter(row)
        for action, count in counts.items():
            if action.kind not in KINDS:
                raise ScheduleError(f"rank {rank} has an action {action.kind!r}; there are {', '.join(KINDS)}")
            if not (0 <= action.micro_batch < m and 0 <= action.chunk < v):
                there = f"there are {m} micro-batches" + (f" and {v} chunks" if v > 1 else "")
                raise ScheduleError(f"rank {rank} has {action.in_words}, but {there}, counted from 0")
            if action.kind != "F" and not schedule.trains:
                raise ScheduleError(f"rank {rank} has {action.in_words} in a schedule that is forward only")
            if count > 1:
                raise ScheduleError(f"rank {rank} does {action.in_words} {count} times; once is right")
        for chunk in range(v):
            for k in range(m):
                for kind in wanted:
                    _check_once(rank, Action(kind, k, chunk), counts)


def _check_once(rank: int, action: Action, counts: Counter[Action]) -> None:
    """Raise ScheduleError unless the rank has the action or, in place of B, both of its halves."""
    halves = [Action(kind, action.micro_batch, action.chunk) for kind in "IW"] if action.kind == "B" else []
    missing = [half for half in halves if not counts[half]]
    if counts[action]:
        if len(missing) < len(halves):
            raise ScheduleError(f"rank {rank} does {action.in_words} whole and by halves: B, or I and W, not both")
    elif missing and len(missing) < len(halves):
        raise ScheduleError(f"rank {rank} never does {missing[0].in_words}, the other half of its backward")
    elif missing or action.kind == "F":
        raise ScheduleError(f"rank {rank} never does {action.in_words}")


def _circle(
    schedule: Schedule, actions: Mapping[Key, Action], circle: Sequence[tuple[clock.Operation[Key], Key]]
) -> str:
    """Describe the cycle of ranks that wait for each other, as (operation, missing result) pairs."""
    if len(circle) == 1:
        ((one, key),) = circle
        return f"rank {one.rank} would do {actions[one.name].in_words} before its own {actions[key].in_words}"
    links = [
        f"at its {actions[one.name].in_words}, waits for {actions[key].in_words} from rank {schedule.rank_of(key[1])}"
        for one, key in circle
    ]
    return f"rank {circle[0][0].rank}, " + ", which, ".join(links)
