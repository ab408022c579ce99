"""The training loop of chapter 15, which is also the one in the learner's train.py. It only needs PyTorch.

    newest_checkpoint      where does the run continue?
    for each step:
        learning_rate      warm-up, then half a cosine
        own_windows        which pieces of the text does this replica read?
        training_step      forward, backward, the sums over ranks, the optimizer
        save_checkpoint    every `save_every` steps

Four of these functions are exercises, so they come from outside (`Functions`). A checkpoint is a folder with one file
per tensor-parallel rank. Every file says how its tensors are split, so any number of ranks can load the checkpoint.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

MicroBatches = list[tuple[Tensor, Tensor]]  # ids and targets, [b, s] each


@dataclass(frozen=True)
class Functions:
    """The answers to chapter 15's exercises, or what stands in for them."""

    newest_checkpoint: Callable[..., Any]
    save_checkpoint: Callable[..., Any]
    own_windows: Callable[..., Any]
    training_step: Callable[..., Any]


def train(
    model: nn.Module, optimizer: Optimizer, tokens: Tensor, settings: Any, mesh: DeviceMesh, functions: Functions,
    folder: Path, last_step: int, tell: Callable[[int, float, float], object],
) -> None:  # fmt: skip
    """Train until `last_step`, from the newest checkpoint in `folder` on. Every rank of the mesh calls this.

    tokens     the text as a vector of ids
    settings   has the sizes, the learning rate and the seed, as `tplab.capstone.Settings` does
    tell       called after each step with its number, its loss and its gradient norm
    """
    group, replica = mesh.get_group("tp"), mesh.get_local_rank("dp")
    newest = functions.newest_checkpoint(folder)
    done = load(newest, model, optimizer, group) if newest else 0
    dist.barrier()  # nobody writes a checkpoint before everybody has looked for one
    windows = (len(tokens) - 1) // settings.seq_length
    for step in range(done + 1, last_step + 1):
        for parameters in optimizer.param_groups:
            parameters["lr"] = learning_rate(step, settings)
        mine = functions.own_windows(step - 1, settings.seed, windows, settings.batch_size, replica, mesh["dp"].size())
        parts = micro_batches(tokens, mine, settings, next(model.parameters()).device)
        loss, norm = functions.training_step(model, optimizer, parts, mesh, settings.max_norm)
        tell(step, loss, norm)
        due = settings.save_every and step % settings.save_every == 0
        if replica == 0 and (due or step == settings.steps):  # the other replicas have the same weights
            write = partial(write_shard, model=model, optimizer=optimizer, step=step, group=group)
            functions.save_checkpoint(folder, step, write, settings.keep, group)


def learning_rate(step: int, settings: Any) -> float:
    """Return the learning rate of a step, counted from 1: up in a straight line, and down along half a cosine.

        /‾‾\\___
       /       \\__
      /           ‾‾\\____  min_learning_rate
    warm-up    cosine (Loshchilov and Hutter 2017, "SGDR")
    """
    highest, lowest, warmup = settings.learning_rate, settings.min_learning_rate, settings.warmup_steps
    if step <= warmup:
        return highest * step / warmup
    part = min(1.0, (step - warmup) / max(1, settings.steps - warmup))  # of the way down
    return lowest + (highest - lowest) * (1 + math.cos(math.pi * part)) / 2


def micro_batches(tokens: Tensor, windows: Sequence[int], settings: Any, device: torch.device) -> MicroBatches:
    """Return the ids and the targets of these windows, as pairs of [b, s] tensors. A target is the next id."""
    s = settings.seq_length
    rows = [tokens[k * s : k * s + s + 1].long() for k in windows]
    return [(part[:, :-1], part[:, 1:]) for part in torch.stack(rows).to(device).chunk(settings.micro_batches)]


def write_shard(
    path: Path, model: nn.Module, optimizer: Optimizer, step: int, group: ProcessGroup | None = None
) -> None:
    """Write this rank's weights, and what the optimizer keeps for them, to a file in the folder `path`."""
    ranks = dist.get_world_size(group)
    state = {name: {"weight": param.detach(), **optimizer.state[param]} for name, param in model.named_parameters()}
    torch.save({"step": step, "ranks": ranks, "state": state}, path / name_of_shard(group))


def name_of_shard(group: ProcessGroup | None = None) -> str:
    return f"rank-{dist.get_rank(group)}.pt"


def load(path: Path, model: nn.Module, optimizer: Optimizer, group: ProcessGroup | None = None) -> int:
    """Load a checkpoint, which any number of ranks may have written, and return its step.

    Raises ValueError if a rank's file is missing, or if the checkpoint belongs to a different model.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    names = sorted(path.glob("rank-*.pt"), key=lambda name: int(name.stem.removeprefix("rank-")))
    files = [torch.load(name, weights_only=True, map_location="cpu") for name in names]
    if not files or len(files) != files[0]["ranks"]:
        raise ValueError(f"{path} is incomplete: it has the files of {len(files)} ranks only")
    shards = [file["state"] for file in files]
    if shards[0].keys() != dict(model.named_parameters()).keys():
        raise ValueError(f"{path} belongs to a different model. Train in a different folder")
    for name, param in model.named_parameters():
        split, state = getattr(param, "tensor_parallel", None), {}
        for key, value in shards[0][name].items():
            if split is not None and value.dim() > 0:  # Adam's count of the steps is a single number
                value = split.shard(split.unshard([shard[name][key] for shard in shards]), rank, size)
            state[key] = value.to(param.device) if value.dim() > 0 else value
        weight = state.pop("weight")
        if weight.shape != param.shape:
            raise ValueError(f"{path} belongs to a different model: its {name} is {list(weight.shape)} on a rank")
        param.data.copy_(weight)
        optimizer.state[param] = state
    return int(files[0]["step"])
