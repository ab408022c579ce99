"""The program that every rank runs to train a GPT.

    launch(train, settings.ranks, args=(settings,), timeout=None)              from a notebook
    torchrun --standalone --nproc-per-node 8 -m tplab.capstone --tp 8      from a shell

    tokens, model, optimizer       created identically on every rank, or loaded from the newest checkpoint
    for each step:
        trainer                    forward, backward, all-reduces of gradients, clipping, AdamW
        step_summary               one all-reduce: the mean loss, and whether the run has been asked to stop
        log, evaluation, sample, checkpoint      when they are due

A step depends only on the weights, the optimizer state and the step number, which determines the sequences (`Batches`),
the dropout and the learning rate. So a checkpoint only contains these three, and a resumed run continues as if it had
never been interrupted.

A rank only waits for its GPU if a step is logged, so nobody knows the losses of the other steps.
"""

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from tplab.capstone.checkpoints.writer import Checkpoints
from tplab.capstone.data.prepare import Batches, prepare
from tplab.capstone.learners_loop import learning_rate
from tplab.capstone.planning.predictions import plan
from tplab.capstone.settings.run_folder import check_unchanged, locked, write_settings
from tplab.capstone.settings.settings import Settings
from tplab.capstone.training.build_model import build_model
from tplab.capstone.training.log import Log, Row, start_row, step_row
from tplab.capstone.training.meter import Clock, Meter
from tplab.capstone.training.ranks import Ranks, join
from tplab.capstone.training.step_summary import summarize
from tplab.capstone.training.stopping import stop_file
from tplab.capstone.training.trainer import Trainer
from tplab.checkpoint.files import together
from tplab.runtime import record

ASKED = "asked to stop"  # why a run ended, if there was a `stop` file


@dataclass
class Outcome:
    """The outcome of a run, which is the same on every rank.

    step       the last completed step, whether in this run or before it
    losses     the losses of this run's logged steps, averaged over the full batch
    stopped    the reason why the run stopped: "done", "stop_after" or `ASKED`
    """

    step: int
    losses: list[float]
    stopped: str
    folder: str


def train(settings: Settings, answers: Any = None, tell: Callable[[Row], None] | None = None) -> Outcome:
    """Train, or resume training from the newest checkpoint in the run's folder. All ranks call this.

    answers    the learner's code from the chapters, for layers="mine"
    tell       a function that the first rank calls with each row of the log

    Raises ValueError if the settings don't match the ranks or the run in the folder, or if a different run is already
    training there. Raises FloatingPointError if the loss or the gradient norm is no longer finite, before it saves a
    checkpoint of that state.
    """
    ranks = join(settings)
    check_unchanged(settings)
    folder = Path(settings.folder)
    with ExitStack() as lock:
        together(lambda: lock.enter_context(locked(folder)) if ranks.rank == 0 else None, None)
        made = plan(settings, ranks.device, ranks.mesh)
        meter = Meter(ranks.device, counts=bool(made) and ranks.device.type == "cpu" and not settings.compile)
        with meter.counting:
            return _Run(settings, answers, ranks, meter).to_the_end(made, tell)


