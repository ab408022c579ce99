"""What chapter 10 asks: the layer (10.1), the whole GPT (10.2), a checkpoint's shards (10.3), generation (10.4).

Importing it registers the checks of its exercises. Here also: its predictions and its table of symptoms.
"""

from tplab.course.chapters.ch10 import checkpoint, generation, gpt, layer
from tplab.course.chapters.ch10.predictions import PREDICTIONS
from tplab.course.chapters.ch10.symptoms import SYMPTOMS

__all__ = ["PREDICTIONS", "SYMPTOMS", "checkpoint", "generation", "gpt", "layer"]
