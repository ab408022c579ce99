"""Chapter 14: data, pipeline and tensor parallelism together.

training_step      a training step, in the order that completes every gradient before it's used
three_dimensions   train a GPT with all three
plan               every layout of a model over a cluster that fits, with its memory and predicted step time
jobs               three jobs on rented machines, and what a layout would make of each of them
"""

from tplab.cluster.plan import NothingFits, Plan, plans
from tplab.cluster.three_dimensions import Training3D
from tplab.cluster.training_step import TrainingStep

__all__ = [
    "NothingFits",
    "Plan",
    "Training3D",
    "TrainingStep",
    "plans",
]
