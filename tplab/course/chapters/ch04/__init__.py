"""Exercises of chapter 04: two parallel layers (4.1, 4.2); split (4.3), initialize (4.4), load and save (4.5) weights.

Importing this package registers their checks. It also provides the chapter's predictions and table of symptoms.
"""

from tplab.course.chapters.ch04 import column, cut_and_glue, full_state, master_weight, row
from tplab.course.chapters.ch04.predictions import PREDICTIONS
from tplab.course.chapters.ch04.symptoms import SYMPTOMS

__all__ = ["PREDICTIONS", "SYMPTOMS", "column", "cut_and_glue", "full_state", "master_weight", "row"]
