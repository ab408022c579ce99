"""Exercises of chapter 00: parameters of a GPT (0.1), bytes of training state (0.2), the smallest p that fits (0.3).

Importing this package registers their checks. It also provides the chapter's predictions and table of symptoms.
"""

from tplab.course.chapters.ch00 import parameters, smallest_p, state
from tplab.course.chapters.ch00.predictions import PREDICTIONS
from tplab.course.chapters.ch00.symptoms import SYMPTOMS

__all__ = ["PREDICTIONS", "SYMPTOMS", "parameters", "smallest_p", "state"]
