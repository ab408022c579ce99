"""Chapter 14: data, pipeline and tensor parallelism together.

three_dimensions   train a GPT with all three
plan               every layout of a model over a cluster that fits, with its memory and predicted step time
"""

from tplab.cluster.plan import NothingFits, Plan, best_of_each_split, layouts, plans
from tplab.cluster.three_dimensions import Training3D

__all__ = [
    "NothingFits",
    "Plan",
    "Training3D",
    "best_of_each_split",
    "layouts",
    "plans",
]
