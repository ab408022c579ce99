"""Every schedule gets through under NCCL's rules, which are simulated: no GPU, and no other processes."""

from itertools import product

import pytest
import torch
from torch import Tensor, nn

from tests.pipeline import nccl_rules
from tests.pipeline.nccl_rules import SimulatedChannels
from tplab.pipeline import schedules
from tplab.pipeline.executor import _Run
from tplab.pipeline.p2p import Messages, connections
from tplab.pipeline.schedules import Schedule

SIZES = [(p, m) for p, m in product((2, 3, 4, 8), (1, 2, 3, 4, 8, 16))]
SCHEDULES = {
    f"{name}, p = {p}, m = {m}": make(p, m)
    for name, make in {
        "GPipe": schedules.gpipe,
        "1F1B": schedules.one_f_one_b,
        "zero bubble": schedules.zero_bubble,
        "interleaved": lambda p, m: schedules.interleaved(p, m, 2),
    }.items()
    for p, m in SIZES
    if name != "interleaved" or m % p == 0
}


def gets_through(schedule: Schedule, opens: bool) -> bool:
    """Whether all ranks finish a step, with connections opened first or by the schedule's own messages."""
    p = schedule.world_size
    losses: list[Tensor] = []

    def program(channels: SimulatedChannels) -> None:
        if opens:
            channels.open_connections(torch.device("cpu"))
        stages = [nn.Linear(1, 1, bias=False) for _ in range(schedule.chunks)]
        messages = Messages(channels, schedule, (1, 1), torch.float32, torch.device("cpu"))
        inputs = [torch.ones(1, 1)] * schedule.micro_batches if channels.rank == 0 else ()
        run = _Run(stages, schedule, channels.rank, messages, inputs, lambda y, k: y.sum())
        run.play()
        losses.extend(run.finished.values())

    done = nccl_rules.run(p, program)
    assert not done or len(losses) == schedule.micro_batches
    return done


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_every_schedule_gets_through_when_connections_are_open(schedule: Schedule) -> None:
    assert gets_through(schedule, opens=True)


def test_without_open_connections_schedules_get_stuck() -> None:
    stuck = [name for name, schedule in SCHEDULES.items() if not gets_through(schedule, opens=False)]
    assert {name for name in SCHEDULES if name.startswith("GPipe")} <= set(stuck)
    assert {name.partition(",")[0] for name in stuck} == {"GPipe", "1F1B", "zero bubble", "interleaved"}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_no_schedule_uses_a_connection_that_was_not_opened(schedule: Schedule) -> None:
    used = set()
    for rank, row in enumerate(schedule.actions):
        for action in row:
            if (result := schedule.gives(rank, action)) is not None and schedule.receiver(result) != rank:
                used.add((rank, schedule.receiver(result)))
    assert used <= set(connections(schedule.world_size))
