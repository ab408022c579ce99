"""A program in which one rank waits for the other, as the capstone's meter sees it."""

import time

import torch
import torch.distributed as dist

from tplab import device
from tplab.capstone.training.meter import Meter

LATE = 0.2  # seconds


def shares_of_waiting() -> list[float]:
    """On a rank, the shares of some steps in which it waits, where rank 1 is late. Rank 0 has nothing else to do."""
    here = device()
    meter, x, shares = Meter(here), torch.ones(1000, device=here), []
    for _ in range(4):
        with meter.step():
            if dist.get_rank() == 1:
                _be_late(here)
            dist.all_reduce(x)
        if here.type == "cuda":
            torch.cuda.synchronize(here)
        if meter.figures.communication is not None:
            shares.append(meter.figures.communication)
    return shares


def check_shares(prompt: list[float], late: list[float]) -> None:
    """Of ranks 0 and 1. In one step or another the machine may have been busy with something else."""
    assert all(0 <= share <= 1 for share in prompt + late)
    assert min(late) < 0.5 < max(prompt)


def _be_late(here: torch.device) -> None:
    if here.type == "cuda":
        torch.cuda._sleep(int(LATE * 1.5e9))  # cycles of its clock; this process goes on
    else:
        time.sleep(LATE)