class _Run:
    """A run on this rank: its model and data, the training loop, and the work between steps."""

    def __init__(self, settings: Settings, answers: Any, ranks: Ranks, meter: Meter) -> None:
        self.settings, self.answers, self.ranks, self.meter = settings, answers, ranks, meter
        self.checkpoints = Checkpoints(Path(settings.folder, "checkpoints"), settings.keep, ranks.mesh)
        newest = self.checkpoints.latest()
        self.model = build_model(settings, settings.model, mesh=ranks.mesh, device=ranks.device, answers=answers)
        self.trainer = Trainer(self.model, settings, ranks)
        self.optimizer = self.trainer.training.optimizer
        self.resumed_from = self.checkpoints.load(newest, self.model, self.optimizer) if newest else None
        self.done = self.saved = self.resumed_from or 0
        self.tokens = prepare(settings)
        if settings.compile:
            compile_layers(self.model)
        self.batches = Batches(self.tokens.train, settings.seq_length, settings.batch_size, settings.seed)
        self.held_out = Batches(self.tokens.validation, settings.seq_length, settings.batch_size, seed=0)
        self.clock, self.losses = Clock(), list[float]()

    def to_the_end(self, made: Row | None, tell: Callable[[Row], None] | None) -> Outcome:
        """Train until the run ends. `made` is the plan, which goes into the log's "start" row."""
        settings = self.settings
        if self.done >= settings.last_step:
            return Outcome(self.done, [], self._why(asked=False), settings.folder)
        if self.ranks.rank == 0:
            write_settings(settings)
        self.log = Log(Path(settings.folder), writes=self.ranks.rank == 0, tell=tell)
        begins = {"step": self.done + 1, "resumed_from": self.resumed_from, "plan": made}
        self.log.write(start_row(settings, self.answers, self.ranks) | begins)
        asked = self._steps()
        with record(keep=False):
            self._keep(asked=asked)
        self.log.write({"kind": "end", "step": self.done, "why": self._why(asked)})
        if self.ranks.rank == 0:
            stop_file(Path(settings.folder)).unlink(missing_ok=True)
        return Outcome(self.done, self.losses, self._why(asked), settings.folder)

    def _steps(self) -> bool:
        """Train until the last step or until the run has been asked to stop. Return True in the latter case."""
        settings = self.settings
        self.clock.go_on()
        for number in range(self.done + 1, settings.last_step + 1):
            last = number == settings.steps
            evaluate, sample, save, log = (
                bool(every and number % every == 0)
                for every in (settings.evaluate_every, settings.sample_every, settings.save_every, settings.log_every)
            )
            asked = self._one(number, log or evaluate or sample or save or number == settings.last_step)
            with record(keep=False):
                if evaluate or last:
                    loss = self.trainer.loss(self.held_out, settings.evaluation_batches)
                    self._between({"kind": "evaluation", "step": number, "loss": loss})
                if (sample or last) and settings.sample_tokens and settings.pp == 1:  # stages don't generate text
                    text = self.trainer.sample(self.tokens, number)
                    self._between({"kind": "sample", "step": number, "prompt": settings.prompt, "text": text})
                if save:
                    self._keep()
            if asked:
                return True
        return False

    def _one(self, number: int, log: bool) -> bool:
        """Run a step, and log it if `log`. Return True if the run has been asked to stop."""
        batch = self.batches.own(number - 1, self.ranks.place.dp, self.settings.dp)  # ids and targets, [B/dp, s] each
        if self.ranks.device.type == "cuda":
            batch = batch[0].pin_memory(), batch[1].pin_memory()  # so that this rank doesn't wait for the copy
        ids, targets = (tensor.to(self.ranks.device, non_blocking=True) for tensor in batch)
        with self.meter.step():
            loss, norm = self.trainer.run(number, ids, targets)
        self.done = number
        self.clock.count()
        if not log:
            return False
        asked = self.ranks.rank == 0 and stop_file(Path(self.settings.folder)).exists()
        with record(keep=False):
            summary = summarize(self.ranks, loss, norm, asked, self.meter.figures)
        for what, value in (("loss", summary.loss), ("gradient norm", summary.norm)):
            if not math.isfinite(value):  # noticed before a checkpoint of that state is saved
                self._diverged(f"the {what} of step {number} is {value}")
        self.losses.append(summary.loss)
        self.log.write(step_row(number, summary, self.settings, self.clock.mean()))
        self.clock.go_on()
        return summary.stop

    def _between(self, row: Row) -> None:
        """Log something that was done between two steps, and exclude the time it took from the step times."""
        self.log.write(row)
        self.clock.go_on()

    def _diverged(self, what: str) -> NoReturn:
        self.log.write({"kind": "end", "step": self.done, "why": what})
        saved = self.checkpoints.folders.steps()
        resumes = f"the run resumes from step {saved[-1]}" if saved else "the run starts over"
        raise FloatingPointError(
            f"{what}, so the training has diverged. If you run the same command again, {resumes}. Use a lower "
            f"--learning-rate (it was {learning_rate(self.done, self.settings):.2g} at this step), longer "
            "--warmup-steps, a smaller --max-norm, or --precision float32 if it was bfloat16"
        )

    def _keep(self, *, asked: bool = False) -> None:
        """Save a checkpoint if `save_every` is set or the run was `asked` to stop, unless this step already has one."""
        if self.saved == self.done or not (self.settings.save_every or asked):
            return
        # The loss of a step was computed before its update, so it can't show that the update destroyed the weights
        if not math.isfinite(loss := self.trainer.loss(self.held_out, 1)):
            self._diverged(f"the loss on held-out text after step {self.done} is {loss}")
        began = time.perf_counter()
        self.checkpoints.save(self.done, self.model, self.optimizer)
        self.saved = self.done
        self._between({"kind": "checkpoint", "step": self.done, "seconds": time.perf_counter() - began})

    def _why(self, asked: bool) -> str:
        if self.done >= self.settings.steps:
            return "done"
        return ASKED if asked else "stop_after"


def compile_layers(model: nn.Module) -> None:
    """Compile each of `model.layers` in place. Parameter names don't change, so checkpoints don't change either."""
    layers: Any = model.layers
    for layer in layers.children():
        layer.compile()
