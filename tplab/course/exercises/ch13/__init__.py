"""The exercises of chapter 13: schedules (13.1, 13.5), F and B of a stage (13.2), a stage's program (13.3), and an
outbox (13.4).

Importing this package registers the checks of these exercises. The package also contains the chapter's prediction
questions and its table of symptoms, which lists what a learner may see and which mistakes cause it.
"""

from pathlib import Path

from tplab.course.checks.predictions import read_predictions, read_symptoms
from tplab.course.exercises.ch13 import checks, outbox, played

PREDICTIONS = read_predictions(Path(__file__).with_name("predictions.md"))
SYMPTOMS = read_symptoms(Path(__file__).with_name("predictions.md"))

__all__ = ["PREDICTIONS", "SYMPTOMS", "checks", "outbox", "played"]
