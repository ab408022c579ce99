"""The exercises of chapter 00: optimizer state (0.1), parameters (0.2), validation (0.3) and the fewest GPUs (0.4).

Importing this package registers their checks. The package also contains the chapter's prediction questions and its
table of symptoms, which lists what a learner may see and what causes it.
"""

from tplab.course.exercises.ch00 import layouts, parameters, state, validation
from tplab.course.exercises.ch00.predictions import PREDICTIONS
from tplab.course.exercises.ch00.symptoms import SYMPTOMS

__all__ = ["PREDICTIONS", "SYMPTOMS", "layouts", "parameters", "state", "validation"]
