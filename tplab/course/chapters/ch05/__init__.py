"""Exercises of chapter 05: the MLP (5.1), its bytes (5.2), the gated MLP (5.3), a detector for drifting replicas (5.4).

Importing this package registers their checks. It also provides the chapter's predictions and table of symptoms.
"""

from tplab.course.chapters.ch05 import detector, mlps, traffic_bytes
from tplab.course.chapters.ch05.predictions import PREDICTIONS
from tplab.course.chapters.ch05.symptoms import SYMPTOMS

__all__ = ["PREDICTIONS", "SYMPTOMS", "detector", "mlps", "traffic_bytes"]
