"""The exercises of chapter 06: attention (6.1, 6.2), masks (6.3), cross-attention (6.4), copies (6.5), a cache (6.6).

Importing this package registers the checks of these exercises. The package also contains the chapter's prediction
questions and its table of symptoms, which lists what a learner may see and which mistakes cause it.
"""

from pathlib import Path

from tplab.course.checks.predictions import read_predictions, read_symptoms
from tplab.course.exercises.ch06 import cache, checks, modules

PREDICTIONS = read_predictions(Path(__file__).with_name("predictions.md"))
SYMPTOMS = read_symptoms(Path(__file__).with_name("predictions.md"))

__all__ = ["PREDICTIONS", "SYMPTOMS", "cache", "checks", "modules"]
