"""The exercises of chapter 03: a table of operators (3.1), f (3.2), g, scatter, gather (3.3) and a sum to fix (3.4).

Importing this package registers their checks. The package also contains the chapter's prediction questions and its
table of symptoms, which lists what a learner may see and what causes it.
"""

from tplab.course.exercises.ch03 import operators, scatter_gather, summed, table
from tplab.course.exercises.ch03.predictions import PREDICTIONS
from tplab.course.exercises.ch03.symptoms import SYMPTOMS

__all__ = ["PREDICTIONS", "SYMPTOMS", "operators", "scatter_gather", "summed", "table"]
