"""What chapter 07 asks: the ranges (7.1), the masked look-up (7.2), the embedding (7.3), its logits (7.4), both (7.5).

Importing it registers the checks of its exercises. Here also: its predictions and its table of symptoms.
"""

from tplab.course.chapters.ch07 import embedding, logits, lookup, ranges, tied
from tplab.course.chapters.ch07.predictions import PREDICTIONS
from tplab.course.chapters.ch07.symptoms import SYMPTOMS

__all__ = ["PREDICTIONS", "SYMPTOMS", "embedding", "logits", "lookup", "ranges", "tied"]
