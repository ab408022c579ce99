"""The model for exercise 15.3, on a grid of ranks and in a single process.

Of its four parameters, W1 and W2 are split over tp, and scale and shift are replicated on every tensor-parallel rank:

    x [b, s, 4] · scale -> W1 [8, 4] -> tanh -> W2 [3, 8] -> + shift -> mean squared distance from y [b, s, 3]

With sequence parallelism, each rank scales and shifts only its own tokens, so scale and shift are marked with
`sequence_parallel`.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tplab.collectives.by_hand import rank_and_size
from tplab.course.checks.cases import random_tensor
from tplab.runtime import device
from tplab.sequence.regions import gather_from_sequence_region, reduce_scatter_to_sequence_region
from tplab.tensor.operators import copy_to_region, reduce_from_region
from tplab.tensor.sharding import Sharding

PARAMETERS = {"scale": (4,), "W1": (8, 4), "W2": (3, 8), "shift": (3,)}
CUTS = {"W1": 0, "W2": 1}  # the dimension along which each of these is split
BATCH, TOKENS = 2, 4  # size of a micro-batch
LR = 0.2  # learning rate for plain SGD, which doesn't hide a wrong factor

Weights = dict[str, Tensor]
MicroBatch = tuple[Tensor, Tensor]  # x [b, s, 4] and y [b, s, 3]


class SmallModel(nn.Module):
    """A model for which model(x, y) is the mean loss of a micro-batch, the same on every rank of `group`."""

    def __init__(self, weights: Weights, group: Any, *, sequence_parallel: bool) -> None:
        super().__init__()
        self.group, self.sequence_parallel = group, sequence_parallel
        self.rank, self.size = rank_and_size(group)
        for name, value in weights.items():
            part = value.chunk(self.size, CUTS[name])[self.rank] if name in CUTS else value
            parameter = nn.Parameter(part.clone().contiguous().to(device()))
            if name in CUTS:
                parameter.tensor_parallel = Sharding(CUTS[name])  # type: ignore[attr-defined]
            elif sequence_parallel:
                parameter.sequence_parallel = True  # type: ignore[attr-defined]
            self.register_parameter(name, parameter)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        w = dict(self.named_parameters())
        if not self.sequence_parallel:
            inner = torch.tanh(copy_to_region(x * w["scale"], self.group) @ w["W1"].T)  # [b, s, 8/p]
            out = reduce_from_region(inner @ w["W2"].T, self.group) + w["shift"]  # [b, s, 3]
            return (out - y).square().mean()
        x, y = (t.chunk(self.size, 1)[self.rank].contiguous() for t in (x, y))  # [b, s/p, ..]
        inner = torch.tanh(gather_from_sequence_region(x * w["scale"], self.group) @ w["W1"].T)  # [b, s, 8/p]
        out = reduce_scatter_to_sequence_region(inner @ w["W2"].T, self.group) + w["shift"]  # [b, s/p, 3]
        return reduce_from_region((out - y).square().sum() / (BATCH * TOKENS * 3), self.group)


def messages_of_model(tp: int, *, sequence_parallel: bool) -> int:
    """Return the number of elements that a micro-batch sends over tp, as counted by `reduced`."""
    both = BATCH * TOKENS * (4 + 3)  # the input of W1 and the output of W2
    return 0 if tp == 1 else both + sequence_parallel


def reduced(section: Any, group: Any) -> int:
    """Count a group's message elements. Reduce-scatters and all-gathers count half, because an all-reduce is both."""
    ranks = dist.get_process_group_ranks(group)
    count = 0.0
    for call in section:
        if sorted(call.group) == sorted(ranks) and len(ranks) > 1:
            count += call.numel * (0.5 if call.kind in ("reduce_scatter", "all_gather", "reduce", "broadcast") else 1.0)
    return int(count)


def random_weights(generator: torch.Generator) -> Weights:
    return {name: random_tensor(generator, *shape) for name, shape in PARAMETERS.items()}


def random_micro_batch(generator: torch.Generator) -> MicroBatch:
    return random_tensor(generator, BATCH, TOKENS, 4), random_tensor(generator, BATCH, TOKENS, 3)


def shards_of(weights: Weights, t: int, tp: int) -> Weights:
    """Return the shards on tensor-parallel rank t."""
    return {n: v.chunk(tp, CUTS[n])[t].contiguous() if n in CUTS else v for n, v in weights.items()}


def loss_and_gradients(weights: Weights, micro_batch: MicroBatch) -> tuple[float, Weights]:
    """Return the mean loss of a micro-batch and its gradients, computed in plain PyTorch."""
    x, y = micro_batch
    w = {name: value.clone().requires_grad_() for name, value in weights.items()}
    inner = torch.tanh((x * w["scale"]) @ w["W1"].T)  # [b, s, 8]
    loss = (inner @ w["W2"].T + w["shift"] - y).square().mean()
    return loss.item(), dict(zip(w, torch.autograd.grad(loss, list(w.values())), strict=True))


def summed(parts: Sequence[Weights], factor: float) -> Weights:
    """Sum several gradients, and multiply the sum by a factor."""
    return {name: factor * torch.stack([part[name] for part in parts]).sum(0) for name in PARAMETERS}


def norm_of(gradient: Weights) -> float:
    return float(torch.cat([value.flatten() for value in gradient.values()]).norm())


def stepped(weights: Weights, gradient: Weights, max_norm: float) -> Weights:
    """Return the weights after a step with this gradient, clipped to max_norm."""
    factor = min(1.0, max_norm / (norm_of(gradient) + 1e-6))
    return {name: weights[name] - LR * factor * gradient[name] for name in weights}
