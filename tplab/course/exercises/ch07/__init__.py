"""Checks for the exercises in chapter 07: ranges (7.1), masked lookup (7.2), the embedding (7.3), logits (7.4), and a
tied model (7.5).

Importing this package registers the checks. The package also contains the chapter's prediction questions and its table
of symptoms.
"""

from tplab.course.exercises.ch07 import embedding, logits, lookup, ranges, tied
from tplab.course.exercises.ch07.predictions import PREDICTIONS
from tplab.course.exercises.ch07.symptoms import SYMPTOMS

__all__ = ["PREDICTIONS", "SYMPTOMS", "embedding", "logits", "lookup", "ranges", "tied"]
