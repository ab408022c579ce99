"""The exercises of chapter 02: shards (2.1), two matmuls (2.2), GELU and the row split (2.3), a gather to fix (2.4).

Importing this package registers the checks of these exercises. The package also contains the chapter's prediction
questions and its table of symptoms, which lists what a learner may see and which mistakes cause it.
"""

from pathlib import Path

from tplab.course.checks.predictions import read_predictions, read_symptoms
from tplab.course.exercises.ch02 import checks

PREDICTIONS = read_predictions(Path(__file__).with_name("predictions.md"))
SYMPTOMS = read_symptoms(Path(__file__).with_name("predictions.md"))

__all__ = ["PREDICTIONS", "SYMPTOMS", "checks"]
