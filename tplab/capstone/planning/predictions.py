"""Predict a step's memory with chapter 00's memory bill, and its time from measured kernels of one layer.

The bill assumes 16-bit elements. In float32, activations take twice the bytes in the bill. (In float64, it's four
times.)
"""

from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from tplab.capstone.planning.traffic import device_of, gathered_at_once, loss_block, step_parts
from tplab.capstone.settings.settings import Settings
from tplab.cost.calibration import Kernels, measure_kernels
from tplab.memory.config import GPTConfig
from tplab.memory.memory_bill import Recipe, bill, rank_parameters
from tplab.runtime import record

ROUNDS = 3  # fewer than `measure_kernels` takes by default, because the run waits for them
_WIDTH = {"float32": 2, "float64": 4, "bfloat16": 1}  # size of an activation, in units of 16 bits
_STATE = {"float32": Recipe(4, 4, 8), "bfloat16": Recipe(4, 4, 8), "float64": Recipe(8, 8, 16)}  # AdamW


def plan(settings: Settings, device: torch.device, mesh: DeviceMesh | None) -> dict[str, Any]:
    """Return a run's plan, which the "start" row of its log contains and the report compares with the run.

    "seconds" (of a step) and "memory" (bytes on a rank) are broken down by purpose. "sent" is the largest number of
    bytes that any rank sends. All ranks call this before they build their model. torch's random state doesn't change.
    """
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus), record(keep=False):
        kernels = kernels_of(settings, mesh, rounds=ROUNDS)
    if gpus:
        torch.cuda.reset_peak_memory_stats(device)
    memory, note = predicted_memory(settings, device)
    places = product(range(settings.pp), range(settings.dp))
    of_ranks = [step_parts(settings, stage, replica, device) for stage, replica in places]
    sent = max(sum(part.bytes for part in parts if part.kind != "recv") for parts in of_ranks)
    return {"seconds": calibrated_step(settings, kernels, device), "memory": memory, "note": note, "sent": sent}


def kernels_of(settings: Settings, mesh: DeviceMesh | None, **options: Any) -> Kernels:
    """Measure the kernels of one layer of the run on this rank's device, while all other ranks do the same.

    All-reduces are timed in the run's own groups, because some groups may use shared memory and others gloo.
    """
    return measure_kernels(
        settings.model, settings.micro_batch_size, settings.tp, dtype=getattr(torch, settings.precision),
        parameters=rank_parameters(settings.model, settings.layout),
        group=None if mesh is None else mesh.get_group("tp"),
        others={} if mesh is None else {name: mesh.get_group(name) for name in ("pp", "dp")}, **options,
    )  # fmt: skip


def predicted_memory(settings: Settings, device: torch.device | None = None) -> tuple[dict[str, int], str]:
    """Return a rank's predicted bytes by purpose, on the stage that needs most, and a note on how they're counted.

    For `device`, see `tplab.capstone.planning.traffic.device_of`.
    """
    stages = (_memory_of_stage(settings, stage, device) for stage in range(settings.pp))
    numbers = "float64" if settings.precision == "float64" else "float32"
    note = f"The memory formula counts weights, gradients and AdamW's averages in {numbers}."
    if not settings.bias:
        note += " On a CPU, PyTorch's RMSNorm consists of several operations, which save more than the formula says."
    if settings.precision == "bfloat16":
        note += (
            " The formula leaves out what autocast saves (16-bit weights, and float32 activations between the blocks)."
        )
    return max(stages, key=lambda parts: sum(parts.values())), note


def _memory_of_stage(settings: Settings, stage: int, device: torch.device | None) -> dict[str, int]:
    config, width, recipe = _as_run(settings, device), _WIDTH[settings.precision], _STATE[settings.precision]
    need = bill(config, settings.layout, recipe, stage)
    activations = width * need.activations
    if stage == settings.pp - 1:
        tokens, columns = settings.micro_batch_size * config.seq_length, -(-settings.vocab_size // settings.tp)
        if settings.pp == 1:  # the fused output layer and loss handle a few tokens at a time
            # bfloat16 logits don't have room for their exponentials, which are float32
            per_logit = 2 + 4 if settings.precision == "bfloat16" else recipe.weights
            logits = per_logit * min(tokens, loss_block(settings, columns, device)) * columns
        else:  # all logits and their gradient
            logits = 2 * recipe.weights * tokens * columns
        activations += logits - width * 4 * tokens * columns
    parts = need.parts() | {"activations": activations}
    for name, stage_of_zero in (("optimizer state", 1), ("gradients", 2), ("weights", 3)):
        parts[name] //= settings.dp if settings.zero >= stage_of_zero else 1
    if settings.zero == 3:
        whole = gathered_at_once(settings, stage)
        parts["weights"] += recipe.weights * whole
        parts["gradients"] += recipe.gradients * whole
    return parts


def calibrated_step(settings: Settings, kernels: Kernels, device: torch.device | None = None) -> dict[str, float]:
    """Predict the step time in seconds, broken down by purpose, from kernel timings of one layer on the same machine.

    The messages are those of `tplab.capstone.planning.traffic`. An all-reduce sends 2 (p - 1) / p times the tensor, an
    all-gather or reduce-scatter sends half as much, and a message between two stages sends the tensor once. The
    replicas' collectives for gradients and weights overlap with a matmul. With `async_grad_allreduce`, so do f's
    all-reduces in the layers. The slowest stage computes all micro-batches, and while the pipeline fills and drains, it
    waits for the time that one micro-batch takes on all other stages. For `device`, see `device_of` in that module.
    """
    again = kernels.attention[0] if settings.recompute == "attention" else 0.0
    times = 2 if settings.recompute == "layers" else 1
    of_layer = (kernels.matmuls, kernels.elementwise, kernels.attention)
    matmuls, elementwise, attention = (times * forward + backward for forward, backward in of_layer)
    products = [layers * (matmuls + attention + again) for layers in settings.layers_of_stages]
    products[-1] += kernels.output
    stages = [own + layers * elementwise for own, layers in zip(products, settings.layers_of_stages, strict=True)]
    slowest = stages.index(max(stages))
    communication = 0.0
    for part in step_parts(settings, slowest, device=device):
        if part.kind == "recv":
            continue
        summed, beside = kernels.others.get(part.group, (kernels.summed, kernels.beside))
        hidden = (part.name == "layers, backward" and settings.async_grad_allreduce) or "over replicas" in part.name
        share = 1.0 if part.kind == "all_reduce" else 0.5
        if part.kind == "send":
            share *= settings.pp / (settings.pp - 1)
        communication += (beside if hidden else summed).seconds(part.calls, share * part.bytes)
    updated = rank_parameters(settings.model, settings.layout, slowest) / (settings.dp if settings.zero else 1)
    return {
        "matmuls": settings.micro_batches * products[slowest],
        "element-wise": settings.micro_batches * settings.layers_of_stages[slowest] * elementwise,
        "optimizer": kernels.optimizer * updated,
        "communication": communication,
        "pipeline bubble": sum(stages) - stages[slowest],
    }


def _as_run(settings: Settings, device: torch.device | None) -> GPTConfig:
    """Return the model's config. If it has dropout, torch saves the attention scores on a CPU, so they are counted."""
    saves_scores = settings.dropout > 0 and device_of(settings, device).type == "cpu"
    return replace(settings.model, flash_attention=not saves_scores)
