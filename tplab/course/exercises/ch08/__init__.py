"""The exercises of chapter 08: log-sum-exp (8.1), a token's loss (8.2), a real run's loss (8.3), label smoothing (8.4).

Importing this package registers the checks of these exercises. The package also contains the chapter's prediction
questions and its table of symptoms, which lists what a learner may see and which mistakes cause it.
"""

from pathlib import Path

from tplab.course.checks.predictions import read_predictions, read_symptoms
from tplab.course.exercises.ch08 import checks, mean_loss

PREDICTIONS = read_predictions(Path(__file__).with_name("predictions.md"))
SYMPTOMS = read_symptoms(Path(__file__).with_name("predictions.md"))

__all__ = ["PREDICTIONS", "SYMPTOMS", "checks", "mean_loss"]
