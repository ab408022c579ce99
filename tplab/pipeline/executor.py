"""Chapter 13: run a pipeline schedule on real ranks.

Every rank has its stages, which are ordinary modules, and works through its list of actions:

    F    x = receive(output of the previous stage);  y = stage(x), kept;  send(y)
    B    dy = receive(gradient from the next stage);  backward from y with dy;  y is dropped;  send(dx)
    I, W the two halves of B (see `tplab.pipeline.split_backward`);  y is dropped after W

    ids, micro-batches k        rank 0: stage 0  -- y [b, s, h] -->  rank 1: stage 1  -> logits, loss
                                                <-- dy [b, s, h] --

The loss is the mean over all counted tokens of the batch. Micro-batches may have different numbers of tokens, so
averaging their mean losses would be wrong. Instead, each loss is a *sum*, divided by the total number of tokens. Then
the gradients of the micro-batches simply add up to those of the full batch on a single process.

If the first stage's embedding and the last stage's output layer share a table, each of the two stages has a copy of it.
At the end, an all-reduce between their ranks gives both copies the sum of their gradients, so they stay identical.
(Narayanan et al. 2021; Megatron: forward_backward_pipelining_without_interleaving, finalize_model_grads;
torch.distributed.pipelining.)
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from tplab.common.taken_gradients import check_not_taken
from tplab.pipeline.p2p import Channels, Messages
from tplab.pipeline.schedule_order import check
from tplab.pipeline.schedules import Action, Schedule, forward_only
from tplab.pipeline.split_backward import Weights, backward_of_input

Loss = Callable[[Tensor, Tensor], Tensor]


def counted_tokens(target: Tensor) -> int:
    """Return the number of targets that aren't -100, which `F.cross_entropy` ignores."""
    return int((target != -100).sum())


class Pipeline:
    """One rank's part of a pipeline. The model is split into stages, and each rank of a group runs one or more of them.

    stages      this rank's modules, one per chunk. Rank r has stages r, r + p, ..; each takes and returns one tensor
    schedule    a schedule from `tplab.pipeline.schedules`, the same on every rank
    shape       the shape of a micro-batch's tensor between stages, such as [b, s, h]; it has `dtype` and is on `device`
    loss_sum    (output of the last stage, target) -> the sum of the losses of the `counted_tokens`, a scalar
    tied        this rank's copy of the parameter that the first and last stages share; None on ranks without a copy
    channels    the pipeline's `Channels(group)`, which several pipelines may share; None means all ranks
    around      k -> the context manager in which this rank's forward of micro-batch k runs, such as `torch.autocast`

    `peak_live` is the largest number of micro-batches, counted per chunk, that were between forward and backward at the
    same time in the last run. Set `sums_tied` to False if something else, such as a `TrainingStep`, sums the gradients
    of the tied parameter's two copies after `step`.

    Raises ScheduleError for a schedule that can't run, and ValueError if stages and schedule don't match the ranks, or
    if only one of the tied copies is frozen.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        schedule: Schedule,
        *,
        shape: Sequence[int],
        loss_sum: Loss,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        tied: nn.Parameter | None = None,
        channels: Channels | None = None,
        around: Callable[[int], AbstractContextManager] = nullcontext,
    ) -> None:
        check(schedule)
        self.channels = channels or Channels()
        self.rank, p = self.channels.rank, self.channels.world_size
        if schedule.world_size != p or len(stages) != schedule.chunks:
            raise ValueError(
                f"the schedule is for {schedule.world_size} ranks with {schedule.chunks} stages each; "
                f"here are {p} ranks, and rank {self.rank} has {len(stages)} stages"
            )
        self.stages, self.schedule = list(stages), schedule
        self.shape, self.dtype, self.device = tuple(shape), dtype, torch.device(device)
        self.loss_sum, self.around = loss_sum, around
        self.is_first, self.is_last = self.rank == 0, self.rank == p - 1
        self.peak_live = 0
        if tied is not None and self.channels.ends is None and len(stages) > 1:
            raise ValueError(
                f"{len(stages)} stages on a single rank have several copies of the tied parameter, which nothing keeps "
                "identical: use one stage, or more ranks"
            )
        self.tied, self.sums_tied = tied, True
        self._start_alike()

    def step(
        self,
        inputs: Sequence[Tensor] | None = None,
        targets: Sequence[Tensor] | None = None,
        *,
        total: int | None = None,
    ) -> Tensor | None:
        """Run forward and backward on a batch, accumulating gradients. Returns the mean loss on the last rank.

        inputs     the m micro-batches, needed on the first rank; `targets` are needed on the last rank
        total      the number of counted tokens in the full batch, if data parallelism gives other replicas a part of it
        """
        finish = self._finish(targets, total)
        with self._tied_gradients():
            losses = self._run(self.schedule, inputs, finish)
        return torch.stack(losses).sum() if self.is_last else None

    @torch.no_grad()
    def evaluate(
        self,
        inputs: Sequence[Tensor] | None = None,
        targets: Sequence[Tensor] | None = None,
        *,
        total: int | None = None,
    ) -> Tensor | None:
        """Run forward only, with the arguments of `step`. Returns the mean loss on the last rank, None elsewhere."""
        losses = self._run(forward_only(self.schedule), inputs, self._finish(targets, total))
        return torch.stack(losses).sum() if self.is_last else None

    def _finish(self, targets: Sequence[Tensor] | None, total: int | None) -> Callable[[Tensor, int], Tensor]:
        """Return a function that turns the last stage's output into the micro-batch's part of the mean loss."""
        if not self.is_last:
            return lambda y, k: y
        self._check_number("targets", targets)
        assert targets is not None
        tokens = sum(map(counted_tokens, targets)) if total is None else total
        return lambda y, k: self.loss_sum(y, targets[k]) / tokens

    def _run(
        self, schedule: Schedule, inputs: Sequence[Tensor] | None, finish: Callable[[Tensor, int], Tensor]
    ) -> list[Tensor]:
        if self.is_first:
            self._check_number("inputs", inputs)
        messages = Messages(self.channels, schedule, self.shape, self.dtype, self.device)
        run = _Run(self.stages, schedule, self.rank, messages, inputs or (), finish, self.around)
        run.play()
        self.peak_live = run.peak_live
        return [run.finished[k] for k in sorted(run.finished)]

    def _start_alike(self) -> None:
        """Copy the first stage's tied parameter to the last stage."""
        if self.tied is None or self.channels.ends is None:
            return
        trained = torch.tensor(float(self.tied.requires_grad), device=self.tied.device)
        dist.all_reduce(trained, group=self.channels.ends)
        if trained.item() == 1:
            raise ValueError("one copy of the tied parameter is frozen and the other isn't: freeze both, or neither")
        with torch.no_grad():
            dist.broadcast(self.tied, group_src=0, group=self.channels.ends)

    @contextmanager
    def _tied_gradients(self) -> Iterator[None]:
        """Context manager that sums the gradients the tied copies get inside it, and adds the sum to earlier ones."""
        tied = self.tied if self.schedule.trains and self.sums_tied else None
        if tied is None or not tied.requires_grad or self.channels.ends is None:
            yield
            return
        before, tied.grad = tied.grad, None
        yield
        check_not_taken([tied], "sum the gradients of the tied parameter's two copies")
        if tied.grad is None:
            tied.grad = torch.zeros_like(tied)
        dist.all_reduce(tied.grad, group=self.channels.ends)
        if before is not None:
            tied.grad += before

    def _check_number(self, name: str, given: Sequence[Tensor] | None) -> None:
        number = 0 if given is None else len(given)
        if number != self.schedule.micro_batches:
            raise ValueError(
                f"rank {self.rank} got {number} micro-batches of {name}; the schedule has {self.schedule.micro_batches}"
            )


