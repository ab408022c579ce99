"""Helpers for chapter 07's checks: a vocabulary, the rows of its table on a rank, and ids that expose mistakes.

The reference runs plain PyTorch in float64 in a single process. It indexes the full table and sums the table's gradient
row by row.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from tplab.course.checks.cases import random_tensor

VOCAB, HIDDEN = 22, 4


def rows_per_rank(q: int, multiple: int = 1) -> int:
    """Return the number of rows on each of q ranks, found by counting up to the next size that's divisible."""
    rows = VOCAB
    while rows % (q * multiple):
        rows += 1
    return rows // q


def padded(whole: Tensor, q: int, multiple: int = 1) -> Tensor:
    """Append rows of zeros to the table [v, h] until all q ranks have the same number of rows."""
    return F.pad(whole, (0, 0, 0, q * rows_per_rank(q, multiple) - len(whole)))


def part(whole: Tensor, index: int, q: int, multiple: int = 1) -> Tensor:
    """Return the shard of rank `index` out of q ranks, which consists of its rows of the padded table."""
    rows = rows_per_rank(q, multiple)
    return padded(whole, q, multiple)[index * rows : (index + 1) * rows]


def random_table(generator: torch.Generator) -> Tensor:
    return random_tensor(generator, VOCAB, HIDDEN)


def inner_ids(generator: torch.Generator, q: int, shape: tuple[int, int]) -> Tensor:
    """Draw ids from every rank, but never those of the first and the last row of a shard."""
    rows = rows_per_rank(q)
    inner = [i for i in range(VOCAB - 1) if i % rows not in (0, rows - 1)]
    return _with_one_of_each(generator, inner, [rank * rows + 1 for rank in range(q)], shape)


def border_ids(generator: torch.Generator, q: int, shape: tuple[int, int]) -> Tensor:
    """Draw the first and the last id of every rank in random order, some of them more than once."""
    rows = rows_per_rank(q)
    borders = sorted({i for rank in range(q) for i in (rank * rows, min((rank + 1) * rows, VOCAB) - 1)})
    return _with_one_of_each(generator, borders, borders, shape)


def last_ranks_ids(generator: torch.Generator, q: int, shape: tuple[int, int]) -> Tensor:
    """Draw ids whose rows are all on the last rank, as a flat tensor."""
    low = (q - 1) * rows_per_rank(q)
    return torch.randint(low, VOCAB, (shape[0] * shape[1],), generator=generator)


def _with_one_of_each(
    generator: torch.Generator, choices: Sequence[int], wanted: Sequence[int], shape: tuple[int, int]
) -> Tensor:
    count = shape[0] * shape[1]
    drawn = torch.tensor(choices)[torch.randint(len(choices), (count,), generator=generator)]
    drawn[: len(wanted)] = torch.tensor(wanted)
    return drawn[torch.randperm(count, generator=generator)].view(shape)


def gradient(ids: Tensor, dy: Tensor, padding_idx: int | None = None) -> Tensor:
    """Return the gradient of the full table [v, h], given the gradient dy [..., h] of the vectors for `ids` [...]."""
    total = torch.zeros(VOCAB, HIDDEN, dtype=dy.dtype)
    for number, row in zip(ids.reshape(-1).tolist(), dy.reshape(-1, HIDDEN), strict=True):
        if number != padding_idx:
            total[number] += row
    return total
