"""Chapter 13: check whether a schedule can run, and compute when each action starts.

Every rank works through its list, one action after another. An action starts when the rank has finished the previous
one and the action's inputs are available:

    F    the output of the previous stage
    B, I the gradient from the next stage, and the rank's own F
    W    the rank's own I

If actions wait for each other in a cycle, the schedule never ends. `check` detects that before anything is sent:

    'B of micro-batch 0 on stage 0' on rank 0 waits for 'B of micro-batch 0 on stage 1',
    and 'F of micro-batch 1 on stage 1' on rank 1 waits for 'F of micro-batch 1 on stage 0'

`simulate` computes when each action starts and ends, given their durations, with the clock of chapter 11. `bubble`
computes the resulting idle time, as a fraction of the working time.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tplab.cost import clock
from tplab.pipeline.schedules import Action, Schedule

DURATIONS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}  # a backward pass has two matmuls per matmul in the forward pass


class ScheduleError(ValueError):
    """Raised for a schedule that is incomplete or would never end."""


@dataclass(frozen=True)
class Span:
    """An action with its start and end times."""

    action: Action
    start: float
    end: float


def simulate(schedule: Schedule, durations: Mapping[str, float] = DURATIONS) -> list[list[Span]]:
    """Return the start and end of each action, by rank.

    durations    how long each kind of action takes for all layers of a rank. With v chunks, an action takes 1/v of that

    Raises ScheduleError for schedules that `check` rejects.
    """
    _check_complete(schedule)
    operations = [
        _operation(schedule, rank, action, durations[action.kind] / schedule.chunks)
        for rank, row in enumerate(schedule.actions)
        for action in row
    ]
    try:
        lanes = clock.play(operations).lanes
    except clock.OrderError as error:
        raise ScheduleError(f"this schedule never ends: {error}") from None
    return [
        [Span(action, span.start, span.end) for action, span in zip(row, lanes.get((rank, "compute"), []), strict=True)]
        for rank, row in enumerate(schedule.actions)
    ]


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


def _operation(schedule: Schedule, rank: int, action: Action, duration: float) -> clock.Operation[str]:
    stage, k = schedule.stage(rank, action.chunk), action.micro_batch
    needs = [] if action.kind == "F" else [_name("I" if action.kind == "W" else "F", stage, k)]
    result = schedule.needs(rank, action)
    if result is not None:
        needs.append(_name("F" if result[0] == "output" else "B", *result[1:]))
    return clock.Operation(_name(action.kind, stage, k), duration, needs, rank=rank)


def _name(kind: str, stage: int, micro_batch: int) -> str:
    """Return the name of an action's result. I counts as B, because the previous stage waits only for I."""
    return f"{'B' if kind == 'I' else kind} of micro-batch {micro_batch} on stage {stage}"


def _check_complete(schedule: Schedule) -> None:
    complete = {"BF": "F and B", "FIW": "F, I and W"} if schedule.trains else {"F": "only F"}
    for rank, row in enumerate(schedule.actions):
        kinds = {(chunk, k): "" for chunk in range(schedule.chunks) for k in range(schedule.micro_batches)}
        for action in row:
            if (action.chunk, action.micro_batch) not in kinds:
                raise ScheduleError(
                    f"rank {rank} has {action}, but there are {schedule.micro_batches} micro-batches and "
                    f"{schedule.chunks} chunks, counted from 0"
                )
            kinds[action.chunk, action.micro_batch] += action.kind
        for (chunk, k), found in kinds.items():
            if "".join(sorted(found)) not in complete:
                raise ScheduleError(
                    f"rank {rank} does {', '.join(found) or 'nothing'} for micro-batch {k} in chunk {chunk}. Every "
                    f"micro-batch needs {', or '.join(complete.values())}, each of them once"
                )
