"""Chapter 14: data, pipeline and tensor parallelism together.

training_step      the order of a training step, which keeps every gradient
three_dimensions   train a GPT with all three
plan               every layout of a model over a cluster that fits, with its memory and predicted step time
"""

from tplab.cluster.plan import NothingFits, Plan, best_of_each_split, layouts, plans
from tplab.cluster.three_dimensions import Training3D
from tplab.cluster.training_step import TrainingStep

__all__ = [
    "NothingFits",
    "Plan",
    "Training3D",
    "TrainingStep",
    "best_of_each_split",
    "layouts",
    "plans",
]
