"""Checks for the exercises in chapter 06: heads (6.1), attention (6.2), its fused weight (6.3), grouped heads (6.4),
and a KV cache (6.5).

Importing this package registers the checks. The package also contains the chapter's prediction questions and its table
of symptoms.
"""

from pathlib import Path

from tplab.course.checks.predictions import read_predictions
from tplab.course.checks.symptoms import read_symptoms
from tplab.course.exercises.ch06 import attention, cache, grouped, heads, slicing

PREDICTIONS = read_predictions(Path(__file__).with_name("predictions.md"))
SYMPTOMS = read_symptoms(Path(__file__).with_name("predictions.md"))

__all__ = ["PREDICTIONS", "SYMPTOMS", "attention", "cache", "grouped", "heads", "slicing"]
