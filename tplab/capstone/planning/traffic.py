"""Predict the traffic of one training step: calls and bytes of every collective and message that one rank enters.

With n = b s tokens per micro-batch, L layers on the rank's stage, hidden size h, tp ranks that share a model, and e
bytes per element of a matmul's output (4, or 2 in bfloat16 autocast), a micro-batch sends over tp

    embedding            forward    all-reduce [n, h], 4 bytes per element, because lookups are in float32
    layers               forward    2 L all-reduces [n, h], e bytes per element
                         backward   2 L all-reduces [n, h], e bytes per element; 4 without async_grad_allreduce, because
                                    autograd casts the gradient back before the all-reduce
    output layer         backward   all-reduce [n, h], e bytes per element
    loss                 forward    2 all-reduces per block of tokens: n maxima of e bytes, and n sums and one value per
                                    block of 4 bytes. In a pipeline, all tokens are one block

With sequence parallelism, each all-reduce [n, h] becomes an all-gather and a reduce-scatter of the same size, because
the recorder counts the full [n, h] for both. Once per step, the gradients of parameters between the blocks are
all-reduced. recompute="layers" repeats the forward of each layer up to its last matmul. Backward needs nothing after
that matmul, so the last all-reduce isn't repeated unless dropout comes after it.

Over pp, a stage sends its output [n, h] (its part of it with sequence parallelism) and receives a gradient of that
size, and the other way around at its other end. The first and the last stage sum the gradient of a tied table.

Once per step over dp: the gradients of this rank's parameters, 4 bytes each, in buckets. ZeRO-1 replaces this
all-reduce by a reduce-scatter, and an all-gather of the weights. ZeRO-2 and 3 reduce-scatter for each micro-batch, and
ZeRO-3 gathers for each micro-batch twice. Their vectors are padded to a multiple of dp. The norm is a sum over tp, over
pp, and with ZeRO over dp. A dimension with one rank has no traffic. (In float64: 8 bytes instead of 4 and of e.)
`tests/capstone/planning/test_traffic.py` compares this with the trace of real steps, to the byte.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

from tplab.capstone.settings.settings import Settings
from tplab.data.flat_parameters import BUCKET_BYTES
from tplab.memory.config import GPTConfig, Weight, first_weights, last_weights, layer_weights
from tplab.runtime import Total
from tplab.tensor.embedding import pad_vocab_size
from tplab.tensor.linear_cross_entropy import default_tokens_at_once


@dataclass(frozen=True)
class Part:
    """The calls of one collective for one purpose, and the total bytes of their messages."""

    name: str
    kind: str
    calls: int
    bytes: int


def step_parts(settings: Settings, vocab_size: int | None = None, stage: int = 0, replica: int = 0) -> list[Part]:
    """Return the traffic of one rank in one training step, in the order of the step.

    vocab_size    size of the tokenizer, which may be smaller than in the settings (None: as in the settings)
    stage         of the pipeline
    replica       with ZeRO and sequence parallelism, replicas have different numbers of norms in their shards
    """
    config = settings.model if vocab_size is None else replace(settings.model, vocab_size=vocab_size)
    parts = [*_messages(settings, stage), *(_micro_batch(settings, config, stage) if settings.tp > 1 else ())]
    parts = [Part(p.name, p.kind, settings.micro_batches * p.calls, settings.micro_batches * p.bytes) for p in parts]
    parts += _once(settings, _parameters(settings, config, stage), replica)
    return [part for part in parts if part.calls]


def step_bytes(settings: Settings, vocab_size: int | None = None, stage: int = 0, replica: int = 0) -> dict[str, Total]:
    """Return the calls and bytes of one rank in one training step by collective, in the form of `Record.totals`."""
    return totals(step_parts(settings, vocab_size, stage, replica))


def gathered_at_once(settings: Settings, stage: int = 0) -> int:
    """Return how many parameters ZeRO-3 gathers at a time: those of a layer, and of what lies outside of the layers."""
    return sum(p.numel for p in _parameters(settings, settings.model, stage) if p.unit in (-1, 0))


def totals(parts: Iterable[Part]) -> dict[str, Total]:
    """Add up the calls and bytes of parts by collective."""
    found: dict[str, Total] = {}
    for part in parts:
        calls, size = found.get(part.kind, Total(0, 0))
        found[part.kind] = Total(calls + part.calls, size + part.bytes)
    return found


def _messages(settings: Settings, stage: int) -> Iterator[Part]:
    """Yield the messages between this stage and its neighbors for one micro-batch."""
    tokens = settings.micro_batch_size * settings.seq_length // (settings.tp if settings.sequence_parallel else 1)
    size = tokens * settings.hidden_size * _sizes(settings)[0]
    borders = (stage > 0) + (stage < settings.pp - 1)
    yield Part("between stages", "send", borders, borders * size)
    yield Part("between stages", "recv", borders, borders * size)


def _micro_batch(settings: Settings, config: GPTConfig, stage: int) -> Iterator[Part]:
    """Yield the traffic over tp in the forward and backward of one micro-batch."""
    layers, tokens = settings.layers_of_stages[stage], settings.micro_batch_size * settings.seq_length
    wide, narrow = _sizes(settings)
    whole = tokens * settings.hidden_size  # [n, h]
    entering = narrow if settings.async_grad_allreduce and not settings.compile else wide  # f, or the gather before it
    leaving = narrow if settings.async_grad_allreduce else wide  # the same for a pipeline's logits
    cut, pipelined = settings.sequence_parallel, settings.pp > 1
    sums = (2 if settings.dropout else 1) * layers if settings.recompute == "layers" else 0
    if stage == 0:
        yield Part("embedding, forward", "reduce_scatter" if cut else "all_reduce", 1, whole * wide)
    yield from _layers("layers, forward", cut, 2 * layers, whole * entering, 2 * layers, whole * narrow)
    if stage == settings.pp - 1:
        if cut:
            yield Part("output layer, forward", "all_gather", 1, whole * (leaving if pipelined else wide))
        columns = pad_vocab_size(config.vocab_size, settings.tp) // settings.tp
        # The loss: maxima in the logits' dtype, sums in at least float32, and one more value per block of tokens
        blocks = 1 if pipelined else ceil(tokens / default_tokens_at_once(columns))
        yield Part("loss", "all_reduce", 2 * blocks, tokens * narrow + (tokens + blocks) * wide)
        kind, size = ("reduce_scatter", wide) if cut else ("all_reduce", narrow)
        yield Part("output layer, backward", kind, 1, whole * (leaving if pipelined else size))
    if sums:
        yield from _layers("layers, recomputed", cut, 2 * layers, whole * entering, sums, whole * narrow)
    # in backward, gathers and reduce-scatters trade places
    if cut:
        yield from _layers("layers, backward", cut, 2 * layers, whole * narrow, 2 * layers, whole * entering)
    else:
        yield Part("layers, backward", "all_reduce", 2 * layers, 2 * layers * whole * entering)
    if cut and stage == 0:
        yield Part("embedding, backward", "all_gather", 1, whole * wide)


def _layers(name: str, cut: bool, gathers: int, gathered: int, sums: int, summed: int) -> Iterator[Part]:
    """Yield the collectives of layers: gathers before the blocks if the sequence is `cut`, and sums after them."""
    if cut:
        yield Part(name, "all_gather", gathers, gathers * gathered)
    yield Part(name, "reduce_scatter" if cut else "all_reduce", sums, sums * summed)


@dataclass(frozen=True)
class _Parameter:
    """A parameter on this rank: its elements, whether it is sharded over tp and a matrix, and the unit it belongs to.

    unit    the number of its layer, or -1
    """

    numel: int
    sharded: bool
    matrix: bool
    unit: int = -1
    tied: bool = False


def _once(settings: Settings, parameters: Sequence[_Parameter], replica: int) -> Iterator[Part]:
    """Yield the traffic that occurs once per step, and that of ZeRO."""
    wide, m, dp = _sizes(settings)[0], settings.micro_batches, settings.dp
    units = _units(settings, parameters)
    padded = [_padded(unit, dp if settings.zero else 1) for unit in units]
    vectors = wide * sum(padded)
    if settings.zero == 3:
        yield Part("weights, over replicas", "all_gather", 2 * m * len(units), 2 * m * vectors)
    if settings.zero:
        times = m if settings.zero > 1 else 1
        yield Part("gradients, over replicas", "reduce_scatter", times * len(units), times * vectors)
    elif dp > 1:
        yield Part("gradients, over replicas", "all_reduce", len(units), vectors)
    if settings.tp > 1 and settings.sequence_parallel:
        shards, own = (dp, replica) if settings.zero else (1, 0)
        between = sum(numel for unit in units for p, numel in _shard(unit, shards, own) if not p.sharded)
        yield Part("gradients between the blocks", "all_reduce", int(between > 0), wide * between)
    for unit, size in zip(units, padded, strict=True):
        if settings.pp > 1 and any(p.tied for p in unit):
            table = size // dp if settings.zero else next(p.numel for p in unit if p.tied)
            yield Part("gradient of the tied table", "all_reduce", 1, wide * table)
    groups = (settings.tp > 1) + (settings.pp > 1) + bool(settings.zero)
    yield Part("gradient norm", "all_reduce", groups, 8 * groups)
    if settings.zero in (1, 2):
        yield Part("weights, over replicas", "all_gather", len(units), vectors)


def _units(settings: Settings, parameters: Sequence[_Parameter]) -> list[list[_Parameter]]:
    """Return the parameters whose gradients are reduced together: buckets, or with ZeRO-3 those of a layer.

    ZeRO keeps matrices, which decay, apart from vectors, and gives a tied table a unit of its own.
    """
    if settings.zero == 3:
        kinds = [(p.unit, p.matrix, p.tied) for p in parameters]
        return [[p for p, own in zip(parameters, kinds, strict=True) if own == kind] for kind in dict.fromkeys(kinds)]
    size = _sizes(settings)[0]
    if not settings.zero:
        return _buckets(parameters, size, separate=False)
    matrices, vectors = ([p for p in parameters if p.matrix == matrix] for matrix in (True, False))
    return _buckets(matrices, size, separate=True) + _buckets(vectors, size, separate=True)


def _buckets(parameters: Sequence[_Parameter], size: int, separate: bool) -> list[list[_Parameter]]:
    """Return the buckets that `flat_parameters.in_buckets` makes, from the last parameter to the first."""
    alone = [[p] for p in parameters if separate and p.tied]
    buckets: list[list[_Parameter]] = []
    for parameter in reversed([p for p in parameters if not (separate and p.tied)]):
        if not buckets or size * (sum(p.numel for p in buckets[-1]) + parameter.numel) > BUCKET_BYTES:
            buckets.append([])
        buckets[-1].append(parameter)
    return buckets + alone


def _padded(unit: Sequence[_Parameter], dp: int) -> int:
    return -(-sum(p.numel for p in unit) // dp) * dp


def _shard(unit: Sequence[_Parameter], shards: int, own: int) -> Iterator[tuple[_Parameter, int]]:
    """Yield the parameters of a unit, and how many of their elements the shard number `own` has."""
    size, begin = _padded(unit, shards) // shards, 0
    for parameter in unit:
        end = begin + parameter.numel
        yield parameter, max(0, min(end, (own + 1) * size) - max(begin, own * size))
        begin = end


def _sizes(settings: Settings) -> tuple[int, int]:
    """Return the bytes per element outside matmuls, and per element of a matmul's output."""
    wide = 8 if settings.precision == "float64" else 4
    return wide, 2 if settings.precision == "bfloat16" else wide


