"""The exercises of chapter 01: scatter and gather (1.1), rings (1.2, 1.3), costs (1.4) and a training step (1.5).

Importing this package registers their checks. The package also contains the chapter's prediction questions and its
table of symptoms, which lists what a learner may see and what causes it.
"""

from pathlib import Path

from tplab.course.checks.predictions import read_predictions, read_symptoms
from tplab.course.exercises.ch01 import checks

PREDICTIONS = read_predictions(Path(__file__).with_name("predictions.md"))
SYMPTOMS = read_symptoms(Path(__file__).with_name("predictions.md"))

__all__ = ["PREDICTIONS", "SYMPTOMS", "checks"]
