"""Checks for the exercises in chapter 08: the largest logit (8.1), log-sum-exp (8.2), the target's logit (8.3), the
backward pass by hand (8.4), and the full loss (8.5).

Importing this package registers the checks. The package also contains the chapter's prediction questions and its table
of symptoms.
"""

from pathlib import Path

from tplab.course.checks.predictions import read_predictions
from tplab.course.checks.symptoms import read_symptoms
from tplab.course.exercises.ch08 import by_hand, logsumexp, maximum, target, whole_loss

PREDICTIONS = read_predictions(Path(__file__).with_name("predictions.md"))
SYMPTOMS = read_symptoms(Path(__file__).with_name("predictions.md"))

__all__ = ["PREDICTIONS", "SYMPTOMS", "by_hand", "logsumexp", "maximum", "target", "whole_loss"]
