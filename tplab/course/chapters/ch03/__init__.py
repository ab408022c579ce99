"""Exercises of chapter 03: a table of operators (3.1), f (3.2), g, scatter and gather (3.3), a sum to repair (3.4).

Importing this package registers their checks. It also provides the chapter's predictions and table of symptoms.
"""

from tplab.course.chapters.ch03 import operators, scatter_gather, summed, table
from tplab.course.chapters.ch03.predictions import PREDICTIONS
from tplab.course.chapters.ch03.symptoms import SYMPTOMS

__all__ = ["PREDICTIONS", "SYMPTOMS", "operators", "scatter_gather", "summed", "table"]
