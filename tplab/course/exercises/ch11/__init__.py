"""Checks for the exercises in chapter 11: the time of a collective (11.1) and of a layer (11.2), a backward pass that
doesn't wait (11.3), and the smallest layer that is worth p ranks (11.4).

Importing this package registers the checks. The package also contains the chapter's prediction questions, its table of
symptoms, and (in `published`) published measurements of real runs.
"""

from tplab.course.exercises.ch11 import async_backward, collective_time, layer_time, smallest
from tplab.course.exercises.ch11.predictions import PREDICTIONS
from tplab.course.exercises.ch11.symptoms import SYMPTOMS

__all__ = ["PREDICTIONS", "SYMPTOMS", "async_backward", "collective_time", "layer_time", "smallest"]
