"""The cases for exercises 8.1 to 8.4, with random logits [..., v] whose columns are split over the ranks.

The first case is plain, with 3 columns on each rank. In others, the logits are large, differ from rank to rank, or are
-inf, because real logits can be like that, too.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tplab.course.checks import GROUPS, Case, Place, Question, has_kind, random_tensor
from tplab.runtime import device


@dataclass(frozen=True)
class Logits(Case):
    """One kind of logits.

    shift:      number that is added to every logit
    spread:     how much higher the logits of the last rank are than those of the first rank
    climb:      how much higher the logits of the last token are than those of the first token
    padded:     whether the last columns are -inf: one column and, with several ranks, also all columns of the last rank
    transposed: whether the logits are non-contiguous in memory
    columns:    number of columns on each rank
    """

    note: str = ""
    leading: tuple[int, ...] = (8,)
    shift: float = 0.0
    spread: float = 0.0
    climb: float = 0.0
    padded: bool = False
    transposed: bool = False
    columns: int = 3

    def describe(self, name: str) -> str:
        return self.note


CASES = (
    Logits(),
    Logits("with logits [2, 4, v/p]", leading=(2, 4)),
    Logits("with logits [2, 4, v/p], not contiguous", leading=(2, 4), transposed=True),
    Logits("with logits of about 10000", shift=1e4),
    Logits("with logits from about -10000, in the first token, to 0, in the last", shift=-1e4, climb=1e4),
    Logits("with logits of about -2000 on the first rank and 2000 on the last", shift=-2e3, spread=4e3),
    Logits("with padding: the last columns hold -inf", padded=True),
    Logits("with logits of about -30000, and padding", shift=-3e4, padded=True),
    Logits("with a single column on each rank", columns=1),
    Logits("with logits [1, 8, v/p]", leading=(1, 8)),
    Logits(groups=GROUPS),
)


class Sample(NamedTuple):
    """The logits of all ranks in a group, and a target and an upstream gradient for each token."""

    logits: Tensor  # [..., v]
    target: Tensor  # [...]
    dy: Tensor  # [...]
    columns: int  # number of columns on each rank

    @property
    def shards(self) -> tuple[Tensor, ...]:
        """The logits on each rank, [..., v/p]."""
        return self.logits.split(self.columns, -1)

    @property
    def owner(self) -> Tensor:
        """The rank that holds each target's column, [...]."""
        return self.target // self.columns

    def column_on(self, rank: int) -> Tensor:
        """Return each target's position among a rank's columns [...], or 0 if another rank holds its column."""
        return torch.where(self.owner == rank, self.target % self.columns, 0)


def draw(case: Logits, generator: torch.Generator, size: int) -> Sample:
    columns = case.columns
    v = size * columns
    logits = 2 * random_tensor(generator, *case.leading, v) + case.shift
    if size > 1:
        logits = logits + case.spread * (torch.arange(v) // columns) / (size - 1)
    count = torch.Size(case.leading).numel()
    logits = logits + case.climb * torch.linspace(0, 1, count, dtype=logits.dtype).view(*case.leading, 1)
    real = v
    if case.padded:
        real = v - 1 if size == 1 else v - columns - 1
        logits[..., real:] = -torch.inf
    edges = [edge for rank in range(size) for edge in (rank * columns, (rank + 1) * columns - 1) if edge < real][:count]
    others = torch.randint(real, (count - len(edges),), generator=generator).tolist()
    order = torch.randperm(count, generator=generator)
    target = torch.tensor(edges + others)[order].view(case.leading)
    return Sample(logits, target, random_tensor(generator, *case.leading), columns)


def give(case: Logits, sample: Sample, place: Place) -> Sample:
    """Return the sample with only this rank's logits, [..., v/p]."""
    shard = place.part(sample.logits, -1)
    shard = shard.transpose(0, -1).contiguous().transpose(0, -1) if case.transposed else shard.clone()
    return sample._replace(logits=shard)


def on_device(given: Sample) -> Sample:
    logits, target, dy, columns = given
    return Sample(logits.to(device()), target.to(device()), dy.to(device()), columns)


WHOSE_GROUP = "Which collective, or which call for a rank or a size, was not given `group`?"
SHAPE = Question(
    has_kind("out", "shape"),
    "The result must have the same shape as the tokens, [..], even if one of the dimensions has length 1. Which of "
    "your lines adds or removes dimensions? (`squeeze()` without an argument removes every dimension of length 1.)",
)
