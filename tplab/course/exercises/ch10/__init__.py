"""Checks for the exercises in chapter 10: the layer (10.1), the full GPT (10.2), a checkpoint's shards (10.3), and
generation (10.4).

Importing this package registers the checks. The package also contains the chapter's prediction questions and its table
of symptoms.
"""

from pathlib import Path

from tplab.course.checks.predictions import read_predictions
from tplab.course.checks.symptoms import read_symptoms
from tplab.course.exercises.ch10 import checkpoint, generation, gpt, layer

PREDICTIONS = read_predictions(Path(__file__).with_name("predictions.md"))
SYMPTOMS = read_symptoms(Path(__file__).with_name("predictions.md"))

__all__ = ["PREDICTIONS", "SYMPTOMS", "checkpoint", "generation", "gpt", "layer"]
