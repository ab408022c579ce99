"""Exercises of chapter 01: scatter and gather (1.1), rings (1.2, 1.3), their cost (1.4), a step to fix (1.5).

Importing this package registers their checks. It also provides the chapter's predictions and table of symptoms.
"""

from tplab.course.chapters.ch01 import all_gather, all_reduce, cost, reduce_scatter, scatter_gather, together
from tplab.course.chapters.ch01.predictions import PREDICTIONS
from tplab.course.chapters.ch01.symptoms import SYMPTOMS

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
