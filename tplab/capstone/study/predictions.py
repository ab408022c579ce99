"""Predictions for a run from the course's formulas: the memory bill of chapter 00 and the step time of chapter 11.

Both formulas assume 16-bit elements. In float32, activations take twice the bytes in the bill, and the machine moves
half as many elements per second, both in memory and between ranks. (In float64: four times, and a quarter.)
"""

from dataclasses import replace
from typing import Any

from tplab.capstone.settings.settings import Settings
from tplab.capstone.study.traffic import step_parts
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
    """Predict the bytes on one rank by purpose. Also return a sentence about how the bill was applied."""
    config, width = _as_run(settings), _WIDTH[settings.precision]
    need = bill(config, settings.layout, _STATE[settings.precision])
    tokens, columns = settings.micro_batch_size * config.seq_length, -(-config.vocab_size // settings.tp)
    block = min(tokens, default_tokens_at_once(columns))
    activations = width * (need.activations - 4 * tokens * columns) + 4 * block * columns
    parts = need.parts() | {"activations": activations}
    note = f"Weights, gradients and AdamW's averages are in {'float64' if width == 4 else 'float32'}"
    if width > 1:
        note += f", and the activations, 16-bit in the formula, count {'twice' if width == 2 else 'four times'}"
    note += f". The logits of {block:,} tokens exist at a time."
    if settings.precision == "bfloat16":
        note += " What autocast keeps beside (weights in 16 bits, float32 between the blocks) is not in the bill."
    return parts, note


def predicted_step(settings: Settings, machine: Machine) -> dict[str, float]:
    """Predict the seconds of one step, by purpose."""
    program = Program(overlap_input_gradient=settings.async_grad_allreduce, overlap_gradients=settings.dp > 1)
    state, width = _STATE[settings.precision], _WIDTH[settings.precision]
    recipe = Recipe(state.weights // width, state.gradients // width, state.optimizer // width)
    time = step_time(_as_run(settings), settings.layout, slower(machine, width), program, recipe)
    return {
        "matmuls": time.products, "element-wise": time.elementwise, "optimizer": time.optimizer,
        "communication": time.tensor_parallel + time.data_parallel,
    }  # fmt: skip


def calibrated_step(settings: Settings, kernels: Kernels) -> dict[str, float]:
    """Predict the seconds of one step, by purpose, from the kernels of one layer on the machine that runs it.

    The number of messages and their bytes are those of `tplab.capstone.study.traffic`. An all-gather or reduce-scatter
    sends half of what an all-reduce of the same tensor does. The sums of f run beside a matmul with
    `async_grad_allreduce`, and so do those over replicas.
    """
    layers = settings.micro_batches * settings.num_layers
    again = {"nothing": 0.0, "attention": kernels.attention[0], "layers": 0.0}[settings.recompute]
    repeated = 1 if settings.recompute == "layers" else 0
    matmuls, elementwise, attention = (
        (1 + repeated) * forward + backward
        for forward, backward in (kernels.matmuls, kernels.elementwise, kernels.attention)
    )
    communication = 0.0
    for part in step_parts(settings):
        hidden = (part.name == "layers, backward" and settings.async_grad_allreduce) or "replicas" in part.name
        share = 1.0 if part.kind == "all_reduce" else 0.5
        communication += (kernels.beside if hidden else kernels.summed).seconds(part.calls, share * part.bytes)
    return {
        "matmuls": layers * (matmuls + attention + again) + settings.micro_batches * kernels.output,
        "element-wise": layers * elementwise,
        "optimizer": kernels.optimizer * rank_parameters(settings.model, settings.layout),
        "communication": communication,
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
