"""Cases: gradients over replicas, ZeRO, checkpoints. Grids and pipelines have files of their own."""

import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.gpu.subject import DOUBLE, SINGLE, Case, Place, Tensors, of_weights, random_weights
from tplab import plain
from tplab.checkpoint.sharded import load_sharded, save_sharded
from tplab.data.data_parallel import DataParallel
from tplab.data.zero import ZeRO1, ZeRO2
from tplab.data.zero3 import ZeRO3
from tplab.tensor.full_state import full_state_dict, load_full_state_dict
from tplab.tensor.mlp import ParallelMLP

ROWS, IN, OUT, STEPS = 4, 24, 7, 3
SGD = {"optimizer_class": torch.optim.SGD, "lr": 0.1, "momentum": 0.9}
ADAMW = {"optimizer_class": torch.optim.AdamW, "lr": 0.01, "weight_decay": 0.1}
FULL = (DOUBLE, SINGLE)


# Replicas: each rank has rows of its own, plain torch has all of them


def _net(place: Place) -> nn.Sequential:
    net = nn.Sequential(nn.Linear(IN, IN), nn.GELU(), nn.Linear(IN, IN), nn.GELU(), nn.Linear(IN, OUT))
    with torch.no_grad():
        for name, parameter in net.to(**place.options).named_parameters():
            parameter.copy_(place.random(tuple(parameter.shape), name) / 5)
    return net


def _loss(net: nn.Module, place: Place, ranks: range, step: int) -> Tensor:
    """The mean over the rows of these ranks."""
    x = torch.cat([place.random((ROWS, IN), "x", rank, step) for rank in ranks])
    targets = torch.cat([place.integers(OUT, (ROWS,), 10 * step + rank) for rank in ranks])
    return F.cross_entropy(net(x), targets)


def _own_loss(net: nn.Module, place: Place, step: int) -> Tensor:
    return _loss(net, place, range(dist.get_rank(), dist.get_rank() + 1), step)


def _data_parallel(place: Place) -> Tensors:
    net = _net(place)
    data = DataParallel(net, bucket_bytes=2000)
    _own_loss(net, place, 0).backward()
    data.finish()
    return {name: parameter.grad for name, parameter in net.named_parameters() if parameter.grad is not None}


def _data_plainly(place: Place) -> Tensors:
    net = _net(place)
    _loss(net, place, range(dist.get_world_size()), 0).backward()
    return {name: parameter.grad for name, parameter in net.named_parameters() if parameter.grad is not None}


def _zero(stage: int, options: dict[str, Any], place: Place) -> Tensors:
    net = _net(place)
    zero: Any = (
        ZeRO3(net, [net[0], net[2]], **options)
        if stage == 3
        else {1: ZeRO1, 2: ZeRO2}[stage](net.parameters(), bucket_bytes=2000, **options)
    )
    for step in range(STEPS):
        _own_loss(net, place, step).backward()
        zero.step()
        zero.zero_grad()
    if stage < 3:
        return {name: parameter.detach() for name, parameter in net.named_parameters()}
    with zero.gathered():
        return {name: parameter.detach().clone() for name, parameter in net.named_parameters()}


def _zero_plainly(options: dict[str, Any], place: Place) -> Tensors:
    net, options = _net(place), dict(options)
    optimizer = options.pop("optimizer_class")(net.parameters(), **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        _loss(net, place, range(dist.get_world_size()), step).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in net.named_parameters()}


def _zero_case(stage: int, options: dict[str, Any], dtypes: tuple[torch.dtype, ...] = FULL) -> Case:
    return Case(partial(_zero, stage, options), partial(_zero_plainly, options), dtypes=dtypes)


# A checkpoint: trained, saved, loaded into another model, trained on


MLP = plain.MLP(64, 128, device="meta")


def _resumed(place: Place) -> Tensors:
    folder = [tempfile.mkdtemp(prefix="tplab-gpu-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    model, optimizer = _mlp(place)
    load_full_state_dict(model, random_weights(MLP, place, 8))
    _mlp_step(model, optimizer, place, 0)
    save_sharded(Path(folder[0]) / "step-1", model, optimizer=optimizer)
    model, optimizer = _mlp(place)
    load_sharded(Path(folder[0]) / "step-1", model, optimizer=optimizer)
    _mlp_step(model, optimizer, place, 1)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return full_state_dict(model)


def _mlp(place: Place) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = ParallelMLP(64, 128, **place.options)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _mlp_step(model: nn.Module, optimizer: torch.optim.Optimizer, place: Place, step: int) -> None:
    optimizer.zero_grad()
    (model(place.random((2, 8, 64), "x", step)) ** 2).mean().backward()
    optimizer.step()


def _never_stopped(place: Place) -> Tensors:
    weights = {name: weight.requires_grad_() for name, weight in random_weights(MLP, place, 8).items()}
    optimizer = torch.optim.SGD(weights.values(), lr=0.1, momentum=0.9)
    for step in range(2):
        optimizer.zero_grad()
        (of_weights(MLP)(weights, place.random((2, 8, 64), "x", step)) ** 2).mean().backward()
        optimizer.step()
    return {name: weight.detach() for name, weight in weights.items()}


CASES: dict[str, Case] = {
    "data parallel": Case(_data_parallel, _data_plainly),
    "zero 1": _zero_case(1, SGD),
    "zero 2": _zero_case(2, SGD),
    "zero 3": _zero_case(3, SGD),
    "zero 3, adamw": _zero_case(3, ADAMW, (DOUBLE,)),
    "checkpoint": Case(_resumed, _never_stopped, dtypes=FULL),
}
