"""The exercises of chapter 04: parallel layers (4.1, 4.2), shards (4.3), initial values (4.4) and checkpoints (4.5).

Importing this package registers the checks of these exercises. The package also contains the chapter's prediction
questions and its table of symptoms, which lists what a learner may see and which mistakes cause it.
"""

from tplab.course.exercises.ch04 import column, cut_and_glue, full_state, master_weight, row
from tplab.course.exercises.ch04.predictions import PREDICTIONS
from tplab.course.exercises.ch04.symptoms import SYMPTOMS

__all__ = ["PREDICTIONS", "SYMPTOMS", "column", "cut_and_glue", "full_state", "master_weight", "row"]
