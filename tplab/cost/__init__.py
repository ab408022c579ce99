"""Chapter 11: formulas that predict the time of a collective, a layer and a training step.

machines     how fast a GPU computes, and how fast its links are
flops        the FLOPs of a GPT
collective   the time of each collective
layer        the time of one transformer layer on one of its tp ranks
step         the time of a training step for a model, a layout and a machine
"""

from tplab.cost.flops import hardware_flops, model_flops
from tplab.cost.layer import LayerTime, efficiency, layer_time, overlap_saving
from tplab.cost.machines import MACHINES, Machine, machine, matrix_rate, measure_machine, memory_rate
from tplab.cost.step import Program, StepTime, achieved, step_time, throughput

__all__ = [
    "MACHINES",
    "LayerTime",
    "Machine",
    "Program",
    "StepTime",
    "achieved",
    "efficiency",
    "hardware_flops",
    "layer_time",
    "machine",
    "matrix_rate",
    "measure_machine",
    "memory_rate",
    "model_flops",
    "overlap_saving",
    "step_time",
    "throughput",
]
