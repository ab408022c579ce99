"""Chapter 13: stages to try a schedule with, one that learns and one that only takes its time.

ByteStage(0, 2), ByteStage(1, 2)     a small model that predicts the next byte of a text, in two parts
timed(run_stage, lists)              when a real rank works on which action, if each action is a pause
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tplab.common import corpus
from tplab.pipeline.p2p import Channels
from tplab.pipeline.schedule_order import DURATIONS, Span
from tplab.pipeline.schedules import Action
from tplab.runtime import device

CONTEXT, HIDDEN, BLOCKS = 8, 128, 4


class Block(nn.Module):
    """A residual block x + MLP(norm(x)), from [b, h] to [b, h]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))  # [b, h]


class ByteStage(nn.Module):
    """One of `stages` equal parts of a model that reads 8 bytes and predicts the next one.

    The first stage takes ids [b, 8], the last stage returns logits [b, 256], and [b, h] goes from stage to stage. The
    parameters have the same names as in the full model, `ByteStage()`.
    """

    def __init__(self, number: int = 0, stages: int = 1) -> None:
        super().__init__()
        each = BLOCKS // stages
        self.embedding = nn.Embedding(corpus.VOCABULARY, HIDDEN // CONTEXT) if number == 0 else None
        self.blocks = nn.ModuleDict({str(i): Block() for i in range(number * each, (number + 1) * each)})
        self.head = nn.Linear(HIDDEN, corpus.VOCABULARY) if number == stages - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x).flatten(1)  # [b, 8] -> [b, h]
        for block in self.blocks.values():
            x = block(x)  # [b, h]
        return x if self.head is None else self.head(x)  # [b, h], or [b, 256]


class _Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stage: "PausingStage") -> Tensor:
        ctx.stage = stage
        stage.pause("F")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        ctx.stage.pause("B")
        return dy, None


class PausingStage(nn.Module):
    """A stage that only takes its time, so that ranks that share a core don't slow each other down.

    unit     the seconds that a forward pass takes. A backward pass takes twice as long
    times    when each action started and ended, by kind
    """

    def __init__(self, unit: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), device=device()))
        self.unit, self.times = unit, {"F": list[tuple[float, float]](), "B": list[tuple[float, float]]()}

    def pause(self, kind: str) -> None:
        start = time.monotonic()
        time.sleep(self.unit * DURATIONS[kind])
        self.times[kind].append((start, time.monotonic()))

    def forward(self, x: Tensor) -> Tensor:
        return _Pause.apply(x + self.weight, self)


def timed(run_stage: Callable[..., Any], lists: Sequence[Sequence[Action]], unit: float = 0.02) -> list[Span]:
    """Run this rank's list with a `PausingStage`, and return when it worked on which action, by `time.monotonic`.

    run_stage    as in exercise 13.3
    """
    channels, stage = Channels(), PausingStage(unit)
    mine = lists[channels.rank]
    m = sum(action.kind == "F" for action in mine)
    x = torch.zeros(2, 4, device=device())
    dist.barrier()
    run_stage(stage, mine, channels, x, lambda y, target: y.mean(), [x] * m, [x] * m)
    times = {kind: iter(spans) for kind, spans in stage.times.items()}
    return [Span(action, *next(times[action.kind])) for action in mine]


def in_units(ranks: Sequence[Sequence[Span]], unit: float = 0.02) -> list[list[Span]]:
    """Convert what `timed` returned on each rank to units of time after the first start, for `viz.schedule`."""
    zero = min(span.start for row in ranks for span in row)
    return [[Span(s.action, (s.start - zero) / unit, (s.end - zero) / unit) for s in row] for row in ranks]
