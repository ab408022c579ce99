"""Exercises of chapter 01: scatter, gather (1.1), a ring's halves (1.2, 1.3), the full ring (1.4), and its cost (1.5).

Importing this package registers their checks. It also has the chapter's predictions and its table of symptoms.
"""

from tplab.course.chapters.ch01 import all_gather, all_reduce, cost, reduce_scatter, scatter_gather
from tplab.course.chapters.ch01.predictions import PREDICTIONS
from tplab.course.chapters.ch01.symptoms import SYMPTOMS

__all__ = ["PREDICTIONS", "SYMPTOMS", "all_gather", "all_reduce", "cost", "reduce_scatter", "scatter_gather"]
