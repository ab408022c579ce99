"""Exercises of chapter 00: optimizer state (0.1), parameters (0.2), a validation loop (0.3), the fewest GPUs (0.4).

Importing this package registers their checks. It also provides the chapter's predictions and table of symptoms.
"""

from tplab.course.chapters.ch00 import layouts, parameters, state, validation
from tplab.course.chapters.ch00.predictions import PREDICTIONS
from tplab.course.chapters.ch00.symptoms import SYMPTOMS

__all__ = ["PREDICTIONS", "SYMPTOMS", "layouts", "parameters", "state", "validation"]
