"""Exercises of chapter 12: two mappings (12.1), the block around them (12.2), gradients (12.3), bytes saved (12.4).

Importing this package registers their checks. It also provides the chapter's predictions and table of symptoms.
"""

from tplab.course.chapters.ch12 import block, gradients, layer_bytes, mappings
from tplab.course.chapters.ch12.predictions import PREDICTIONS
from tplab.course.chapters.ch12.symptoms import SYMPTOMS

__all__ = ["PREDICTIONS", "SYMPTOMS", "block", "gradients", "layer_bytes", "mappings"]
