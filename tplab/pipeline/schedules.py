"""Chapter 13: pipeline schedules as data, which list each rank's actions in order.

The layers are split into stages; rank r has stage r. A batch is split into m micro-batches, and each one goes forward
through all stages, then backward through all of them. A schedule only chooses the order of these actions on each rank.

    gpipe(2, 3)          rank 0    F0 F1 F2 B0 B1 B2
                         rank 1    F0 F1 F2 B0 B1 B2
    one_f_one_b(2, 3)    rank 0    F0 F1 B0 F2 B1 B2
                         rank 1    F0 B0 F1 B1 F2 B2

    F    forward: needs the previous stage's output, sends its output to the next stage
    B    backward: needs the gradient of its output, sends the gradient of its input
    I    the half of B that the previous stage waits for: the gradient of the stage's input
    W    the other half: the gradient of the weights, at any time after I

With v chunks per rank, the model has p v stages, and rank r has stages r, r + p, r + 2p, ..

                   bubble                    live micro-batches on rank r
    gpipe          (p-1)/m                   m
    one_f_one_b    (p-1)/m                   min(m, p - r)
    interleaved    (p-1)/(m v)               at most (2(p - r - 1) + (v-1) p + 1) / v
    zero_bubble    (p-1)/(3m)                min(m, p)

The bubble is a rank's idle time divided by its working time; `pipeline.schedule_order` computes it. A micro-batch is
live from its F to its B, or to its W if B is split. For zero_bubble, the table assumes that m >= p and that F, I and W
take equally long; in general, the bubble is (p-1)(F + I - W) / (m (F + I + W)). (Huang et al. 2018, "GPipe"; Narayanan
et al. 2019, "PipeDream", for 1F1B; Narayanan et al. 2021, "Efficient large-scale language model training on GPU
clusters", for interleaved; Qi et al. 2023, "Zero bubble pipeline parallelism", ZB-H1.)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate


@dataclass(frozen=True)
class Action:
    """What a rank does with one micro-batch in one of its chunks. `kind` is F, B, I or W."""

    kind: str
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}" + (f"/{self.chunk}" if self.chunk else "")


Result = tuple[str, int, int]  # "output" or "gradient" (of the input), the stage that computes it, the micro-batch


@dataclass(frozen=True)
class Schedule:
    """Each rank's actions, in order. `tplab.pipeline.schedule_order.check` checks that they can run.

    actions          one list for each of the p ranks
    micro_batches    m
    chunks           v, the number of stages per rank
    trains           False if the schedule is forward only
    """

    name: str
    actions: tuple[tuple[Action, ...], ...]
    micro_batches: int
    chunks: int = 1
    trains: bool = True

    @property
    def world_size(self) -> int:
        return len(self.actions)

    @property
    def stages(self) -> int:
        return self.world_size * self.chunks

    def stage(self, rank: int, chunk: int) -> int:
        return chunk * self.world_size + rank

    def needs(self, rank: int, action: Action) -> Result | None:
        """Return the result that the action needs from a neighbor, or None.

        The first stage's F, the last stage's B or I, and every W need no such result.
        """
        stage = self.stage(rank, action.chunk)
        if action.kind == "F":
            return ("output", stage - 1, action.micro_batch) if stage > 0 else None
        if action.kind == "W" or stage == self.stages - 1:
            return None
        return ("gradient", stage + 1, action.micro_batch)

    def gives(self, rank: int, action: Action) -> Result | None:
        """Return the result of the action that a neighbor needs, or None.

        No neighbor needs a result of the last stage's F, of the first stage's B or I, or of any W.
        """
        stage = self.stage(rank, action.chunk)
        if action.kind == "F":
            return ("output", stage, action.micro_batch) if stage < self.stages - 1 else None
        return None if action.kind == "W" or stage == 0 else ("gradient", stage, action.micro_batch)

    def receiver(self, result: Result) -> int:
        """Return the rank that needs the result."""
        what, stage, _ = result
        return (stage + 1 if what == "output" else stage - 1) % self.world_size


# The four schedules


def gpipe(p: int, m: int) -> Schedule:
    """Return the GPipe schedule, which runs all forward passes, then all backward passes."""
    _check_sizes(p, m)
    row = [Action("F", k) for k in range(m)] + [Action("B", k) for k in range(m)]
    return Schedule(f"GPipe, p = {p}, m = {m}", (tuple(row),) * p, m)


def one_f_one_b(p: int, m: int) -> Schedule:
    """Return the 1F1B schedule: p - rank - 1 forward passes, then one forward and one backward in turn, then the rest.

    Each micro-batch runs backward as early as possible, so at most p - rank micro-batches are live.
    """
    _check_sizes(p, m)
    rows = []
    for rank in range(p):
        forwards, backwards = ([Action(kind, k) for k in range(m)] for kind in "FB")
        rows.append(_in_turn(forwards, backwards, warm_up=p - rank - 1))
    return Schedule(f"1F1B, p = {p}, m = {m}", tuple(map(tuple, rows)), m)


def interleaved(p: int, m: int, v: int) -> Schedule:
    """Return a 1F1B schedule with v smaller stages per rank, which m micro-batches visit in v rounds.

    A rank runs p micro-batches through its first chunk, then the same p through its second (p must divide m). Smaller
    stages fill the pipeline faster, but v times as many messages are sent, and more micro-batches are live.
    """
    _check_sizes(p, m, v)
    if v == 1:
        return one_f_one_b(p, m)
    if m % p:
        raise ValueError(f"{m} micro-batches can't go round {p} ranks in whole rounds: use a multiple of {p}")
    rounds = [range(first, first + p) for first in range(0, m, p)]
    rows = []
    for rank in range(p):
        forwards = [Action("F", k, chunk) for round_ in rounds for chunk in range(v) for k in round_]
        backwards = [Action("B", k, chunk) for round_ in rounds for chunk in reversed(range(v)) for k in round_]
        rows.append(_in_turn(forwards, backwards, warm_up=2 * (p - rank - 1) + (v - 1) * p))
    return Schedule(f"interleaved 1F1B, p = {p}, m = {m}, v = {v}", tuple(map(tuple, rows)), m, v)


def zero_bubble(p: int, m: int) -> Schedule:
    """Return the ZB-H1 schedule: 1F1B with B split into I, which runs early, and W, which fills idle time.

    I runs early because the previous stage is waiting for it. Rank r delays each W by r micro-batches, because more
    ranks are waiting for the I of a later stage.
    """
    _check_sizes(p, m)
    rows = []
    for rank in range(p):
        warm_up = min(m, p - rank - 1)
        row = [Action("F", k) for k in range(warm_up)]
        for k in range(m):
            row += [Action("F", k + warm_up)] if k + warm_up < m else []
            row += [Action("I", k)]
            row += [Action("W", k - rank)] if k >= rank else []
        row += [Action("W", k) for k in range(max(0, m - rank), m)]
        rows.append(row)
    return Schedule(f"zero bubble (ZB-H1), p = {p}, m = {m}", tuple(map(tuple, rows)), m)


def forward_only(schedule: Schedule) -> Schedule:
    """Return a copy of the schedule without backward passes, for evaluation."""
    rows = tuple(tuple(action for action in row if action.kind == "F") for row in schedule.actions)
    return replace(schedule, name=f"{schedule.name}, forward only", actions=rows, trains=False)


def peak_live(schedule: Schedule) -> list[int]:
    """Return each rank's maximum number of live micro-batches. With v chunks, each of them is 1/v as large."""
    changes = {"F": int(schedule.trains), "B": -1, "I": 0, "W": -1}
    return [max(accumulate(changes[action.kind] for action in row), default=0) for row in schedule.actions]


def _in_turn(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> list[Action]:
    """Return `warm_up` forward passes, then one forward and one backward in turn, then the remaining backward ones."""
    warm_up = min(warm_up, len(forwards))
    row = list(forwards[:warm_up])
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        row += [forward, backward]
    return row + list(backwards[len(forwards) - warm_up :])


def _check_sizes(p: int, m: int, v: int = 1) -> None:
    if min(p, m, v) < 1:
        raise ValueError(f"p={p} ranks, m={m} micro-batches and v={v} chunks should all be at least 1")
