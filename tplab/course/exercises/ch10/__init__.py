"""The exercises of chapter 10: an order (10.1), a residual (10.2), a layer and a GPT (10.3, 10.4), a token (10.5), and a
checkpoint (10.6).

Importing this package registers the checks of these exercises. The package also contains the chapter's prediction
questions and its table of symptoms, which lists what a learner may see and which mistakes cause it.
"""

from pathlib import Path

from tplab.course.checks.predictions import read_predictions
from tplab.course.checks.symptoms import read_symptoms
from tplab.course.exercises.ch10 import checks, models

PREDICTIONS = read_predictions(Path(__file__).with_name("predictions.md"))
SYMPTOMS = read_symptoms(Path(__file__).with_name("predictions.md"))

__all__ = ["PREDICTIONS", "SYMPTOMS", "checks", "models"]