@dataclass
class _Live:
    """A micro-batch between forward and backward, with its input (if that needs a gradient) and its output's edge."""

    x: Tensor | None
    y: GradientEdge | None
    weights: Weights | None = None


@dataclass
class _Run:
    """One run of a schedule on this rank.

    finish      turns the last stage's output for micro-batch k into the caller's result
    around      as in `Pipeline`
    live        the micro-batches between forward and backward, by (chunk, micro-batch)
    finished    the results of `finish`, by micro-batch
    """

    stages: Sequence[nn.Module]
    schedule: Schedule
    rank: int
    messages: Messages
    inputs: Sequence[Tensor]
    finish: Callable[[Tensor, int], Tensor]
    around: Callable[[int], AbstractContextManager] = nullcontext
    live: dict[tuple[int, int], _Live] = field(default_factory=dict)
    finished: dict[int, Tensor] = field(default_factory=dict)
    peak_live: int = 0

    def play(self) -> None:
        row = self.schedule.actions[self.rank]
        needs = [self.schedule.needs(self.rank, action) for action in row]
        for action, needed, coming in zip(row, needs, [*needs[1:], None], strict=True):
            received = None if needed is None else self.messages.receive(needed)
            if coming is not None:
                self.messages.expect(coming)
            made = self._forward(action, received) if action.kind == "F" else self._backward(action, received)
            given = self.schedule.gives(self.rank, action)
            if given is not None and made is not None:
                self.messages.send(given, made)
            self.peak_live = max(self.peak_live, len(self.live))
        self.messages.close()

    def _forward(self, action: Action, received: Tensor | None) -> Tensor:
        k, training = action.micro_batch, self.schedule.trains and torch.is_grad_enabled()
        with torch.set_grad_enabled(training), self.around(k):
            x = self.inputs[k] if received is None else received.requires_grad_(training)  # [b, s, h]
            y = self.stages[action.chunk](x)  # [b, s, h]
            if self.schedule.stage(self.rank, action.chunk) == self.schedule.stages - 1:
                y = self.finish(y, k)
                self.finished[k] = y.detach()
            else:
                self.messages.check(y, f"chunk {action.chunk} of rank {self.rank}")
        if training:
            edge = get_gradient_edge(y) if y.requires_grad else None
            self.live[action.chunk, k] = _Live(None if received is None else x, edge)
        return y.detach()

    def _backward(self, action: Action, dy: Tensor | None) -> Tensor | None:
        """Run B, I or W. Returns the gradient of the stage's input, if it has one."""
        here = (action.chunk, action.micro_batch)
        kept, dx = self.live[here], None
        if action.kind == "W" and kept.weights is not None:
            kept.weights()
        elif action.kind == "I" and kept.y is not None:
            dx, kept.weights = backward_of_input(kept.y, dy, kept.x)
        elif action.kind == "B" and kept.y is not None:
            torch.autograd.backward(kept.y, dy)
            dx = None if kept.x is None else kept.x.grad
        if action.kind != "I":
            del self.live[here]
        if dx is None and kept.x is not None:
            dx = torch.zeros_like(kept.x)  # for a stage that doesn't use its input
        return dx
