"""The exercises of chapter 01: scatter and gather (1.1), rings (1.2, 1.3), costs (1.4) and a training step (1.5).

Importing this package registers their checks. The package also contains the chapter's prediction questions and its
table of symptoms, which lists what a learner may see and what causes it.
"""

from tplab.course.exercises.ch01 import all_gather, all_reduce, cost, reduce_scatter, scatter_gather, together
from tplab.course.exercises.ch01.predictions import PREDICTIONS
from tplab.course.exercises.ch01.symptoms import SYMPTOMS

__all__ = [
    "PREDICTIONS",
    "SYMPTOMS",
    "all_gather",
    "all_reduce",
    "cost",
    "reduce_scatter",
    "scatter_gather",
    "together",
]
