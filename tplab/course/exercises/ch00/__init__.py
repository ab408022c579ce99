"""The exercises of chapter 00: optimizer state (0.1), parameters (0.2), validation (0.3) and the fewest GPUs (0.4).

Importing this package registers their checks. The package also contains the chapter's prediction questions and its
table of symptoms, which lists what a learner may see and what causes it.
"""

from pathlib import Path

from tplab.course.checks.predictions import read_predictions, read_symptoms
from tplab.course.exercises.ch00 import checks

PREDICTIONS = read_predictions(Path(__file__).with_name("predictions.md"))
SYMPTOMS = read_symptoms(Path(__file__).with_name("predictions.md"))

__all__ = ["PREDICTIONS", "SYMPTOMS", "checks"]
