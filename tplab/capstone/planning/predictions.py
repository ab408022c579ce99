"""Predict a step's memory with chapter 00's memory bill, and its time from measured kernels of one layer.

The bill assumes 16-bit elements. In float32, activations take twice the bytes in the bill. (In float64, it's four
times.)
"""

from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from tplab.capstone.planning.traffic import device_of, logit_columns, loss_block, step_parts
from tplab.capstone.settings.settings import Settings
from tplab.cost.calibration import Kernels, measure_kernels
from tplab.memory.config import GPTConfig
from tplab.memory.memory_bill import Recipe, bill, rank_parameters
from tplab.runtime import record

ROUNDS = 3  # fewer than `measure_kernels` takes by default, because the run waits for them
_WIDTH = {"float32": 2, "float64": 4, "bfloat16": 1}  # size of an activation, in units of 16 bits
_STATE = {"float32": Recipe(4, 4, 8), "bfloat16": Recipe(4, 4, 8), "float64": Recipe(8, 8, 16)}  # AdamW


def plan(settings: Settings, device: torch.device, mesh: DeviceMesh | None) -> dict[str, Any] | None:
    """Return a run's plan, which the "start" row of its log contains and the report compares with the run.

    "seconds" (of a step) and "memory" (bytes on a rank) are broken down by purpose. "sent" is the number of bytes that
    a rank sends. All ranks call this before they build their model. torch's random state doesn't change. Returns None
    for pipeline stages and ZeRO, which the formulas don't cover, and if the settings don't ask for a plan.
    """
    if not settings.plan or settings.pp > 1 or settings.zero:
        return None
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus), record(keep=False):
        kernels = kernels_of(settings, mesh, rounds=ROUNDS)
    if gpus:
        torch.cuda.reset_peak_memory_stats(device)
    memory, note = predicted_memory(settings, device)
    sent = sum(part.bytes for part in step_parts(settings, device))
    return {"seconds": calibrated_step(settings, kernels, device), "memory": memory, "note": note, "sent": sent}


def kernels_of(settings: Settings, mesh: DeviceMesh | None, **options: Any) -> Kernels:
    """Measure the kernels of one layer of the run on this rank's device, while all other ranks do the same.

    All-reduces are timed in the run's own groups, because some groups may use shared memory and others gloo.
    """
    return measure_kernels(
        settings.model, settings.micro_batch_size, settings.tp, dtype=getattr(torch, settings.precision),
        parameters=rank_parameters(settings.model, settings.layout),
        group=None if mesh is None else mesh.get_group("tp"),
        others={} if mesh is None else {"dp": mesh.get_group("dp")}, **options,
    )  # fmt: skip


def predicted_memory(settings: Settings, device: torch.device | None = None) -> tuple[dict[str, int], str]:
    """Return a rank's predicted bytes by purpose, and a note on how they're counted.

    For `device`, see `tplab.capstone.planning.traffic.device_of`.
    """
    config, width, recipe = _as_run(settings, device), _WIDTH[settings.precision], _STATE[settings.precision]
    need = bill(config, settings.layout, recipe, 0)
    # The bill counts the logits of all tokens, without padding. But the fused output layer and loss handle a few tokens
    # at a time. bfloat16 logits don't have room for their exponentials, which are float32
    tokens, columns = settings.micro_batch_size * config.seq_length, logit_columns(settings)
    per_logit = 2 + 4 if settings.precision == "bfloat16" else recipe.weights
    logits = per_logit * min(tokens, loss_block(settings, columns, device)) * columns
    activations = width * (need.activations - 4 * tokens * -(-config.vocab_size // settings.tp)) + logits
    numbers = "float64" if settings.precision == "float64" else "float32"
    note = f"The memory formula counts weights, gradients and AdamW's averages in {numbers}."
    if not settings.bias:
        note += " On a CPU, PyTorch's RMSNorm consists of several operations, which save more than the formula says."
    if settings.precision == "bfloat16":
        note += (
            " The formula leaves out what autocast saves (16-bit weights, and float32 activations between the blocks)."
        )
    return need.parts() | {"activations": activations}, note


def calibrated_step(settings: Settings, kernels: Kernels, device: torch.device | None = None) -> dict[str, float]:
    """Predict the step time in seconds, broken down by purpose, from kernel timings of one layer on the same machine.

    The messages are those of `tplab.capstone.planning.traffic`. An all-reduce sends 2 (p - 1) / p times the tensor, and
    an all-gather or reduce-scatter sends half as much. The replicas' sums overlap with a matmul. With
    `async_grad_allreduce`, so do f's all-reduces in the layers. For `device`, see `device_of` in that module.
    """
    again = kernels.attention[0] if settings.recompute == "attention" else 0.0
    times = 2 if settings.recompute == "layers" else 1
    of_layer = (kernels.matmuls, kernels.elementwise, kernels.attention)
    matmuls, elementwise, attention = (times * forward + backward for forward, backward in of_layer)
    communication = 0.0
    for part in step_parts(settings, device):
        summed, beside = kernels.others.get(part.group, (kernels.summed, kernels.beside))
        hidden = (part.name == "layers, backward" and settings.async_grad_allreduce) or "over replicas" in part.name
        share = 1.0 if part.kind == "all_reduce" else 0.5
        communication += (beside if hidden else summed).seconds(part.calls, share * part.bytes)
    layers, m = settings.num_layers, settings.micro_batches
    return {
        "matmuls": m * (layers * (matmuls + attention + again) + kernels.output),
        "element-wise": m * layers * elementwise,
        "optimizer": kernels.optimizer * rank_parameters(settings.model, settings.layout),
        "communication": communication,
    }


def _as_run(settings: Settings, device: torch.device | None) -> GPTConfig:
    """Return the model's config. If it has dropout, torch saves the attention scores on a CPU, so they are counted."""
    saves_scores = settings.dropout > 0 and device_of(settings, device).type == "cpu"
    return replace(settings.model, flash_attention=not saves_scores)
