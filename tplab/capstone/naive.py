"""Chapter 15: what a loop needs, as a first attempt would have it. Each exercise replaces one of these functions."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from tplab.capstone.learners_loop import Functions
from tplab.data import clip_grad_norm

_calls = 0  # of `shuffling_loader` in this process


def newest_folder(folder: Path) -> Path | None:
    return max(folder.glob("step-*"), default=None)


def save_in_place(
    folder: Path, step: int, write: Callable[[Path], object], keep: int, group: ProcessGroup | None = None
) -> None:
    """Write a checkpoint right where it's going to be."""
    path = folder / f"step-{step:06d}"
    path.mkdir(parents=True, exist_ok=True)
    write(path)


def shuffling_loader(done: int, seed: int, windows: int, batch_size: int, replica: int, replicas: int) -> list[int]:
    """Return the next windows in a random order. Like many data loaders, it only remembers its position."""
    global _calls
    each = batch_size // replicas
    order = torch.randperm(windows, generator=torch.Generator().manual_seed(seed + replica)).tolist()
    mine = [order[(_calls * each + place) % windows] for place in range(each)]
    _calls += 1
    return mine


def step_of_one_replica(
    model: nn.Module, optimizer: Optimizer, micro_batches: Sequence[tuple[Tensor, Tensor]], mesh: DeviceMesh,
    max_norm: float,
) -> tuple[float, float]:  # fmt: skip
    """Train on the only micro-batch of the only replica."""
    ((x, y),) = micro_batches
    optimizer.zero_grad()
    loss: Any = model(x, y)
    loss.backward()
    norm = clip_grad_norm(model.parameters(), max_norm, mesh)
    optimizer.step()
    return loss.item(), norm.item()


FUNCTIONS = Functions(newest_folder, save_in_place, shuffling_loader, step_of_one_replica)
