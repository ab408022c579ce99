"""What chapter 09 asks: first values (9.1), seeds (9.2), a tracker (9.3), where to fork (9.4), the same dropout (9.5).

Importing it registers the checks of its exercises. Here also: its predictions and its table of symptoms.
"""

from tplab.course.chapters.ch09 import block, first_values, replay, seeds, tracker
from tplab.course.chapters.ch09.predictions import PREDICTIONS
from tplab.course.chapters.ch09.symptoms import SYMPTOMS

__all__ = ["PREDICTIONS", "SYMPTOMS", "block", "first_values", "replay", "seeds", "tracker"]
