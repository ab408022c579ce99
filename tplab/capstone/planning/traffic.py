"""Predict one rank's traffic in one training step: the calls and bytes of every collective.

With n = b s tokens per micro-batch, L layers, hidden size h, tp ranks that share a model, and e bytes per element of a
matmul's output (4, or 2 in bfloat16 autocast), a micro-batch has the following traffic over tp:

    embedding            forward    all-reduce [n, h], 4 bytes per element, because lookups are in float32
    layers               forward    2 L all-reduces [n, h], e bytes per element
                         backward   2 L all-reduces [n, h], e bytes per element; 4 without async_grad_allreduce, because
                                    autograd casts the gradient back before the all-reduce
    output layer         backward   all-reduce [n, h], e bytes per element
    loss                 forward    2 all-reduces per block of tokens. In all, n maxima of e bytes each, and 4 bytes for
                                    each of n sums and for one value per block

With sequence parallelism, each all-reduce [n, h] becomes an all-gather and a reduce-scatter, and the recorder counts
the full [n, h] for both. Once per step, the gradients of parameters between the blocks are all-reduced.
recompute="layers" repeats the forward of each layer up to its last matmul, so the last all-reduce isn't repeated unless
dropout comes after it.

Over dp, gradients are all-reduced in buckets, with 4 bytes per element. The norm is summed over tp. A dimension with
one rank has no traffic. (In float64, 4 and e become 8.)
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from math import ceil
from typing import NamedTuple

import torch
from torch import nn

from tplab.capstone.settings.settings import Settings
from tplab.data.flat_parameters import in_buckets
from tplab.memory.config import Weight, first_weights, last_weights, layer_weights
from tplab.runtime.devices import backend_for
from tplab.tensor.embedding import pad_vocab_size
from tplab.tensor.linear_cross_entropy import default_tokens_at_once


class Part(NamedTuple):
    """How often a collective is called for one purpose, its total message bytes, and its group: tp or dp."""

    name: str
    kind: str
    calls: int
    bytes: int
    group: str = "tp"


def step_parts(settings: Settings, device: torch.device | None = None) -> list[Part]:
    """Return one rank's traffic in one training step, roughly in the order in which it occurs.

    Pipeline stages and ZeRO aren't covered. For `device`, see `device_of`.
    """
    m = settings.micro_batches
    parts = [part._replace(calls=m * part.calls, bytes=m * part.bytes) for part in _micro_batch(settings, device)]
    return [part for part in [*parts, *_once(settings)] if part.calls]


def loss_block(settings: Settings, columns: int, device: torch.device | None) -> int:
    """Return how many tokens the fused loss processes at a time, with `columns` logits per token.

    For `device`, see `device_of`.
    """
    return default_tokens_at_once(columns, device_of(settings, device))


def logit_columns(settings: Settings) -> int:
    """Return how many logits per token a rank has, with those of the padding."""
    return pad_vocab_size(settings.vocab_size, settings.tp) // settings.tp


def device_of(settings: Settings, device: torch.device | None) -> torch.device:
    """Return `device`. If it's None, return a GPU if this machine has one for each rank, and the CPU otherwise."""
    return device or torch.device("cuda" if backend_for(settings.ranks) == "nccl" else "cpu")


def _micro_batch(settings: Settings, device: torch.device | None) -> Iterator[Part]:
    """Yield one micro-batch's traffic over tp in the forward and backward passes."""
    if settings.tp == 1:
        return
    layers, tokens = settings.num_layers, settings.micro_batch_size * settings.seq_length
    wide, narrow = _sizes(settings)
    whole = tokens * settings.hidden_size  # [n, h]
    entering = narrow if settings.async_grad_allreduce and not settings.compile else wide  # f, or the gather instead
    cut = settings.sequence_parallel
    summing, gathers = ("reduce_scatter", 2 * layers) if cut else ("all_reduce", 0)
    yield Part("embedding, forward", summing, 1, whole * wide)
    yield Part("layers, forward", "all_gather", gathers, gathers * whole * entering)
    yield Part("layers, forward", summing, 2 * layers, 2 * layers * whole * narrow)
    yield Part("output layer, forward", "all_gather", int(cut), whole * wide)
    columns = logit_columns(settings)
    # The loss: maxima in the logits' dtype, sums in at least float32, and one more value per block of tokens
    blocks = ceil(tokens / loss_block(settings, columns, device))
    yield Part("loss", "all_reduce", 2 * blocks, tokens * narrow + (tokens + blocks) * wide)
    yield Part("output layer, backward", summing, 1, whole * (wide if cut else narrow))
    if settings.recompute == "layers":
        sums = (2 if settings.dropout else 1) * layers
        yield Part("layers, recomputed", "all_gather", gathers, gathers * whole * entering)
        yield Part("layers, recomputed", summing, sums, sums * whole * narrow)
    # In backward, gathers and reduce-scatters trade places
    yield Part("layers, backward", "all_gather", gathers, gathers * whole * narrow)
    yield Part("layers, backward", summing, 2 * layers, 2 * layers * whole * entering)
    yield Part("embedding, backward", "all_gather", int(cut), whole * wide)


def _once(settings: Settings) -> Iterator[Part]:
    """Yield the traffic that occurs once per step."""
    wide, parameters = _sizes(settings)[0], _parameters(settings)
    if settings.dp > 1:
        total = sum(numel for numel, _ in parameters)
        yield Part("gradients, over replicas", "all_reduce", _buckets(settings), wide * total, "dp")
    if settings.tp > 1 and settings.sequence_parallel:
        between = sum(numel for numel, sharded in parameters if not sharded)
        yield Part("gradients between the blocks", "all_reduce", 1, wide * between)
    yield Part("gradient norm", "all_reduce", int(settings.tp > 1), 8)


def _buckets(settings: Settings) -> int:
    """Return the number of buckets in which gradients are summed over the replicas."""
    dtype = torch.float64 if settings.precision == "float64" else torch.float32
    sizes = (numel for numel, _ in _parameters(settings))
    return len(in_buckets(nn.Parameter(torch.empty(numel, dtype=dtype, device="meta")) for numel in sizes))


def _sizes(settings: Settings) -> tuple[int, int]:
    """Return the bytes per element outside matmuls, and per element of a matmul's output."""
    wide = 8 if settings.precision == "float64" else 4
    return wide, 2 if settings.precision == "bfloat16" else wide


def _parameters(settings: Settings) -> list[tuple[int, bool]]:
    """Return the size of each of this rank's parameters, and if it's sharded over tp, in the model's order.

    Q, K and V form one parameter, and so do gate and up.
    """
    config = replace(settings.model, vocab_size=pad_vocab_size(settings.vocab_size, settings.tp))
    weights = [(-1, weight) for weight in first_weights(config)]
    weights += [(layer, weight) for layer in range(settings.num_layers) for weight in layer_weights(config)]
    weights += [(-1, weight) for weight in last_weights(config)]
    fused: dict[tuple[int, str], list[Weight]] = {}
    for layer, weight in weights:
        name = re.sub(r"\.[qkv]\.", ".qkv.", weight.name).replace(".gate.", ".up.")
        fused.setdefault((layer, name), []).append(weight)
    return [(sum(one.on_rank(settings.tp) for one in own), own[0].cut is not None) for own in fused.values()]
