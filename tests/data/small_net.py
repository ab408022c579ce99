"""A small model for the tests of data parallelism, and its training on one process by plain torch.

Nothing about it is even: sizes that no number of ranks divides, a bias that two blocks share, a frozen layer, one that
is used only on request, a buffer whose memory is not in order.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from tests.reference import random
from tplab.data.zero3 import ZeRO3

IN, HIDDEN, CLASSES = 5, 7, 3
ROWS = 4  # of a rank's batch


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    def __init__(self, key: object = 0) -> None:
        super().__init__()
        self.first = nn.Linear(IN, HIDDEN)
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.blocks[2].norm.bias = self.blocks[0].norm.bias  # shared by two blocks
        self.frozen = nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)
        self.spare = nn.Linear(HIDDEN, HIDDEN)
        self.last = nn.Linear(HIDDEN, CLASSES)
        self.register_buffer("scale", torch.ones(HIDDEN, HIDDEN).t())
        self.double()
        with torch.no_grad():
            for name, tensor in [*self.named_parameters(), *self.named_buffers()]:
                tensor.copy_(random(tuple(tensor.shape), "weights", name, key) / 2)

    def forward(self, x: Tensor, spare: bool = False, again: bool = False) -> Tensor:
        """spare: use the spare layer; again: blocks run once more in backward (activation checkpoints)."""
        x = self.frozen(self.first(x) @ self.scale)
        for block in self.blocks:
            with set_checkpoint_early_stop(False):  # else the block never comes to its end a second time
                x = checkpoint(block, x, use_reentrant=False) if again else block(x)
        return self.last(self.spare(x) if spare else x)


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """x [4, 5] and classes [4]; all of them count."""
    x = random((ROWS, IN), "x", rank, step)
    return x, torch.randint(0, CLASSES, (ROWS,), generator=torch.Generator().manual_seed(100 * rank + step))


def uneven_batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """The same; on rank r, only 4 - r classes count."""
    x, target = batch(rank, step)
    target[:rank] = -100
    return x, target


def whole_batch(ranks: Iterable[int], step: int, of_rank: Callable = batch) -> tuple[Tensor, Tensor]:
    xs, targets = zip(*(of_rank(rank, step) for rank in ranks), strict=True)
    return torch.cat(xs), torch.cat(targets)


def loss_of(model: nn.Module, rows: tuple[Tensor, Tensor], **options: bool) -> Tensor:
    return F.cross_entropy(model(rows[0], **options), rows[1])


def weights_of(zero: object, model: nn.Module) -> dict[str, Tensor]:
    """Copies of the whole weights, where ZeRO-3 has only their shards."""
    with zero.gathered() if isinstance(zero, ZeRO3) else nullcontext():
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def plain_gradients(ranks: Iterable[int], step: int = 0, of_rank: Callable = batch, **options: bool) -> dict:
    """Of the mean loss over all the ranks' rows that count, on one process."""
    model = Net()
    loss_of(model, whole_batch(ranks, step, of_rank), **options).backward()
    return gradients(model)


def plain_training(
    ranks: Iterable[int],
    steps: int,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    micro_batches: int = 1,
    max_norm: float | None = None,
    **options: bool,
) -> tuple[dict[str, Tensor], list[float]]:
    """The weights and the gradients' norms after some steps on one process; each micro-batch has rows of its own."""
    ranks, model, norms = list(ranks), Net(), []
    optimizer = make_optimizer(model)
    for step in range(steps):
        optimizer.zero_grad()
        for k in range(micro_batches):
            (loss_of(model, whole_batch(ranks, 10 * step + k), **options) / micro_batches).backward()
        if max_norm is not None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, norms
