"""Chapter 00: the sizes of a GPT, and how much memory its training takes.

config        the sizes of a GPT, and its weights by name and shape
memory_bill   formulas for what one GPU has to store, for every way to split the model
meter         the same, measured on real tensors
small_gpt     a GPT in plain PyTorch to measure
"""

from tplab.memory.config import PRESETS, GPTConfig, Recompute, RotaryScaling, parameter_count
from tplab.memory.memory_bill import (
    GPUS,
    Bill,
    Layout,
    Recipe,
    bill,
    layer_activations,
    rank_parameters,
)
from tplab.memory.meter import (
    MemoryMeter,
    gradient_bytes,
    optimizer_bytes,
    parameter_bytes,
    saved_for_backward,
    tensor_bytes,
)
from tplab.memory.small_gpt import GPT, SAVED_BY_LAYER, Layer

__all__ = [
    "GPT",
    "GPUS",
    "PRESETS",
    "SAVED_BY_LAYER",
    "Bill",
    "GPTConfig",
    "Layer",
    "Layout",
    "MemoryMeter",
    "Recipe",
    "Recompute",
    "RotaryScaling",
    "bill",
    "gradient_bytes",
    "layer_activations",
    "optimizer_bytes",
    "parameter_bytes",
    "parameter_count",
    "rank_parameters",
    "saved_for_backward",
    "tensor_bytes",
]
