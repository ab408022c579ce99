"""Predictions for a run from the course's formulas: the memory bill of chapter 00 and the step time of chapter 11.

Both formulas assume 16-bit elements. In float32, activations take twice the bytes in the bill, and the machine moves
half as many elements per second, both in memory and between ranks. (In float64: four times, and a quarter.)
"""

from dataclasses import replace
from typing import Any

from tplab.capstone.planning.traffic import gathered_at_once, step_parts
from tplab.capstone.settings.settings import Settings
from tplab.capstone.words import listed
from tplab.collectives.links import Link
from tplab.cost.calibration import Kernels
from tplab.cost.machines import Machine
from tplab.cost.step import Program, step_time
from tplab.memory.config import GPTConfig
from tplab.memory.memory_bill import Recipe, bill, rank_parameters
from tplab.tensor.linear_cross_entropy import default_tokens_at_once

_WIDTH = {"float32": 2, "float64": 4, "bfloat16": 1}  # size of an activation, in units of 16 bits
_STATE = {"float32": Recipe(4, 4, 8), "bfloat16": Recipe(4, 4, 8), "float64": Recipe(8, 8, 16)}  # AdamW


def predicted_memory(settings: Settings) -> tuple[dict[str, int], str]:
    """Predict the bytes by purpose on a rank of the stage that needs most. Also return how the bill was applied."""
    stages = (_memory_of_stage(settings, stage) for stage in range(settings.pp))
    width = _WIDTH[settings.precision]
    note = (
        f"The memory formula counts weights, gradients and AdamW's averages in {'float64' if width == 4 else 'float32'}"
    )
    if width > 1:
        note += f", and it counts 16-bit activations {'twice' if width == 2 else 'four times'}"
    if settings.pp == 1:
        note += f". It includes the logits of the {_tokens_at_once(settings):,} tokens that the loss handles at a time."
    else:
        note += ". It includes the logits of a micro-batch and their gradient."
    if settings.zero:
        shared = ("optimizer's state", "gradients", "weights")[: settings.zero]
        note += f" The {listed(shared)} {'is' if settings.zero == 1 else 'are'} divided over {settings.dp} replicas."
    if settings.zero == 3:
        note += " The weights of one layer, and everything outside the layers, are gathered in addition to that."
    if not settings.bias:
        note += " On a CPU, PyTorch's RMSNorm consists of several operations, which save more than the formula says."
    if settings.precision == "bfloat16":
        note += (
            " The formula leaves out what autocast saves (16-bit weights, and float32 activations between the blocks)."
        )
    return max(stages, key=lambda parts: sum(parts.values())), note


def _memory_of_stage(settings: Settings, stage: int) -> dict[str, int]:
    config, width, recipe = _as_run(settings), _WIDTH[settings.precision], _STATE[settings.precision]
    need = bill(config, settings.layout, recipe, stage)
    tokens, columns = settings.micro_batch_size * config.seq_length, _columns(settings)
    activations = width * need.activations
    if stage == settings.pp - 1:
        at_once = _tokens_at_once(settings) if settings.pp == 1 else 2 * tokens
        activations += (recipe.weights * at_once - width * 4 * tokens) * columns
    parts = need.parts() | {"activations": activations}
    for name, stage_of_zero in (("optimizer state", 1), ("gradients", 2), ("weights", 3)):
        parts[name] //= settings.dp if settings.zero >= stage_of_zero else 1
    if settings.zero == 3:
        whole = gathered_at_once(settings, stage)
        parts["weights"] += recipe.weights * whole
        parts["gradients"] += recipe.gradients * whole
    return parts


