"""The exercises of chapter 11: an order (11.1), a backward pass that sends while it multiplies (11.2), the time of a
layer (11.3), how wide it has to be (11.4), and buffers that are divided too early (11.5).

Importing this package registers the checks of these exercises. The package also contains the chapter's prediction
questions, its table of symptoms, and (in `published`) published measurements of real runs.
"""

from pathlib import Path

from tplab.course.checks.predictions import read_predictions, read_symptoms
from tplab.course.exercises.ch11 import checks, messages

PREDICTIONS = read_predictions(Path(__file__).with_name("predictions.md"))
SYMPTOMS = read_symptoms(Path(__file__).with_name("predictions.md"))

__all__ = ["PREDICTIONS", "SYMPTOMS", "checks", "messages"]
