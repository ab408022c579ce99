"""Chapter 11: formulas that predict the time of a collective, a layer and a training step.

machines     how fast a GPU computes, how fast its links are, and what real layers lose against both
flops        the FLOPs of a GPT
matmul       the time of one matmul
collective   the time of each collective
layer        the time of one transformer layer on one of its tp ranks
clock        the time of a list of operations, some of which run at the same time
backward     the backward pass of an MLP on this clock, in an order that somebody chose
step         the time of a training step for a model, a layout and a machine
calibration  the kernels of a layer, measured on the machine at hand
"""

from tplab.cost.layer import LayerTime, layer_time
from tplab.cost.machines import MACHINES, Losses, Machine, machine
from tplab.cost.step import Program, StepTime, step_time, throughput

__all__ = [
    "MACHINES",
    "LayerTime",
    "Losses",
    "Machine",
    "Program",
    "StepTime",
    "layer_time",
    "machine",
    "step_time",
    "throughput",
]
