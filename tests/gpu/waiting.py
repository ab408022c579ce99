"""A program in which one rank waits for the other, as the capstone's meter sees it."""

import time

import torch
import torch.distributed as dist

from tplab import device
from tplab.capstone.meter import Meter

LATE = 0.2  # seconds


def shares_of_waiting() -> float:
    """On a rank, the share of a step in which it waits, where rank 1 is late. Rank 0 has nothing else to do."""
    here = device()
    meter, x = Meter(here), torch.ones(1000, device=here)
    for _ in range(3):  # the first also opens the connection
        with meter.step():
            if dist.get_rank() == 1:
                _be_late(here)
            dist.all_reduce(x)
        if here.type == "cuda":
            torch.cuda.synchronize(here)
    assert meter.figures.communication is not None
    return meter.figures.communication


def _be_late(here: torch.device) -> None:
    if here.type == "cuda":
        torch.cuda._sleep(int(LATE * 1.5e9))  # cycles of its clock; this process goes on
    else:
        time.sleep(LATE)
