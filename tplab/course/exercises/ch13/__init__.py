"""Checks for the exercises in chapter 13: GPipe and 1F1B as lists (13.1, 13.2), their peak and bubble (13.3), and
running a stage (13.4).

Importing this package registers the checks. The package also contains the chapter's prediction questions and its table
of symptoms.
"""

from pathlib import Path

from tplab.course.checks.predictions import read_predictions
from tplab.course.checks.symptoms import read_symptoms
from tplab.course.exercises.ch13 import lists, reading, stage

PREDICTIONS = read_predictions(Path(__file__).with_name("predictions.md"))
SYMPTOMS = read_symptoms(Path(__file__).with_name("predictions.md"))

__all__ = ["PREDICTIONS", "SYMPTOMS", "lists", "reading", "stage"]
