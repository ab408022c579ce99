"""Checks for the exercises in chapter 06: heads (6.1), attention (6.2), its fused weight (6.3), grouped heads (6.4),
and a KV cache (6.5).

Importing this package registers the checks. The package also contains the chapter's prediction questions and its table
of symptoms.
"""

from tplab.course.exercises.ch06 import attention, cache, grouped, heads, slicing
from tplab.course.exercises.ch06.predictions import PREDICTIONS
from tplab.course.exercises.ch06.symptoms import SYMPTOMS

__all__ = ["PREDICTIONS", "SYMPTOMS", "attention", "cache", "grouped", "heads", "slicing"]
