"""Checks for the exercises in chapter 15: the learning rate (15.1), the data order (15.2), a training step (15.3),
saving (15.4), and MFU (15.5).

Importing this package registers the checks. The package also contains the chapter's prediction questions and its table
of symptoms.
"""

from tplab.course.exercises.ch15 import learning_rate, saving, training_step, utilisation, windows
from tplab.course.exercises.ch15.predictions import PREDICTIONS
from tplab.course.exercises.ch15.symptoms import SYMPTOMS

__all__ = ["PREDICTIONS", "SYMPTOMS", "learning_rate", "saving", "training_step", "utilisation", "windows"]
