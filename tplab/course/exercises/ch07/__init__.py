"""Checks for the exercises in chapter 07: ranges (7.1), masked lookup (7.2), the embedding (7.3), logits (7.4), and a
tied model (7.5).

Importing this package registers the checks. The package also contains the chapter's prediction questions and its table
of symptoms.
"""

from pathlib import Path

from tplab.course.checks.predictions import read_predictions
from tplab.course.checks.symptoms import read_symptoms
from tplab.course.exercises.ch07 import embedding, logits, lookup, ranges, tied

PREDICTIONS = read_predictions(Path(__file__).with_name("predictions.md"))
SYMPTOMS = read_symptoms(Path(__file__).with_name("predictions.md"))

__all__ = ["PREDICTIONS", "SYMPTOMS", "embedding", "logits", "lookup", "ranges", "tied"]
