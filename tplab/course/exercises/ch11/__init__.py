"""Checks for the exercises in chapter 11: the time of a collective (11.1) and of a layer (11.2), a backward pass that
doesn't wait (11.3), and the smallest layer that is worth p ranks (11.4).

Importing this package registers the checks. The package also contains the chapter's prediction questions, its table of
symptoms, and (in `published`) published measurements of real runs.
"""

from pathlib import Path

from tplab.course.checks.predictions import read_predictions
from tplab.course.checks.symptoms import read_symptoms
from tplab.course.exercises.ch11 import async_backward, collective_time, layer_time, smallest

PREDICTIONS = read_predictions(Path(__file__).with_name("predictions.md"))
SYMPTOMS = read_symptoms(Path(__file__).with_name("predictions.md"))

__all__ = ["PREDICTIONS", "SYMPTOMS", "async_backward", "collective_time", "layer_time", "smallest"]
