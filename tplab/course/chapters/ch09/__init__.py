"""Exercises of chapter 09: initial values (9.1), seeds (9.2), a tracker (9.3), dropout (9.4), dropout run twice (9.5).

Importing this package registers their checks. It also provides the chapter's predictions and table of symptoms.
"""

from tplab.course.chapters.ch09 import block, first_values, replay, seeds, tracker
from tplab.course.chapters.ch09.predictions import PREDICTIONS
from tplab.course.chapters.ch09.symptoms import SYMPTOMS

__all__ = ["PREDICTIONS", "SYMPTOMS", "block", "first_values", "replay", "seeds", "tracker"]
