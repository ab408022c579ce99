"""The exercises of chapter 15: whole checkpoints (15.1), the order of the data (15.2), a step (15.3), layouts (15.4).

Importing this package registers the checks of these exercises. The package also contains the chapter's prediction
questions and its table of symptoms, which lists what a learner may see and which mistakes cause it.
"""

from pathlib import Path

from tplab.course.checks.predictions import read_predictions, read_symptoms
from tplab.course.exercises.ch15 import renting, saving, training_step, windows

PREDICTIONS = read_predictions(Path(__file__).with_name("predictions.md"))
SYMPTOMS = read_symptoms(Path(__file__).with_name("predictions.md"))

__all__ = ["PREDICTIONS", "SYMPTOMS", "renting", "saving", "training_step", "windows"]
