"""Exercises of chapter 05: splitting an MLP (5.1), ParallelMLP (5.2), drifting replicas (5.3), a gated MLP (5.4).

Importing this package registers their checks. It also provides the chapter's predictions and table of symptoms.
"""

from tplab.course.chapters.ch05 import design, detector, mlps
from tplab.course.chapters.ch05.predictions import PREDICTIONS
from tplab.course.chapters.ch05.symptoms import SYMPTOMS

__all__ = ["PREDICTIONS", "SYMPTOMS", "design", "detector", "mlps"]
