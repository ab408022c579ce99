"""Exercises of chapter 07: ranges (7.1), the masked lookup (7.2), the embedding (7.3), its logits (7.4), both (7.5).

Importing this package registers their checks. It also has the chapter's predictions and its table of symptoms.
"""

from tplab.course.chapters.ch07 import embedding, logits, lookup, ranges, tied
from tplab.course.chapters.ch07.predictions import PREDICTIONS
from tplab.course.chapters.ch07.symptoms import SYMPTOMS

__all__ = ["PREDICTIONS", "SYMPTOMS", "embedding", "logits", "lookup", "ranges", "tied"]
