"""Predict one rank's traffic in one training step: the calls and bytes of every collective and message.

With n = b s tokens per micro-batch, L layers on the rank's stage, hidden size h, tp ranks that share a model, and e
bytes per element of a matmul's output (4, or 2 in bfloat16 autocast), a micro-batch has the following traffic over tp:

    embedding            forward    all-reduce [n, h], 4 bytes per element, because lookups are in float32
    layers               forward    2 L all-reduces [n, h], e bytes per element
                         backward   2 L all-reduces [n, h], e bytes per element; 4 without async_grad_allreduce, because
                                    autograd casts the gradient back before the all-reduce
    output layer         backward   all-reduce [n, h], e bytes per element
    loss                 forward    2 all-reduces per block of tokens. In all, n maxima of e bytes each, and 4 bytes for
                                    each of n sums and for one value per block. In a pipeline, all tokens are one block

With sequence parallelism, each all-reduce [n, h] becomes an all-gather and a reduce-scatter, and the recorder counts
the full [n, h] for both. Once per step, the gradients of parameters between the blocks are all-reduced.
recompute="layers" repeats the forward of each layer up to its last matmul, so the last all-reduce isn't repeated unless
dropout comes after it.

Over pp, a stage sends its output [n, h] (only its shard with sequence parallelism) to the next stage and receives a
gradient of the same size. On its input side, it does the reverse. The first and the last stage all-reduce the gradient
of a tied table.

Over dp, the traffic is that of `tplab.data.zero_cost`, in buckets or layers, with 4 bytes per element. ZeRO's vectors
are padded to a multiple of dp. The norm is summed over tp and pp, and with ZeRO over dp. A dimension with one rank has
no traffic. (In float64, 4 and e become 8.)
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil
from typing import Any, NamedTuple

import torch

from tplab.capstone.settings.settings import Settings
from tplab.data.flat_parameters import BUCKET_BYTES
from tplab.data.zero_cost import zero_traffic
from tplab.memory.config import Weight, first_weights, last_weights, layer_weights
from tplab.runtime.devices import backend_for
from tplab.tensor.embedding import pad_vocab_size
from tplab.tensor.linear_cross_entropy import default_tokens_at_once


class Part(NamedTuple):
    """How often a collective is called for one purpose, its total message bytes, and its group: tp, pp or dp."""

    name: str
    kind: str
    calls: int
    bytes: int
    group: str = "tp"


def step_parts(settings: Settings, stage: int = 0, replica: int = 0, device: torch.device | None = None) -> list[Part]:
    """Return one rank's traffic in one training step, roughly in the order in which it occurs.

    With ZeRO and sequence parallelism, the traffic depends on `replica`, because shards contain different norms. For
    `device`, see `device_of`.
    """
    m = settings.micro_batches
    parts = [
        part._replace(calls=m * part.calls, bytes=m * part.bytes) for part in _micro_batch(settings, stage, device)
    ]
    parts += _once(settings, _parameters(settings, stage), replica)
    return [part for part in parts if part.calls]


def gathered_at_once(settings: Settings, stage: int = 0) -> int:
    """Return how many parameters ZeRO-3 gathers at a time: those of one layer, and all those outside the layers."""
    return sum(p.numel for p in _parameters(settings, stage) if p.layer in (None, 0))


def loss_block(settings: Settings, columns: int, device: torch.device | None) -> int:
    """Return how many tokens the fused loss processes at a time, with `columns` logits per token.

    For `device`, see `device_of`.
    """
    return default_tokens_at_once(columns, device_of(settings, device))


def device_of(settings: Settings, device: torch.device | None) -> torch.device:
    """Return `device`. If it's None, return a GPU if this machine has one for each rank, and the CPU otherwise."""
    return device or torch.device("cuda" if backend_for(settings.ranks) == "nccl" else "cpu")


