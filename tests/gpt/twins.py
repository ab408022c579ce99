"""Plain and parallel layers and GPTs of the same sizes, and what they're trained on."""

from dataclasses import replace

import torch

from tests.reference import random
from tests.tensor.on_ranks import with_random_weights
from tplab import plain
from tplab.gpt.model import ParallelGPT
from tplab.gpt.transformer import ParallelTransformerLayer
from tplab.memory.config import GPTConfig

HIDDEN, HEADS, FFN, VOCAB = 16, 4, 24, 37
BATCH = 2

# Layers

LAYER = GPTConfig(
    num_layers=1, hidden_size=HIDDEN, num_heads=HEADS, ffn_hidden_size=FFN, vocab_size=1, seq_length=1, dropout=0.0
)
KINDS = {"encoder": {"causal": False}, "causal": {}, "decoder": {"cross_attention": True}}


def plain_layer(kind, key="", dropout=0.0, **options):
    """A plain layer with random weights. Another key gives other weights."""
    layer = plain.Layer(replace(LAYER, dropout=dropout), **KINDS[kind], **options, dtype=torch.float64)
    return with_random_weights(layer, key)


def parallel_layer(kind, group=None, dtype=torch.float64, **options):
    return ParallelTransformerLayer(HIDDEN, HEADS, None, FFN, **KINDS[kind], group=group, dtype=dtype, **options)


def layer_batches(kind, sequence, memory_tokens=0):
    """Two steps: x, a decoder's memory, the mask of an encoder's or a memory's padding, the gradient of the output."""
    steps, padding = [], {"encoder": ("key_padding_mask", sequence), "decoder": ("memory_padding_mask", memory_tokens)}
    for step in (0, 1):
        given = {"x": random((BATCH, sequence, HIDDEN), "x", step)}
        if kind == "decoder":
            given["memory"] = random((BATCH, memory_tokens, HIDDEN), "memory", step)
        if kind in padding:
            name, keys = padding[kind]
            given[name] = torch.arange(keys) >= torch.tensor([[keys], [keys - 2]])
        steps.append((given, random((BATCH, sequence, HIDDEN), "dy", step)))
    return steps


# GPTs

GPT2 = GPTConfig(num_layers=2, hidden_size=HIDDEN, num_heads=HEADS, vocab_size=VOCAB, seq_length=12, dropout=0.0)
LLAMA = replace(
    GPT2, num_kv_heads=2, ffn_hidden_size=FFN, gated=True, bias=False, tied_embedding=False, learned_positions=False
)
ONE_KV_HEAD = replace(LLAMA, num_kv_heads=1, tied_embedding=True)


def plain_gpt(config):
    return with_random_weights(plain.GPT(config, dtype=torch.float64))


def parallel_gpt(config, group=None, kind=ParallelGPT, **options):
    return kind(config, group=group, dtype=torch.float64, **options)


def gpt_batches(sequence):
    """Three steps of ids and targets. Those that count aren't spread evenly over the tokens."""
    steps = []
    for step in range(3):
        ids, targets = torch.randint(0, VOCAB, (2, BATCH, sequence), generator=torch.Generator().manual_seed(step))
        targets[0, :3] = -100
        steps.append(({"ids": ids, "targets": targets}, torch.ones((), dtype=torch.float64)))
    return steps


def ids_and_targets(sequence):
    return tuple(gpt_batches(sequence)[0][0].values())
