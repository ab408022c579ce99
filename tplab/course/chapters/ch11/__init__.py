"""What chapter 11 asks: the time of a collective (11.1) and of a layer (11.2), a backward pass that does not wait
(11.3), the smallest layer that is worth p ranks (11.4).

Importing it registers the checks of its exercises. Here also: its predictions and its table of symptoms. What was
published of real runs is in `published`.
"""

from tplab.course.chapters.ch11 import async_backward, collective_time, layer_time, smallest
from tplab.course.chapters.ch11.predictions import PREDICTIONS
from tplab.course.chapters.ch11.symptoms import SYMPTOMS

__all__ = ["PREDICTIONS", "SYMPTOMS", "async_backward", "collective_time", "layer_time", "smallest"]
