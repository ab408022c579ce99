"""Logits of which each rank has some columns: the cases of exercises 8.1 to 8.4, run and compared with one process.

Every case has random logits [.., v], cut by columns over p = 1, 2, 4 ranks and, at p = 4, over two groups of two ranks
with data of their own. Right is plain torch in float64 on the whole logits. The plain case comes first, alone: its
message is the clearest. The others are what real logits do: they are large, or differ from rank to rank, or are -inf.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tplab.course.checks import (
    GROUPS,
    IN_GROUPS,
    WORLD_SIZES,
    Question,
    ask_about_group,
    by_name,
    fresh_generator,
    group_question,
    member_of,
    random_tensor,
    run_cases,
    verify,
)

COLUMNS = 3  # of each rank


@dataclass(frozen=True)
class Case:
    """One kind of logits.

    shift:      added to every logit
    spread:     the ranks' logits lie this far apart: the first rank's lowest, the last rank's highest
    climb:      so do the tokens'
    padded:     the last columns hold -inf: one of them, and with several ranks all columns of the last one
    transposed: not contiguous in memory
    """

    note: str
    leading: tuple[int, ...] = (8,)
    shift: float = 0.0
    spread: float = 0.0
    climb: float = 0.0
    padded: bool = False
    transposed: bool = False
    groups: tuple[tuple[int, ...], ...] | None = None


CASES = (
    Case(""),
    Case("with logits [2, 4, v/p], not contiguous", leading=(2, 4), transposed=True),
    Case("with logits of about 10000", shift=1e4),
    Case("with logits from about -10000, in the first token, to 0, in the last", shift=-1e4, climb=1e4),
    Case("with logits of about -2000 on the first rank and 2000 on the last", shift=-2e3, spread=4e3),
    Case("with padding: the last columns hold -inf", padded=True),
    Case(IN_GROUPS, groups=GROUPS),
)


@dataclass(frozen=True)
class Sample:
    """Whole logits [.., v], a target and an upstream gradient for each token [..], for a group of q ranks."""

    case: Case
    q: int
    logits: Tensor
    target: Tensor
    dy: Tensor

    @property
    def shards(self) -> tuple[Tensor, ...]:
        return self.logits.chunk(self.q, -1)

    def mine(self, whole: Tensor, index: int) -> Tensor:
        return whole.chunk(self.q, -1)[index]

    def owner(self) -> Tensor:
        """Which rank has the target's column, [..]."""
        return self.target // COLUMNS

    def picked(self, index: int) -> Tensor:
        """The logit that a rank finds for the target if it takes its column 0 where another rank has it, [..]."""
        column = torch.where(self.owner() == index, self.target % COLUMNS, 0)
        return self.shards[index].gather(-1, column.unsqueeze(-1)).squeeze(-1)


def sample(case: Case, q: int, generator: torch.Generator) -> Sample:
    v = q * COLUMNS
    logits = 2 * random_tensor(generator, *case.leading, v) + case.shift
    if q > 1:
        logits = logits + case.spread * (torch.arange(v) // COLUMNS) / (q - 1)
    count = torch.Size(case.leading).numel()
    logits = logits + case.climb * torch.linspace(0, 1, count, dtype=logits.dtype).view(*case.leading, 1)
    real = v
    if case.padded:
        real = v - 1 if q == 1 else v - COLUMNS - 1
        logits[..., real:] = -torch.inf
    borders = [edge for rank in range(q) for edge in (rank * COLUMNS, (rank + 1) * COLUMNS - 1) if edge < real][:count]
    others = torch.randint(real, (count - len(borders),), generator=generator).tolist()
    order = torch.randperm(count, generator=generator)
    target = torch.tensor(borders + others)[order].view(case.leading)
    return Sample(case, q, logits, target, random_tensor(generator, *case.leading))


def laid_out(tensor: Tensor, case: Case) -> Tensor:
    return tensor.transpose(0, -1).contiguous().transpose(0, -1) if case.transposed else tensor.clone()


Expect = Callable[[Sample, int, int, tuple[int, ...]], tuple[dict[str, Any], Mapping[str, Mapping[str, Any]]]]


def check_cases(
    number: str,
    answer: Any,
    program: Callable[..., Any],
    expect: Expect,
    questions: Sequence[Question],
    *,
    crash: str,
    stuck: str | None = None,
    without: str = "",
) -> None:
    """Run every case on p = 1, 2, 4 ranks; fail with the first that is wrong.

    program: (answer, cases, data) -> what each case gave on this rank; data[case][rank] is (logits, target, dy)
    expect:  (sample, index in the group, p, ranks of the group) -> what is right there, and what known mistakes give
    crash:   what to ask where the answer raises
    without: notes with these words are left out
    """
    for p in WORLD_SIZES:
        generator = fresh_generator()
        here = [case for case in CASES if (case.groups is None or p == 4) and not (without and without in case.note)]
        for batch in (here[:1], here[1:]):
            data: list[list[Any]] = []
            wanted: list[list[Any]] = []
            for case in batch:
                members = member_of(p, case.groups)
                samples = [sample(case, len(members[0][1]), generator) for _ in case.groups or (0,)]
                data.append([])
                wanted.append([])
                for rank, (i, ranks) in enumerate(members):
                    mine, index = samples[i], ranks.index(rank)
                    data[-1].append((laid_out(mine.shards[index], case), mine.target, mine.dy))
                    wanted[-1].append(expect(mine, index, p, ranks))
            runs = run_cases(
                program,
                p,
                answer,
                batch,
                data,
                note=lambda case: case.note,
                question=lambda case: ask_about_group(WHOSE_GROUP) if case.groups else crash,
                stuck=lambda case: ask_about_group(WHOSE_GROUP) if case.groups else stuck,
            )
            for case, rows, seen in zip(batch, wanted, runs, strict=True):
                verify(
                    number,
                    p,
                    seen,
                    [right for right, _ in rows],
                    questions=[group_question(WHOSE_GROUP), *questions] if case.groups else questions,
                    lookalikes=by_name([alike for _, alike in rows]),
                    note=case.note,
                )


WHOSE_GROUP = "Which collective, or which call for a rank or a size, was not given `group`?"
