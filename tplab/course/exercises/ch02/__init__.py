"""The exercises of chapter 02: shards (2.1), two matmuls (2.2), GELU and the row split (2.3), a gather to fix (2.4).

Importing this package registers the checks of these exercises. The package also contains the chapter's prediction
questions and its table of symptoms, which lists what a learner may see and which mistakes cause it.
"""

from tplab.course.exercises.ch02 import gather, gelu, shards, two_matmuls
from tplab.course.exercises.ch02.predictions import PREDICTIONS
from tplab.course.exercises.ch02.symptoms import SYMPTOMS

__all__ = ["PREDICTIONS", "SYMPTOMS", "gather", "gelu", "shards", "two_matmuls"]
