"""Chapter 01: torch's collectives, each called once on values that show which rank they came from.

Each function returns (before, after) on every rank. Each of the two is a tensor, a list of tensors, or None if the rank
has nothing. Rank r's values are 1 to p, times 10^r, so each digit of a sum shows what one rank contributed. The root is
rank 1.
"""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from tplab.runtime import device

Held = Tensor | list[Tensor] | None
ROOT = 1


def my_numbers() -> Tensor:
    """Return this rank's values [1, 2, .., p] · 10^rank in a tensor [p]."""
    return torch.arange(1, dist.get_world_size() + 1, device=device()) * 10 ** dist.get_rank()


def _mine_or_zeros(root: int) -> Tensor:
    return my_numbers() if dist.get_rank() == root else torch.zeros_like(my_numbers())


def _empty_chunks() -> list[Tensor]:
    return [torch.empty_like(my_numbers()[:1]) for _ in range(dist.get_world_size())]  # p of [1]


def broadcast() -> tuple[Held, Held]:
    x = _mine_or_zeros(ROOT)  # [p]
    before = x.clone()
    dist.broadcast(x, src=ROOT)  # in place
    return before, x


def scatter() -> tuple[Held, Held]:
    x, mine = my_numbers(), torch.empty_like(my_numbers()[:1])  # [p], [1]
    is_root = dist.get_rank() == ROOT
    dist.scatter(mine, list(x.chunk(len(x))) if is_root else None, src=ROOT)
    return x if is_root else None, mine


def gather() -> tuple[Held, Held]:
    x = my_numbers()[:1]  # [1]
    chunks = _empty_chunks() if dist.get_rank() == ROOT else None
    dist.gather(x, chunks, dst=ROOT)
    return x, chunks


def reduce() -> tuple[Held, Held]:
    x = my_numbers()  # [p]
    before = x.clone()
    dist.reduce(x, dst=ROOT)
    return before, x if dist.get_rank() == ROOT else None  # undefined on all other ranks


def all_reduce() -> tuple[Held, Held]:
    x = my_numbers()  # [p]
    before = x.clone()
    dist.all_reduce(x)  # in place
    return before, x


def all_gather() -> tuple[Held, Held]:
    x, chunks = my_numbers()[:1], _empty_chunks()  # [1], p of [1]
    dist.all_gather(chunks, x)
    return x, chunks


def reduce_scatter() -> tuple[Held, Held]:
    x, mine = my_numbers(), torch.empty_like(my_numbers()[:1])  # [p], [1]
    dist.reduce_scatter(mine, list(x.chunk(len(x))))
    return x, mine


def all_to_all() -> tuple[Held, Held]:
    x = my_numbers()  # [p]
    received = torch.empty_like(x)  # [p]
    dist.all_to_all_single(received, x)
    return x, received


def send_and_recv() -> tuple[Held, Held]:
    """Send from rank 0 to rank 1. The other ranks do nothing."""
    x = _mine_or_zeros(0)  # [p]
    before = x.clone()
    if dist.get_rank() == 0:
        dist.send(x, dst=1)
    if dist.get_rank() == 1:
        dist.recv(x, src=0)
    return before, x


EXAMPLES: Mapping[str, Callable[[], tuple[Held, Held]]] = {
    "broadcast": broadcast,
    "scatter": scatter,
    "gather": gather,
    "reduce": reduce,
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
    "send and recv": send_and_recv,
}
