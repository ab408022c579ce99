"""Checks for the exercises in chapter 10: the layer (10.1), the full GPT (10.2), a checkpoint's shards (10.3), and
generation (10.4).

Importing this package registers the checks. The package also contains the chapter's prediction questions and its table
of symptoms.
"""

from tplab.course.exercises.ch10 import checkpoint, generation, gpt, layer
from tplab.course.exercises.ch10.predictions import PREDICTIONS
from tplab.course.exercises.ch10.symptoms import SYMPTOMS

__all__ = ["PREDICTIONS", "SYMPTOMS", "checkpoint", "generation", "gpt", "layer"]
