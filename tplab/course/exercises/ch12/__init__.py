"""Checks for the exercises in chapter 12: two mappings (12.1), the block around them (12.2), gradients (12.3), and
saved bytes (12.4).

Importing this package registers the checks. The package also contains the chapter's prediction questions and its table
of symptoms.
"""

from tplab.course.exercises.ch12 import block, gradients, layer_bytes, mappings
from tplab.course.exercises.ch12.predictions import PREDICTIONS
from tplab.course.exercises.ch12.symptoms import SYMPTOMS

__all__ = ["PREDICTIONS", "SYMPTOMS", "block", "gradients", "layer_bytes", "mappings"]
