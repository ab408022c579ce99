"""Checks for the exercises in chapter 14: gradient buckets (14.1), ZeRO-1 (14.2), the mesh (14.3), the norm (14.4), and
a layout (14.5).

Importing this package registers the checks. The package also contains the chapter's prediction questions and its table
of symptoms.
"""

from pathlib import Path

from tplab.course.checks.predictions import read_predictions
from tplab.course.checks.symptoms import read_symptoms
from tplab.course.exercises.ch14 import buckets, layouts, mesh, norm, zero

PREDICTIONS = read_predictions(Path(__file__).with_name("predictions.md"))
SYMPTOMS = read_symptoms(Path(__file__).with_name("predictions.md"))

__all__ = ["PREDICTIONS", "SYMPTOMS", "buckets", "layouts", "mesh", "norm", "zero"]
