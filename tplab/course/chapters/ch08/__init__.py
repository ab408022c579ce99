"""Exercises of chapter 08: the largest logit (8.1), log-sum-exp (8.2), the target's logit (8.3), the backward by hand
(8.4), the full loss (8.5).

Importing this package registers their checks. It also provides the chapter's predictions and table of symptoms.
"""

from tplab.course.chapters.ch08 import by_hand, logsumexp, maximum, target, whole_loss
from tplab.course.chapters.ch08.predictions import PREDICTIONS
from tplab.course.chapters.ch08.symptoms import SYMPTOMS

__all__ = ["PREDICTIONS", "SYMPTOMS", "by_hand", "logsumexp", "maximum", "target", "whole_loss"]
