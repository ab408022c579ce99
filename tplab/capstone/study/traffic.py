"""Predict the traffic of one training step: calls and bytes of every collective that one rank enters.

With n = b s tokens per micro-batch, L layers, hidden size h, tp ranks that share a model, and e bytes per element of a
matmul's output (4, or 2 in bfloat16 autocast), a micro-batch sends over tp

    embedding            forward    all-reduce [n, h], 4 bytes per element, because lookups are in float32
    layers               forward    2 L all-reduces [n, h], e bytes per element
                         backward   2 L all-reduces [n, h], e bytes per element; 4 without async_grad_allreduce, because
                                    autograd casts the gradient back before the all-reduce
    output layer         backward   all-reduce [n, h], e bytes per element
    loss                 forward    2 all-reduces per block of tokens: n maxima of e bytes, and n sums and one value per
                                    block of 4 bytes

With sequence parallelism, each all-reduce [n, h] becomes an all-gather and a reduce-scatter of the same size, because
the recorder counts the full [n, h] for both. Once per step, the gradients of parameters between the blocks are
all-reduced. recompute="layers" repeats the forward of each layer up to its last matmul. Backward needs nothing after
that matmul, so the last all-reduce isn't repeated unless dropout comes after it.

Once per step over dp: the gradients of this rank's parameters, 4 bytes each, in buckets. Over tp: the sum for the norm.
A dimension with one rank has no traffic. (In float64: 8 bytes instead of 4 and of e.)
`tests/capstone/study/test_traffic.py` compares this with the trace of real steps, to the byte.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import ceil

from tplab.capstone.settings.settings import Settings
from tplab.data.flat_parameters import BUCKET_BYTES
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


def step_parts(settings: Settings, vocab_size: int | None = None) -> list[Part]:
    """Return the traffic of one rank in one training step, in the order of the step.

    vocab_size    size of the tokenizer, which may be smaller than in the settings (None: as in the settings)
    """
    vocab_size = settings.vocab_size if vocab_size is None else vocab_size
    parts = list(_micro_batch(settings, vocab_size)) if settings.tp > 1 else []
    parts = [Part(p.name, p.kind, settings.micro_batches * p.calls, settings.micro_batches * p.bytes) for p in parts]
    parts += _once(settings, vocab_size)
    return [part for part in parts if part.calls]


def step_bytes(settings: Settings, vocab_size: int | None = None) -> dict[str, Total]:
    """Return the calls and bytes of one rank in one training step by collective, in the form of `Record.totals`."""
    return totals(step_parts(settings, vocab_size))


def totals(parts: Iterable[Part]) -> dict[str, Total]:
    """Add up the calls and bytes of parts by collective."""
    found: dict[str, Total] = {}
    for part in parts:
        calls, size = found.get(part.kind, Total(0, 0))
        found[part.kind] = Total(calls + part.calls, size + part.bytes)
    return found


def _micro_batch(settings: Settings, vocab_size: int) -> Iterator[Part]:
    """Yield the traffic over tp in the forward and backward of one micro-batch."""
    layers, tokens = settings.num_layers, settings.micro_batch_size * settings.seq_length
    wide, narrow = _sizes(settings)
    whole = tokens * settings.hidden_size  # [n, h]
    overlapped = settings.async_grad_allreduce and not settings.compile
    entering = narrow if overlapped else wide  # f, or the gather before a column-parallel layer
    again = settings.recompute == "layers"
    if settings.sequence_parallel:
        # each block has a gather before it and a reduce-scatter after it; in backward, they trade places
        gathers, scatters = 2 * layers, 2 * layers
        yield Part("embedding, forward", "reduce_scatter", 1, whole * wide)
        yield Part("layers, forward", "all_gather", gathers, gathers * whole * entering)
        yield Part("layers, forward", "reduce_scatter", scatters, scatters * whole * narrow)
        yield Part("output layer, forward", "all_gather", 1, whole * wide)
    else:
        yield Part("embedding, forward", "all_reduce", 1, whole * wide)
        yield Part("layers, forward", "all_reduce", 2 * layers, 2 * layers * whole * narrow)
    columns = pad_vocab_size(vocab_size, settings.tp) // settings.tp
    yield from _loss(tokens, columns, wide, narrow)
    if settings.sequence_parallel:
        yield Part("output layer, backward", "reduce_scatter", 1, whole * wide)
        if again:
            sums = (2 if settings.dropout else 1) * layers
            yield Part("layers, computed again", "all_gather", gathers, gathers * whole * entering)
            yield Part("layers, computed again", "reduce_scatter", sums, sums * whole * narrow)
        yield Part("layers, backward", "all_gather", scatters, scatters * whole * narrow)
        yield Part("layers, backward", "reduce_scatter", gathers, gathers * whole * entering)
        yield Part("embedding, backward", "all_gather", 1, whole * wide)
    else:
        yield Part("output layer, backward", "all_reduce", 1, whole * narrow)
        if again:
            sums = (2 if settings.dropout else 1) * layers
            yield Part("layers, computed again", "all_reduce", sums, sums * whole * narrow)
        yield Part("layers, backward", "all_reduce", 2 * layers, 2 * layers * whole * entering)


def _loss(tokens: int, columns: int, wide: int, narrow: int) -> Iterator[Part]:
    """Yield the loss's traffic: maxima in the logits' dtype, sums in at least float32, and one more value per block."""
    blocks = ceil(tokens / default_tokens_at_once(columns))
    yield Part("loss", "all_reduce", 2 * blocks, tokens * narrow + (tokens + blocks) * wide)


def _once(settings: Settings, vocab_size: int) -> Iterator[Part]:
    """Yield the traffic that occurs once per step, regardless of the number of micro-batches."""
    parameters, (wide, _) = _parameters(settings, vocab_size), _sizes(settings)
    if settings.tp > 1 and settings.sequence_parallel:
        between = sum(numbers for numbers, cut in parameters if not cut)
        yield Part("gradients between the blocks", "all_reduce", 1, wide * between)
    if settings.dp > 1:
        sizes = [wide * numbers for numbers, _ in parameters]
        yield Part("gradients, over replicas", "all_reduce", _buckets(sizes), sum(sizes))
    if settings.tp > 1:
        yield Part("length of the gradient", "all_reduce", 1, 8)


def _sizes(settings: Settings) -> tuple[int, int]:
    """Return the bytes per element outside matmuls, and per element of a matmul's output."""
    wide = 8 if settings.precision == "float64" else 4
    return wide, 2 if settings.precision == "bfloat16" else wide


def _parameters(settings: Settings, vocab_size: int) -> list[tuple[int, bool]]:
    """Return (elements on this rank, sharded over tp) for every parameter, in the order of the model."""
    h, p = settings.hidden_size, settings.tp
    layer = [
        (h, False), (h, False), (3 * h * h // p, True), (3 * h // p, True), (h * h // p, True), (h, False),
        (h, False), (h, False), (4 * h * h // p, True), (4 * h // p, True), (4 * h * h // p, True), (h, False),
    ]  # fmt: skip
    first = [(pad_vocab_size(vocab_size, p) // p * h, True), (settings.seq_length * h, False)]
    return [*first, *layer * settings.num_layers, (h, False), (h, False)]


def _buckets(sizes: list[int]) -> int:
    """Return the number of buckets that `flat_parameters.in_buckets` makes, from the last parameter to the first."""
    buckets, filled = 0, 0
    for size in reversed(sizes):
        if not buckets or filled + size > BUCKET_BYTES:
            buckets, filled = buckets + 1, 0
        filled += size
    return buckets