def _columns(settings: Settings) -> int:
    return -(-settings.vocab_size // settings.tp)


def _tokens_at_once(settings: Settings) -> int:
    """Return the number of tokens whose logits the fused output layer and loss has at a time."""
    return min(settings.micro_batch_size * settings.seq_length, default_tokens_at_once(_columns(settings)))


def predicted_step(settings: Settings, machine: Machine) -> dict[str, float]:
    """Predict the seconds of one step, by purpose."""
    program = Program(
        overlap_input_gradient=settings.async_grad_allreduce,
        overlap_gradients=settings.dp > 1,
        shard_optimizer=settings.zero > 0,
    )
    state, width = _STATE[settings.precision], _WIDTH[settings.precision]
    recipe = Recipe(state.weights // width, state.gradients // width, state.optimizer // width)
    time = step_time(_as_run(settings), settings.layout, slower(machine, width), program, recipe)
    return {
        "matmuls": time.products, "element-wise": time.elementwise, "optimizer": time.optimizer,
        "communication": time.tensor_parallel + time.data_parallel + time.pipeline_sends,
        "pipeline bubble": time.bubble,
    }  # fmt: skip


def calibrated_step(settings: Settings, kernels: Kernels) -> dict[str, float]:
    """Predict the seconds of one step, by purpose, from the kernels of one layer on the machine that runs it.

    The number of messages and their bytes are those of `tplab.capstone.planning.traffic`. An all-gather or
    reduce-scatter sends half of what an all-reduce of the same tensor does, and a message between two stages as much
    as an all-reduce over two ranks. The sums of f run beside a matmul with `async_grad_allreduce`, and so do those over
    replicas. The slowest stage takes the time of all micro-batches, and waits once for each of the others to fill the
    pipeline.
    """
    again = {"nothing": 0.0, "attention": kernels.attention[0], "layers": 0.0}[settings.recompute]
    repeated = 1 if settings.recompute == "layers" else 0
    matmuls, elementwise, attention = (
        (1 + repeated) * forward + backward
        for forward, backward in (kernels.matmuls, kernels.elementwise, kernels.attention)
    )
    products = [layers * (matmuls + attention + again) for layers in settings.layers_of_stages]
    products[-1] += kernels.output
    stages = [own + layers * elementwise for own, layers in zip(products, settings.layers_of_stages, strict=True)]
    slowest = max(range(settings.pp), key=lambda stage: stages[stage])
    communication = 0.0
    for part in step_parts(settings, stage=slowest):
        hidden = (part.name == "layers, backward" and settings.async_grad_allreduce) or "replicas" in part.name
        share = {"all_reduce": 1.0, "send": 1.0, "recv": 0.0}.get(part.kind, 0.5)
        calls = part.calls if share else 0
        communication += (kernels.beside if hidden else kernels.summed).seconds(calls, share * part.bytes)
    updated = rank_parameters(settings.model, settings.layout, slowest) / (settings.dp if settings.zero else 1)
    return {
        "matmuls": settings.micro_batches * products[slowest],
        "element-wise": settings.micro_batches * settings.layers_of_stages[slowest] * elementwise,
        "optimizer": kernels.optimizer * updated,
        "communication": communication,
        "pipeline bubble": sum(stages) - stages[slowest],
    }


def slower(machine: Machine, times: int) -> Machine:
    """Return the machine for elements that are `times` as wide and therefore take `times` as long to move."""
    inside, between = (Link(link.alpha, link.beta * times) for link in (machine.inside, machine.between))
    return replace(machine, bandwidth=machine.bandwidth / times, inside=inside, between=between)


def machine_of(measured: dict[str, Any]) -> Machine:
    """Create a `Machine` from the results of `tplab.capstone.study.programs.machine`. One rank needs no link."""
    link = Link(measured.get("alpha", 0.0), measured.get("beta", 1e-12))
    return Machine(
        "this machine", flops=measured["flops"], fraction=1.0, memory=measured.get("memory", 1),
        bandwidth=measured["bandwidth"], gpus_per_node=measured["ranks"], inside=link, between=link,
    )  # fmt: skip


def _as_run(settings: Settings) -> GPTConfig:
    """Return the model's config. torch's attention saves no scores, unless it needs dropout on a CPU."""
    return replace(settings.model, flash_attention=not settings.dropout)
