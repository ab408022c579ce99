"""What chapter 00 asks: parameters of a GPT (0.1), bytes of the training state (0.2), the smallest p that fits (0.3).

Importing it registers the checks of its exercises. Here also: its predictions and its table of symptoms.
"""

from tplab.course.chapters.ch00 import parameters, smallest_p, state
from tplab.course.chapters.ch00.predictions import PREDICTIONS
from tplab.course.chapters.ch00.symptoms import SYMPTOMS

__all__ = ["PREDICTIONS", "SYMPTOMS", "parameters", "smallest_p", "state"]
