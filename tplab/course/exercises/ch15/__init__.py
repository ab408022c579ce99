"""Checks for the exercises in chapter 15: the learning rate (15.1), the data order (15.2), a training step (15.3),
saving (15.4), and MFU (15.5).

Importing this package registers the checks. The package also contains the chapter's prediction questions and its table
of symptoms.
"""

from pathlib import Path

from tplab.course.checks.predictions import read_predictions
from tplab.course.checks.symptoms import read_symptoms
from tplab.course.exercises.ch15 import learning_rate, saving, training_step, utilisation, windows

PREDICTIONS = read_predictions(Path(__file__).with_name("predictions.md"))
SYMPTOMS = read_symptoms(Path(__file__).with_name("predictions.md"))

__all__ = ["PREDICTIONS", "SYMPTOMS", "learning_rate", "saving", "training_step", "utilisation", "windows"]
