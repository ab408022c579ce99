"""The model of exercise 15.3: four parameters, of which two are cut over tp, and two are whole on each of its ranks.

    x [b, s, 4] · scale -> W1 [8, 4] -> tanh -> W2 [3, 8] -> + shift -> mean square of the distance from y [b, s, 3]

With sequence parallelism each rank scales and shifts its own tokens only, so scale and shift are marked.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tplab.collectives.by_hand import rank_and_size
from tplab.course.checks import random_tensor
from tplab.runtime import device
from tplab.sequence.regions import gather_from_sequence_region, reduce_scatter_to_sequence_region
from tplab.tensor.mappings import copy_to_region, reduce_from_region
from tplab.tensor.sharding import Sharding

PARAMETERS = {"scale": (4,), "W1": (8, 4), "W2": (3, 8), "shift": (3,)}
CUTS = {"W1": 0, "W2": 1}
BATCH, TOKENS = 2, 4  # of a micro-batch


@dataclass(frozen=True)
class Case:
    """A grid of ranks, the micro-batches of a replica, the longest gradient, and whether the sequence is cut."""

    tp: int
    dp: int
    m: int
    max_norm: float
    sequence_parallel: bool = False

    def note(self) -> str:
        grid = f"tp = {self.tp}, dp = {self.dp}, {self.m} micro-batch" + ("es" if self.m > 1 else "")
        return grid + (", with sequence parallelism" if self.sequence_parallel else "")

    def micro_batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return random_tensor(generator, BATCH, TOKENS, 4), random_tensor(generator, BATCH, TOKENS, 3)


def whole_loss(weights: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    """The same on one process, in plain torch."""
    inner = torch.tanh((x * weights["scale"]) @ weights["W1"].T)
    return (inner @ weights["W2"].T + weights["shift"] - y).square().mean()


class SmallModel(nn.Module):
    """model(x, y) -> the mean loss of a micro-batch, the same on every rank of `group`."""

    def __init__(self, weights: Mapping[str, Tensor], case: Case, group: Any) -> None:
        super().__init__()
        self.group, self.case = group, case
        self.rank, self.size = rank_and_size(group)
        for name, value in weights.items():
            part = value.chunk(self.size, CUTS[name])[self.rank] if name in CUTS else value
            parameter = nn.Parameter(part.clone().contiguous().to(device()))
            if name in CUTS:
                parameter.tensor_parallel = Sharding(CUTS[name])  # type: ignore[attr-defined]
            elif case.sequence_parallel:
                parameter.sequence_parallel = True  # type: ignore[attr-defined]
            self.register_parameter(name, parameter)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        w = dict(self.named_parameters())
        if not self.case.sequence_parallel:
            inner = torch.tanh(copy_to_region(x * w["scale"], self.group) @ w["W1"].T)  # [b, s, 8/p]
            out = reduce_from_region(inner @ w["W2"].T, self.group) + w["shift"]  # [b, s, 3]
            return (out - y).square().mean()
        x, y = (t.chunk(self.size, 1)[self.rank].contiguous() for t in (x, y))  # [b, s/p, ..]
        inner = torch.tanh(gather_from_sequence_region(x * w["scale"], self.group) @ w["W1"].T)  # [b, s, 8/p]
        out = reduce_scatter_to_sequence_region(inner @ w["W2"].T, self.group) + w["shift"]  # [b, s/p, 3]
        return reduce_from_region((out - y).square().sum() / (BATCH * TOKENS * 3), self.group)


def reduced(section: Any, group: Any) -> int:
    """Numbers in messages of a group; those of reduce-scatters and all-gathers count half: an all-reduce is both."""
    ranks = dist.get_process_group_ranks(group)
    count = 0.0
    for call in section:
        if sorted(call.group) == sorted(ranks) and len(ranks) > 1:
            count += call.numel * {"all_reduce": 1.0, "reduce_scatter": 0.5, "all_gather": 0.5}.get(call.kind, 1.0)
    return int(count)


def messages_of_model(case: Case) -> int:
    """Numbers in the tp messages of forward and backward, a reduce-scatter or an all-gather counted as half."""
    if case.tp == 1:
        return 0
    both = BATCH * TOKENS * (4 + 3)  # what W1 reads, and what W2 writes
    return case.m * (both + 1 if case.sequence_parallel else both)
