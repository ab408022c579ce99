"""Exercises of chapter 03: the operators f (3.1), g (3.2), scatter (3.3) and gather (3.4).

Importing this package registers their checks. It also provides the chapter's predictions and table of symptoms.
"""

from tplab.course.chapters.ch03 import operators, scatter_gather
from tplab.course.chapters.ch03.predictions import PREDICTIONS
from tplab.course.chapters.ch03.symptoms import SYMPTOMS

__all__ = ["PREDICTIONS", "SYMPTOMS", "operators", "scatter_gather"]
