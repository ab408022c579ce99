"""Chapter 11: the time of a list of operations, some of which can run at the same time.

    play([Operation("dX", 5), Operation("message", 8, ["dX"], lane="wire"),
          Operation("dW", 5), Operation("wait", 0, ["message"])])

    compute   ██ dX ██ ██ dW ██ ··wait··│          total 13, and the rank waits from 10 to 13
    wire               ▒▒ message ▒▒▒▒▒▒│

Each rank has lanes, such as "compute" and "wire", and each lane runs its operations one after another, in the order of
the list. An operation starts once its lane is free and everything it needs is done, on whichever lane or rank that is:

    start  =  max(end of the previous operation of the lane, ends of all operations that it needs)

So times follow from the order alone, as the longest path through the graph of who waits for whom.
(`tplab.pipeline.schedule_order` plays pipeline schedules on it.)
"""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)
Lane = tuple[int, str]  # the rank and the name of the lane


@dataclass(frozen=True)
class Operation(Generic[Name]):
    """Something that takes time and makes one result, called like the operation.

    name       unique among all operations of all ranks
    duration   in any unit of time, at least 0
    needs      the names of the operations whose results it uses
    lane, rank where it runs
    """

    name: Name
    duration: float
    needs: Collection[Name] = ()
    lane: str = "compute"
    rank: int = 0


@dataclass(frozen=True)
class Span(Generic[Name]):
    """An operation with its start and end times."""

    operation: Operation[Name]
    start: float
    end: float


class OrderError(ValueError):
    """Raised for lists that never end, or that miss an operation.

    operation    the name of the first operation of a lane that can't start
    missing      the name of a result that it needs and doesn't get
    circle       the (operation, missing name) pairs that wait for each other, if the result is in the lists
    """

    def __init__(
        self, operation: Operation[Any], missing: Hashable, circle: Sequence[tuple[Operation[Any], Any]]
    ) -> None:
        self.operation, self.missing, self.circle = operation.name, missing, circle
        links = [f"{one.name!r} on rank {one.rank} waits for {name!r}" for one, name in circle]
        why = ", and ".join(links) if circle else "no operation has that name"
        why = why if len(circle) != 1 else "that comes later in the same lane"
        super().__init__(f"{operation.name!r} on rank {operation.rank} can't start without {missing!r}: {why}")


@dataclass(frozen=True)
class Timing(Generic[Name]):
    """When each operation of a list starts and ends. The first one starts at 0.

    spans    by name of the operation
    """

    spans: Mapping[Name, Span[Name]]

    @cached_property
    def total(self) -> float:
        """The time from 0 to the end of the last operation."""
        return max((span.end for span in self.spans.values()), default=0.0)

    @cached_property
    def lanes(self) -> dict[Lane, list[Span[Name]]]:
        """The spans of each lane, in order."""
        lanes: dict[Lane, list[Span[Name]]] = {}
        for span in self.spans.values():
            lanes.setdefault((span.operation.rank, span.operation.lane), []).append(span)
        return lanes

    def waits(self, rank: int = 0, lane: str = "compute") -> list[Span[Name]]:
        """Return the intervals in which a lane was idle, each with the operation that came next."""
        found, free = [], 0.0
        for span in self.lanes.get((rank, lane), []):
            if span.start > free:
                found.append(Span(span.operation, free, span.start))
            free = span.end
        return found

    @cached_property
    def lifetimes(self) -> dict[Name, tuple[float, float]]:
        """When each result exists: from the start of its operation to the end of the last one that uses it."""
        ends = {name: span.end for name, span in self.spans.items()}
        for span in self.spans.values():
            for name in span.operation.needs:
                ends[name] = max(ends[name], span.end)
        return {name: (span.start, ends[name]) for name, span in self.spans.items()}


def play(operations: Iterable[Operation[Name]]) -> Timing[Name]:
    """Return each operation's start and end time, if each lane runs its operations in the order of the list.

    operations    of all lanes and ranks. Only the order within a lane matters. Other ranks can use a result at once, so
                  put an operation for each message into a lane of its own

    Raises OrderError if operations wait for each other, or for one that isn't there, and ValueError for a name that
    occurs twice or a negative duration.
    """
    lanes: dict[Lane, list[Operation[Name]]] = {}
    by_name: dict[Name, Operation[Name]] = {}
    for operation in operations:
        if operation.name in by_name:
            raise ValueError(f"there are two operations {operation.name!r}: give each one a name of its own")
        if not operation.duration >= 0:
            raise ValueError(f"{operation.name!r} has the duration {operation.duration}: it has to be at least 0")
        by_name[operation.name] = operation
        lanes.setdefault((operation.rank, operation.lane), []).append(operation)
    spans: dict[Name, Span[Name]] = {}
    at, free = dict.fromkeys(lanes, 0), dict.fromkeys(lanes, 0.0)
    going = True
    while going:
        going = False
        for lane, row in lanes.items():
            while at[lane] < len(row) and all(name in spans for name in row[at[lane]].needs):
                operation = row[at[lane]]
                start = max([free[lane], *(spans[name].end for name in operation.needs)])
                free[lane] = start + operation.duration
                spans[operation.name] = Span(operation, start, free[lane])
                at[lane] += 1
                going = True
    stuck = {lane: row[at[lane]] for lane, row in lanes.items() if at[lane] < len(row)}
    if stuck:
        raise _impossible(stuck, spans, by_name)
    return Timing(spans)


def _impossible(
    stuck: Mapping[Lane, Operation[Name]], done: Collection[Name], by_name: Mapping[Name, Operation[Name]]
) -> OrderError:
    """Follow who waits for whom, starting from the first lane that is stuck, until a lane comes up again."""
    path: list[tuple[Operation[Name], Name]] = []
    operation = next(iter(stuck.values()))
    while operation not in (earlier for earlier, _ in path):
        missing = next(name for name in operation.needs if name not in done)
        path.append((operation, missing))
        if missing not in by_name:
            return OrderError(operation, missing, [])
        operation = stuck[by_name[missing].rank, by_name[missing].lane]
    circle = path[[earlier for earlier, _ in path].index(operation) :]
    return OrderError(*circle[0], circle)
