"""The dropout masks that plain PyTorch draws on a rank, which are used by the checks of 9.4 and 9.5.

The masks are drawn on the ranks themselves, because a GPU draws different values than a CPU.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from tplab.runtime import device
from tplab.tensor.rng import REPLICATED_OFFSET, SHARDED_OFFSET

CURRENT, REPLICATED, SHARDED = "current", "replicated", "sharded"
Draw = tuple[str, tuple[int, ...]]  # (stream, shape)


def draw_masks(draws: Sequence[Draw], seed: int, index: int, rate: float) -> list[Tensor]:
    """Draw all masks in order, from streams that are seeded the way `seed_all(seed)` seeds them on rank `index`."""
    seeds = {CURRENT: seed, REPLICATED: seed + REPLICATED_OFFSET, SHARDED: seed + SHARDED_OFFSET + index}
    masks: list[Tensor] = [torch.empty(0)] * len(draws)
    for stream in dict.fromkeys(name for name, _ in draws):
        torch.manual_seed(seeds[stream])
        for number, (name, shape) in enumerate(draws):
            if name == stream:
                ones = torch.ones(shape, dtype=torch.float64, device=device())
                masks[number] = F.dropout(ones, rate).cpu()
    return masks
