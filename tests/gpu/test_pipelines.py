"""Every schedule over NCCL, for every small number of ranks and micro-batches, beside the same model on the CPU."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from tests.gpu.implementations import over_nccl
from tests.gpu.test_layers import check_is_open
from tplab import device
from tplab.pipeline import Pipeline, schedules
from tplab.pipeline.p2p import Channels
from tplab.pipeline.schedules import Schedule

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]  # two launches of at most 240 s, and NCCL's start

MAKE: dict[str, Callable[[int, int], Schedule]] = {
    "GPipe": schedules.gpipe,
    "1F1B": schedules.one_f_one_b,
    "zero bubble": schedules.zero_bubble,
    "interleaved": lambda p, m: schedules.interleaved(p, m, 2),
}
BATCH, WIDTH = 2, 4


def cases(p: int) -> list[tuple[str, int]]:
    return [(name, m) for name, m in product(MAKE, (1, 2, 3, 4, 8)) if name != "interleaved" or m % p == 0]


def stage(number: int) -> nn.Linear:
    drawn = torch.Generator().manual_seed(number)
    layer = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
    layer.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=drawn, dtype=torch.float64) / 2)
    return layer


def batch(m: int) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(m)
    return [torch.randn(BATCH, WIDTH, generator=drawn, dtype=torch.float64) for _ in range(m)]


def of_this_rank(p: int) -> dict[tuple[str, int], tuple[float | None, dict[int, Tensor]]]:
    """For each case, the loss on the last rank and the gradients of this rank's stages, by their numbers."""
    channels, found, here = Channels(), {}, device()
    for name, m in cases(p):
        schedule = MAKE[name](p, m)
        numbers = [chunk * p + channels.rank for chunk in range(schedule.chunks)]
        stages = [stage(number).to(here) for number in numbers]
        pipeline = Pipeline(
            stages, schedule, shape=(BATCH, WIDTH), dtype=torch.float64, device=here, channels=channels,
            loss_sum=lambda y, x: (y * x).sum(),
        )  # fmt: skip
        micro_batches = [x.to(here) for x in batch(m)]
        loss = pipeline.step(micro_batches if pipeline.is_first else None, micro_batches if pipeline.is_last else None)
        gradients = {number: one.weight.grad for number, one in zip(numbers, stages, strict=True)}
        found[name, m] = None if loss is None else float(loss), gradients
    return found


def plain(stages: int, m: int) -> tuple[float, dict[int, Tensor]]:
    model = nn.Sequential(*(stage(number) for number in range(stages)))
    x = torch.cat(batch(m))
    loss = (model(x) * x).sum() / x.numel()
    loss.backward()
    return loss.item(), {number: one.weight.grad for number, one in enumerate(model)}


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_every_schedule_gets_through_and_gives_the_gradients_of_plain_torch(p: int) -> None:
    check_is_open(over_nccl(p))
    ranks = over_nccl(p).run(of_this_rank, p)
    for name, m in cases(p):
        loss, gradients = plain(p * MAKE[name](p, m).chunks, m)
        assert ranks[-1][name, m][0] == pytest.approx(loss, rel=1e-9), (name, m)
        found = {number: gradient for rank in ranks for number, gradient in rank[name, m][1].items()}
        assert found.keys() == gradients.keys()
        for number, gradient in gradients.items():
            torch.testing.assert_close(found[number], gradient, rtol=1e-9, atol=1e-12)
