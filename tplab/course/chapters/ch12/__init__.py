"""What chapter 12 asks: two mappings (12.1), the block around them (12.2), gradients (12.3), the bytes kept (12.4).

Importing it registers the checks of its exercises. Here also: its predictions and its table of symptoms.
"""

from tplab.course.chapters.ch12 import block, gradients, layer_bytes, mappings
from tplab.course.chapters.ch12.predictions import PREDICTIONS
from tplab.course.chapters.ch12.symptoms import SYMPTOMS

__all__ = ["PREDICTIONS", "SYMPTOMS", "block", "gradients", "layer_bytes", "mappings"]
