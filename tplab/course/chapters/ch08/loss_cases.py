"""The cases of exercise 8.5: logits with padding, targets to ignore; what is right, and what known mistakes give."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tplab.course.chapters.ch08.whole_loss_questions import (
    AGAIN,
    ALL_TOKENS,
    IGNORED_COUNT,
    LOCAL_MEAN,
    LOCAL_SIZE,
    NOT_IGNORED,
    ONLY_MINUS_100,
    OTHERS,
    PADDED_SIZE,
    PADDING,
    PADDING_SMOOTHED,
    PADDING_ZERO,
    PER_TOKEN,
    SIGN,
    SUM,
    UNSMOOTHED,
)
from tplab.course.checks import GROUPS, IN_GROUPS, random_tensor

COLUMNS, LEADING = 6, (3, 7)


@dataclass(frozen=True)
class Case:
    """vocab_size: v minus `padding`; with `rank_of_padding` the last rank, of several, has nothing else."""

    padding: int = 0
    rank_of_padding: bool = False
    ignored: int = 0
    ignore_index: int = -100
    smoothing: float = 0.0
    shift: float = 0.0
    groups: tuple[tuple[int, ...], ...] | None = None

    def vocab_size(self, q: int) -> int:
        return q * COLUMNS - self.padding - (COLUMNS if self.rank_of_padding and q > 1 else 0)

    def options(self) -> dict[str, Any]:
        named = {"ignore_index": (self.ignore_index, -100), "label_smoothing": (self.smoothing, 0.0)}
        return {name: value for name, (value, default) in named.items() if value != default}

    def note(self) -> str:
        options = "".join(f", {name}={value}" for name, value in self.options().items())
        extras = [
            f"{self.ignored} tokens to ignore" if self.ignored else "",
            "padded columns" if self.padding or self.rank_of_padding else "",
            f"logits of about {self.shift:.0f}" if self.shift else "",
            IN_GROUPS if self.groups else "",
        ]
        return ", ".join([f"vocab_parallel_loss(logits, target{options})", *filter(None, extras)])


CASES = (
    Case(),
    Case(ignored=5),
    Case(padding=2),
    Case(padding=1, rank_of_padding=True),
    Case(smoothing=0.25),
    Case(padding=2, ignored=4, ignore_index=1, smoothing=0.125),
    Case(padding=1, rank_of_padding=True, ignored=2, smoothing=0.5, shift=1e4),
    Case(padding=2, ignored=3, smoothing=0.25, groups=GROUPS),
)


@dataclass(frozen=True)
class Sample:
    case: Case
    q: int
    logits: Tensor  # [3, 7, v]
    target: Tensor  # [3, 7]

    @property
    def vocab_size(self) -> int:
        return self.case.vocab_size(self.q)

    def loss(self, logits: Tensor, **changes: Any) -> Tensor:
        options = {"ignore_index": self.case.ignore_index, "label_smoothing": self.case.smoothing} | changes
        return F.cross_entropy(logits.flatten(0, -2), self.target.flatten(), **options)


def sample(case: Case, q: int, generator: torch.Generator) -> Sample:
    logits = 2 * random_tensor(generator, *LEADING, q * COLUMNS) + case.shift
    logits[..., case.vocab_size(q) :] += 3  # padding must not be small by chance
    target = torch.randint(case.vocab_size(q), LEADING, generator=generator)
    if case.ignore_index >= 0:
        target[target == case.ignore_index] = case.vocab_size(q) - 1
    places = torch.randperm(target.numel(), generator=generator)[: case.ignored]
    target.view(-1)[places] = case.ignore_index
    return Sample(case, q, logits, target)


def expect(s: Sample, index: int, dy: Tensor) -> tuple[dict[str, Any], Mapping[str, Any]]:
    leaf = s.logits.clone().requires_grad_()
    right = s.loss(leaf[..., : s.vocab_size])
    (gradient,) = torch.autograd.grad(right, leaf, dy)
    value, real, epsilon = right.detach(), s.logits[..., : s.vocab_size], s.case.smoothing
    counted = s.target != s.case.ignore_index
    n, count = s.target.numel(), int(counted.sum())
    plain = s.loss(real, label_smoothing=0.0)
    alike = {SUM: value * count, PER_TOKEN: s.loss(real, reduction="none").view(s.target.shape)}
    if s.q > 1:
        alike[AGAIN] = value * s.q
    if count < n:
        as_zero = s.target.masked_fill(~counted, 0).flatten()
        alike |= {
            ALL_TOKENS: value * count / n,
            NOT_IGNORED: F.cross_entropy(real.flatten(0, -2), as_zero, label_smoothing=epsilon),
            IGNORED_COUNT: F.cross_entropy(real.flatten(0, -2), as_zero, label_smoothing=epsilon, reduction="sum")
            / count,
        }
        if s.case.ignore_index >= 0:
            alike |= {ONLY_MINUS_100: s.loss(real, ignore_index=-100)}
    if s.logits.shape[-1] > s.vocab_size:
        zeros = s.logits.clone()
        zeros[..., s.vocab_size :] = 0
        alike |= {PADDING: s.loss(s.logits), PADDING_ZERO: s.loss(zeros)}
    if epsilon:
        lse, total = real.logsumexp(-1)[counted], real.sum(-1)[counted]
        picked = lse - s.loss(real, label_smoothing=0.0, reduction="none").view(s.target.shape)[counted]
        columns = slice(index * COLUMNS, min((index + 1) * COLUMNS, s.vocab_size))
        mine = s.logits[..., columns][counted]

        def smoothed(mean: Tensor, part: float = epsilon) -> Tensor:
            return (lse - (1 - part) * picked - part * mean).mean()

        k = s.vocab_size
        alike |= {
            UNSMOOTHED: plain,
            OTHERS: smoothed((total - picked) / (k - 1)),
            PADDED_SIZE: smoothed(total / s.logits.shape[-1]),
            LOCAL_SIZE: smoothed(total / COLUMNS),
            PADDING_SMOOTHED: smoothed(s.logits.sum(-1)[counted] / k),
            SIGN: smoothed(total / k, -epsilon),
        }
        if mine.shape[-1]:
            alike[LOCAL_MEAN] = smoothed(mine.mean(-1))
        else:
            alike[LOCAL_MEAN] = smoothed(mine.sum(-1))
    expected = {"out": value, "dlogits": gradient.chunk(s.q, -1)[index]}
    return expected, {"out": alike}
