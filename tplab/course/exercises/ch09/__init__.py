"""Checks for the exercises in chapter 09: initial values (9.1), seeds (9.2), a tracker (9.3), dropout (9.4), and
dropout that runs twice (9.5).

Importing this package registers the checks. The package also contains the chapter's prediction questions and its table
of symptoms.
"""

from pathlib import Path

from tplab.course.checks.predictions import read_predictions
from tplab.course.checks.symptoms import read_symptoms
from tplab.course.exercises.ch09 import block, first_values, replay, seeds, tracker

PREDICTIONS = read_predictions(Path(__file__).with_name("predictions.md"))
SYMPTOMS = read_symptoms(Path(__file__).with_name("predictions.md"))

__all__ = ["PREDICTIONS", "SYMPTOMS", "block", "first_values", "replay", "seeds", "tracker"]
