"""Checks for the exercises in chapter 12: two mappings (12.1), the block around them (12.2), gradients (12.3), and
saved bytes (12.4).

Importing this package registers the checks. The package also contains the chapter's prediction questions and its table
of symptoms.
"""

from pathlib import Path

from tplab.course.checks.predictions import read_predictions
from tplab.course.checks.symptoms import read_symptoms
from tplab.course.exercises.ch12 import block, gradients, layer_bytes, mappings

PREDICTIONS = read_predictions(Path(__file__).with_name("predictions.md"))
SYMPTOMS = read_symptoms(Path(__file__).with_name("predictions.md"))

__all__ = ["PREDICTIONS", "SYMPTOMS", "block", "gradients", "layer_bytes", "mappings"]
