"""Exercises of chapter 10: the layer (10.1), the full GPT (10.2), a checkpoint's shards (10.3), generation (10.4).

Importing this package registers their checks. It also provides the chapter's predictions and table of symptoms.
"""

from tplab.course.chapters.ch10 import checkpoint, generation, gpt, layer
from tplab.course.chapters.ch10.predictions import PREDICTIONS
from tplab.course.chapters.ch10.symptoms import SYMPTOMS

__all__ = ["PREDICTIONS", "SYMPTOMS", "checkpoint", "generation", "gpt", "layer"]
