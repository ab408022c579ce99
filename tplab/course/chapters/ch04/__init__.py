"""What chapter 04 asks: the two parallel layers (4.1, 4.2); cutting, initializing, loading and saving their weights.

Importing it registers the checks of its exercises. Here also: its predictions and its table of symptoms.
"""

from tplab.course.chapters.ch04 import column, cut_and_glue, full_state, master_weight, row
from tplab.course.chapters.ch04.predictions import PREDICTIONS
from tplab.course.chapters.ch04.symptoms import SYMPTOMS

__all__ = ["PREDICTIONS", "SYMPTOMS", "column", "cut_and_glue", "full_state", "master_weight", "row"]
