"""Exercises of chapter 15: learning rate (15.1), data order (15.2), a training step (15.3), saving (15.4), MFU (15.5).

Importing this package registers their checks. It also provides the chapter's predictions and table of symptoms.
"""

from tplab.course.chapters.ch15 import learning_rate, saving, training_step, utilisation, windows
from tplab.course.chapters.ch15.predictions import PREDICTIONS
from tplab.course.chapters.ch15.symptoms import SYMPTOMS

__all__ = ["PREDICTIONS", "SYMPTOMS", "learning_rate", "saving", "training_step", "utilisation", "windows"]
