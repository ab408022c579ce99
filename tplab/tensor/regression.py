"""Chapter 04: a small regression problem that shows what a row-parallel layer learns.

    y = x Wᵀ + b     x [64, 8], W [4, 8], y [64, 4], and every element of the true bias b is 2

All ranks train the layer with plain SGD, and each rank has its own slice of the inputs.
"""

from collections.abc import Callable, Sequence
from typing import TypedDict

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tplab.runtime import device
from tplab.tensor.sharding import shard

IN, OUT, EXAMPLES, BIAS = 8, 4, 64, 2.0
STEPS, LEARNING_RATE = 40, 0.2


class Fit(TypedDict):
    """A rank's result after training."""

    losses: list[float]  # before each step, and after the last one
    weight: Tensor  # this rank's shard [4, 8/p]
    bias: Tensor  # [4]


def problem() -> tuple[Tensor, Tensor]:
    """Return the inputs [64, 8] and the targets [64, 4], which are the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(OUT, IN, generator=generator)
    inputs = torch.randn(EXAMPLES, IN, generator=generator)
    return inputs, inputs @ weight.T + BIAS


def fit(layer_class: Callable[..., nn.Module]) -> Fit:
    """Train `layer_class(8, 4)` on this rank's inputs [64, 8/p]. All parameters start at 0. All ranks call this."""
    layer = layer_class(IN, OUT, device=device())
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    inputs, targets = problem()
    x = shard(inputs, -1, dist.get_rank(), dist.get_world_size()).to(device())
    y = targets.to(device())
    optimizer = torch.optim.SGD(layer.parameters(), lr=LEARNING_RATE)
    losses = []
    for _ in range(STEPS):
        loss = F.mse_loss(layer(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    losses.append(F.mse_loss(layer(x), y).item())
    weight, bias = (layer.get_parameter(name).detach() for name in ("weight", "bias"))
    return {"losses": losses, "weight": weight, "bias": bias}


def loss_in_one_process(run: Sequence[Fit], bias_of: int) -> float:
    """Return the loss of a single process that uses all ranks' weight shards and the bias of rank `bias_of`."""
    inputs, targets = problem()
    weight = torch.cat([result["weight"].cpu() for result in run], dim=1)  # [4, 8]
    return F.mse_loss(F.linear(inputs, weight, run[bias_of]["bias"].cpu()), targets).item()
