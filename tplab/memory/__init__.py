"""Chapter 00: the sizes of a GPT, and how much memory its training takes.

config        the sizes of a GPT, and its weights by name and shape
memory_bill   formulas for what one GPU has to store, for every way to split the model
meter         the same, measured on real tensors
small_gpt     a GPT in plain PyTorch to measure
"""

from tplab.memory.config import PRESETS, GPTConfig, parameter_count
from tplab.memory.memory_bill import GPUS, Layout, Recipe, bill, layer_activations
from tplab.memory.meter import MemoryMeter, optimizer_bytes, parameter_bytes, saved_for_backward
from tplab.memory.small_gpt import GPT, SAVED_BY_LAYER, Layer

__all__ = [
    "GPT",
    "GPUS",
    "PRESETS",
    "SAVED_BY_LAYER",
    "GPTConfig",
    "Layer",
    "Layout",
    "MemoryMeter",
    "Recipe",
    "bill",
    "layer_activations",
    "optimizer_bytes",
    "parameter_bytes",
    "parameter_count",
    "saved_for_backward",
]
