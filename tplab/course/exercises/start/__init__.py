"""The exercises of the start page: one matmul split by rows (S.1) and by columns (S.2).

Importing this package registers their checks. The package also contains the page's prediction questions.
"""

from pathlib import Path

from tplab.course.checks.predictions import read_predictions
from tplab.course.exercises.start import checks

PREDICTIONS = read_predictions(Path(__file__).with_name("predictions.md"))

__all__ = ["PREDICTIONS", "checks"]