def _parameters(settings: Settings, config: GPTConfig, stage: int) -> list[_Parameter]:
    """Return the parameters on this rank, in the order of the model. Q, K and V are one, and so are gate and up."""
    tp, last = settings.tp, settings.pp - 1
    config = replace(config, vocab_size=pad_vocab_size(config.vocab_size, tp))
    tied = settings.pp > 1 and config.tied_embedding

    def those(weights: Iterable[Weight], unit: int = -1) -> Iterator[_Parameter]:
        fused: dict[str, list[Weight]] = {}
        for weight in weights:
            name = re.sub(r"\.(q|k|v)\.", ".qkv.", weight.name).replace(".gate.", ".up.")
            fused.setdefault(name, []).append(weight)
        for name, own in fused.items():
            numel, matrix = sum(weight.on_rank(tp) for weight in own), len(own[0].shape) > 1
            yield _Parameter(numel, own[0].cut is not None, matrix, unit, tied and name == "embedding")

    found = list(those(first_weights(config))) if stage == 0 else []
    if stage == last > 0 and tied:
        found += those([weight for weight in first_weights(config) if weight.name == "embedding"])
    for number in range(settings.layers_of_stages[stage]):
        found += those(layer_weights(config), number)
    return found + (list(those(last_weights(config))) if stage == last else [])