def _micro_batch(settings: Settings, stage: int, device: torch.device | None) -> Iterator[Part]:
    """Yield one micro-batch's messages between stages, and its traffic over tp in the forward and backward passes."""
    layers, tokens = settings.layers_of_stages[stage], settings.micro_batch_size * settings.seq_length
    wide, narrow = _sizes(settings)
    whole = tokens * settings.hidden_size  # [n, h]
    borders = (stage > 0) + (stage < settings.pp - 1)
    size = wide * (whole // settings.tp if settings.sequence_parallel else whole)
    for kind in ("send", "recv"):
        yield Part("between stages", kind, borders, borders * size, "pp")
    if settings.tp == 1:
        return
    entering = narrow if settings.async_grad_allreduce and not settings.compile else wide  # f, or the gather instead
    leaving = narrow if settings.async_grad_allreduce else wide  # the same for the output layer of a pipeline
    cut, pipelined = settings.sequence_parallel, settings.pp > 1
    summing, gathers = ("reduce_scatter", 2 * layers) if cut else ("all_reduce", 0)
    if stage == 0:
        yield Part("embedding, forward", summing, 1, whole * wide)
    yield Part("layers, forward", "all_gather", gathers, gathers * whole * entering)
    yield Part("layers, forward", summing, 2 * layers, 2 * layers * whole * narrow)
    if stage == settings.pp - 1:
        yield Part("output layer, forward", "all_gather", int(cut), whole * (leaving if pipelined else wide))
        columns = pad_vocab_size(settings.vocab_size, settings.tp) // settings.tp
        # The loss: maxima in the logits' dtype, sums in at least float32, and one more value per block of tokens
        blocks = 1 if pipelined else ceil(tokens / loss_block(settings, columns, device))
        yield Part("loss", "all_reduce", 2 * blocks, tokens * narrow + (tokens + blocks) * wide)
        alone = wide if cut else narrow
        yield Part("output layer, backward", summing, 1, whole * (leaving if pipelined else alone))
    if settings.recompute == "layers":
        sums = (2 if settings.dropout else 1) * layers
        yield Part("layers, recomputed", "all_gather", gathers, gathers * whole * entering)
        yield Part("layers, recomputed", summing, sums, sums * whole * narrow)
    # In backward, gathers and reduce-scatters trade places
    yield Part("layers, backward", "all_gather", gathers, gathers * whole * narrow)
    yield Part("layers, backward", summing, 2 * layers, 2 * layers * whole * entering)
    yield Part("embedding, backward", "all_gather", int(cut and stage == 0), whole * wide)


class _Parameter(NamedTuple):
    """A parameter on this rank: its size, whether it's sharded over tp, its layer, and what it is."""

    numel: int
    sharded: bool
    layer: int | None
    is_matrix: bool
    is_tied: bool


def _once(settings: Settings, parameters: Sequence[_Parameter], replica: int) -> Iterator[Part]:
    """Yield the traffic that occurs once per step, and ZeRO's traffic for all micro-batches."""
    wide, shards = _sizes(settings)[0], settings.dp if settings.zero else 1
    units = _units(settings, parameters)
    lengths = [ceil(sum(p.numel for p in unit) / shards) for unit in units]  # of each unit's shard, padded
    if settings.dp > 1:
        sent = zero_traffic(settings.zero, shards * sum(lengths), settings.micro_batches)
        for kind, calls in zero_traffic(settings.zero, len(units), settings.micro_batches).items():
            what = "weights" if kind == "all_gather" else "gradients"
            yield Part(f"{what}, over replicas", kind, calls, wide * sent[kind], "dp")
    if settings.tp > 1 and settings.sequence_parallel:
        own = replica if settings.zero else 0
        between = sum(_replicated(unit, own * size, size) for unit, size in zip(units, lengths, strict=True))
        yield Part("gradients between the blocks", "all_reduce", int(between > 0), wide * between)
    for unit, size in zip(units, lengths, strict=True):
        for table in (p for p in unit if p.is_tied):
            numel = size if settings.zero else table.numel
            yield Part("gradient of the tied table", "all_reduce", 1, wide * numel, "pp")
    norms = {"tp": (settings.tp, ""), "pp": (settings.pp, ", all stages"), "dp": (shards, ", all replicas")}
    for group, (ranks, where) in norms.items():
        yield Part("gradient norm" + where, "all_reduce", int(ranks > 1), 8, group)


def _units(settings: Settings, parameters: Sequence[_Parameter]) -> list[list[_Parameter]]:
    """Return the units: parameters whose gradients are reduced together (layers with ZeRO-3, otherwise buckets).

    The buckets are those of `flat_parameters.in_buckets`. ZeRO never puts matrices and vectors in the same unit,
    because only matrices decay, and it gives a tied table a unit of its own.
    """
    zero, limit = settings.zero, BUCKET_BYTES // _sizes(settings)[0]  # elements
    found: dict[Any, list[list[_Parameter]]] = {}
    for parameter in parameters if zero == 3 else reversed(parameters):
        kind = (parameter.is_matrix, parameter.is_tied, parameter.layer if zero == 3 else 0) if zero else None
        buckets = found.setdefault(kind, [[]])
        filled = sum(p.numel for p in buckets[-1])
        if filled and filled + parameter.numel > limit and zero < 3:
            buckets.append([])
        buckets[-1].append(parameter)
    return [bucket for buckets in found.values() for bucket in buckets]


def _replicated(unit: Sequence[_Parameter], first: int, size: int) -> int:
    """Return how many elements in the slice [first : first + size] of a unit's vector aren't sharded over tp."""
    count, begin = 0, 0
    for parameter in unit:
        end = begin + parameter.numel
        if not parameter.sharded:
            count += max(0, min(end, first + size) - max(begin, first))
        begin = end
    return count


def _sizes(settings: Settings) -> tuple[int, int]:
    """Return the bytes per element outside matmuls, and per element of a matmul's output."""
    wide = 8 if settings.precision == "float64" else 4
    return wide, 2 if settings.precision == "bfloat16" else wide


def _parameters(settings: Settings, stage: int) -> list[_Parameter]:
    """Return this rank's parameters in the model's order. Q, K and V form one parameter, and so do gate and up."""
    config = replace(settings.model, vocab_size=pad_vocab_size(settings.vocab_size, settings.tp))
    is_last, tied = stage == settings.pp - 1, settings.pp > 1 and config.tied_embedding
    first = first_weights(config)
    if stage > 0:
        first = first[:1] if is_last and tied else []  # only the table
    weights: list[tuple[int | None, Weight]] = [(None, weight) for weight in first]
    weights += [(layer, w) for layer in range(settings.layers_of_stages[stage]) for w in layer_weights(config)]
    weights += [(None, weight) for weight in (last_weights(config) if is_last else [])]
    fused: dict[tuple[int | None, str], list[Weight]] = {}
    for layer, weight in weights:
        name = re.sub(r"\.[qkv]\.", ".qkv.", weight.name).replace(".gate.", ".up.")
        fused.setdefault((layer, name), []).append(weight)
    return [
        _Parameter(
            sum(weight.on_rank(settings.tp) for weight in own), own[0].cut is not None, layer,
            is_matrix=len(own[0].shape) > 1, is_tied=tied and name == "embedding",
        )
        for (layer, name), own in fused.items()
    ]  # fmt: skip
