"""The exercises of the start page: one matmul split by rows (S.1) and by columns (S.2).

Importing this package registers their checks. The package also contains the page's prediction questions. SYMPTOMS is
empty, because the page has no table of symptoms and their causes.
"""

from tplab.course.checks import Symptom
from tplab.course.exercises.start import products
from tplab.course.exercises.start.predictions import PREDICTIONS

SYMPTOMS: list[Symptom] = []

__all__ = ["PREDICTIONS", "SYMPTOMS", "products"]
