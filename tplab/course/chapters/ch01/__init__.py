"""What chapter 01 asks: scatter and gather (1.1), the ring's two halves (1.2, 1.3) and the whole (1.4), its cost (1.5).

Importing it registers the checks of its exercises. Here also: its predictions and its table of symptoms.
"""

from tplab.course.chapters.ch01 import all_gather, all_reduce, cost, reduce_scatter, scatter_gather
from tplab.course.chapters.ch01.predictions import PREDICTIONS
from tplab.course.chapters.ch01.symptoms import SYMPTOMS

__all__ = ["PREDICTIONS", "SYMPTOMS", "all_gather", "all_reduce", "cost", "reduce_scatter", "scatter_gather"]
