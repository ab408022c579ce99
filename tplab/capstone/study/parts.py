"""The parts of a study. Each is a function that runs a program of `tplab.capstone.study.programs` on the ranks.

A part takes a `Study`, evaluates the program's results and returns its entry in measurements.json. The terminal shows
the entry's `says`, which describes the result, or `why` nothing was measured.
"""

import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import median
from typing import Any
from unittest.mock import patch

from tplab.capstone.own_layers.find import find_answers
from tplab.capstone.own_layers.link import used
from tplab.capstone.planning.predictions import calibrated_step, predicted_memory
from tplab.capstone.planning.traffic import step_bytes, step_parts
from tplab.capstone.settings.settings import Settings
from tplab.capstone.study import programs as measuring
from tplab.capstone.words import apart, listed, small
from tplab.common.cores import cores
from tplab.common.units import count, duration, rate, size
from tplab.cost.flops import model_flops
from tplab.runtime import RankError, Record, Results, Total, launch
from tplab.runtime.devices import backend_for

Measured = dict[str, Any]
MOST = 4  # a message about more exercises than this only has their number and the first one


@dataclass(frozen=True)
class Budget:
    """How long each part of the study trains."""

    alone: int = 60  # steps on a single rank, whose losses are compared with the run's
    scaling: int = 12  # steps per turn on each number of ranks
    warm_up: int = 3  # steps at the start of each scaling turn that don't count, and steps before the traced one
    rounds: int = 3  # turns per number of ranks
    layers: int = 20  # steps with the learner's layers, and as many with tplab's
    turns: int = 5  # turns in the comparison with DTensor; the first one is a warm-up
    turn: int = 6  # steps per turn in the comparison with DTensor


@dataclass(frozen=True)
class Study:
    """The input of a part: the run's settings, the budget, and the learner's code if there is any."""

    settings: Settings
    budget: Budget
    answers: Any

    def launch(self, function: Callable, settings: Settings, *args: Any, threads: int | None = None) -> Results:
        """Run a function on `settings.ranks` ranks, on the same kind of device as the full run.

        For example, a run with two ranks on a machine with one GPU uses the CPU, so the study has to use the CPU
        for a single rank, too. `threads` is the number of CPU threads per rank (None: the default of `tplab.launch`).
        """
        with patch.dict(os.environ, {} if threads is None else {"OMP_NUM_THREADS": str(threads)}):
            return launch(function, settings.ranks, args=(settings, *args), backend=self.backend, timeout=None)

    def with_room(self, function: Callable, settings: Settings, *args: Any, **options: Any) -> tuple[Settings, Any]:
        """Launch a function, halving the micro-batch size whenever a GPU runs out of memory. The losses stay the same.

        Returns the settings with the micro-batch size that fits, and the result of rank 0.
        """
        while True:
            try:
                return settings, self.launch(function, settings, *args, **options)[0]
            except RankError as error:
                if error.cause_type != "OutOfMemoryError" or settings.micro_batch_size % 2:
                    raise
                settings = replace(settings, micro_batch_size=settings.micro_batch_size // 2)

    @property
    def backend(self) -> str:
        return backend_for(self.settings.ranks)

    @property
    def threads(self) -> int:
        """The number of CPU threads per rank in the full run."""
        return int(os.environ.get("OMP_NUM_THREADS") or max(1, cores() // self.settings.ranks))

    @property
    def all_threads(self) -> int:
        """The total number of CPU threads of all ranks, but at most one per core."""
        return min(cores(), self.settings.ranks * self.threads)

    def median(self, seconds: list[float]) -> float:
        return median(seconds[self.budget.warm_up :] or seconds)


def _machine(study: Study) -> Measured:
    found = study.launch(measuring.machine, study.settings)[0]
    return found | {"says": f"a rank reaches {rate(found['flops'])} in large matmuls"}


def _before(study: Study) -> Measured:
    text, loss = study.launch(measuring.untrained, study.settings, study.answers)[0]
    return {"prompt": study.settings.prompt, "text": text, "loss": loss, "says": f"the loss is {loss:.3f}"}


def _alone(study: Study) -> Measured:
    count = min(study.budget.alone, study.settings.steps)
    _, (losses, seconds, _) = study.with_room(measuring.steps, _on(study.settings, 1), count)
    took = median(seconds)
    return {"losses": losses, "seconds": took, "says": f"{count} steps on one rank took {duration(took)} each"}


def _traffic(study: Study) -> Measured:
    settings = study.settings
    entered = study.launch(measuring.sent, settings, study.answers)
    measured: dict[str, Total] = {}
    formula: dict[str, Total] = {}
    parts: list[tuple[str, str, int, int]] = []
    for stage in range(settings.pp):
        where = f", stage {stage}" if settings.pp > 1 else ""
        totals = Record(entered[stage * settings.tp]).totals()
        measured |= {kind + where: total for kind, total in totals.items()}
        formula |= {kind + where: total for kind, total in step_bytes(settings, stage=stage).items()}
        parts += [(part.name, part.kind + where, part.calls, part.bytes) for part in step_parts(settings, stage=stage)]
    agree = "agree to the byte" if measured == formula else "differ"
    says = f"the formula and the trace of a real step {agree}"
    return {"measured": measured, "formula": formula, "parts": parts, "says": says}


def _memory(study: Study) -> Measured:
    found = study.launch(measuring.metered, study.settings, study.answers)
    bill, note = predicted_memory(study.settings)
    peak = [one["peak"] for one in found]
    says = f"the peak is {size(max(peak))} per rank, and the formula predicts {size(sum(bill.values()))}"
    return found[0] | {"peak": peak, "bill": bill, "note": note, "says": says}


def _timeline(study: Study) -> Measured:
    spans = study.launch(measuring.traced, study.settings, study.budget.warm_up, study.answers)
    lanes = [{"rank": rank, "spans": of_rank} for rank, of_rank in enumerate(spans)]
    says = f"rank 0 ran {len(spans[0])} operations in one step"
    return {"step": study.budget.warm_up + 1, "ranks": lanes, "says": says}


def _layers(study: Study) -> Measured:
    settings = study.settings
    try:
        mine, ours = replace(settings, layers="mine"), replace(settings, layers="tplab")
        answers = study.answers or find_answers(settings.chapters, settings)
    except (ValueError, FileNotFoundError) as error:
        return {"why": _why(str(error))}
    count = min(study.budget.layers, settings.steps)
    losses, _, idle = study.launch(measuring.steps, mine, count, answers)[0]
    losses = {"mine": losses, "tplab": study.launch(measuring.steps, ours, count)[0][0]}
    says = f"the losses of {count} steps differ by at most {small(apart(losses['mine'], losses['tplab']))}"
    return {"losses": losses, "used": used(answers.whose, mine, idle), "says": says}


def _why(message: str) -> str:
    """Say which exercises to solve first if the message lists any, one per line. Otherwise, return its first line."""
    if exercises := re.findall(r"^ +(\d+\.\d+)", message, re.MULTILINE):
        first = listed(exercises) if len(exercises) <= MOST else f"{len(exercises)} exercises, from {exercises[0]} on"
        return f"first solve {first}"
    return message.splitlines()[0].rstrip(" .")


def _baseline(study: Study) -> Measured:
    settings = replace(study.settings, sequence_parallel=False)
    if settings.tp == 1:
        return {"why": "needs a run with tp=2 or more"}
    try:
        replace(settings, layers="dtensor")
    except ValueError as error:
        return {"why": str(error)}
    kinds, budget = ("tplab", "dtensor"), study.budget
    rounds = study.launch(measuring.turns, settings, kinds, budget.turns, budget.turn)[0]
    losses = {name: [loss for turn in rounds for loss, _ in turn[name]] for name in kinds}
    seconds = {name: [median(took for _, took in turn[name]) for turn in rounds[1:] or rounds] for name in kinds}
    ratio = median(seconds["tplab"]) / median(seconds["dtensor"])
    without = ", both without sequence parallelism" if study.settings.sequence_parallel else ""
    says = f"a step with tplab's layers takes {ratio:.2f} times as long as one with PyTorch's{without}"
    return {"losses": losses, "seconds": seconds, "says": says}


def _scaling(study: Study) -> Measured:
    """Time the model on 1 to p ranks in turns, and a model that grows with p. Predict both with the cost model."""
    settings, budget = study.settings, study.budget
    found: Measured = {"weak": {}, "work": {}, "parts": {}, "predicted": {"strong": {}, "weak": {}}}
    on: dict[int, Settings] = {}  # the numbers of ranks that have enough memory for the model
    notes: list[str] = []
    for p, wanted in _layouts(settings).items():
        try:
            one, (kernels, seconds) = study.with_room(measuring.timed, wanted, budget.scaling, threads=study.threads)
            on[p], parts = one, calibrated_step(one, kernels)
            found["parts"][p], found["predicted"]["strong"][p] = parts, sum(parts.values())
            if one != wanted:
                smaller = f"micro-batches of {one.micro_batch_size}, because larger ones didn't fit"
                notes.append(f"On {count(p, 'rank')}, we used {smaller}.")
            grown = replace(one, num_layers=p * settings.num_layers)
            if p > 1:
                grown, (_, seconds, _) = study.with_room(measuring.steps, grown, budget.scaling, threads=study.threads)
            found["weak"][p] = study.median(seconds)
            found["work"][p] = model_flops(grown.model, grown.batch_size)
            found["predicted"]["weak"][p] = sum(calibrated_step(grown, kernels).values())
        except RankError as error:
            if p == settings.ranks and not on:
                raise
            model = "the grown model on " if p in on else ""
            notes.append(f"We couldn't measure {model}{count(p, 'rank')} ({error.cause_type}).")
    turns: dict[Any, tuple[Settings, int]] = {p: (one, study.threads) for p, one in on.items()}
    if 1 in on and study.backend == "gloo" and study.all_threads > study.threads:
        turns["one process"] = on[1], study.all_threads
    rounds: dict[Any, list[float]] = {name: [] for name in turns}
    for _ in range(budget.rounds):  # they take turns, so other load on the machine slows all of them down
        for name, (one, threads) in turns.items():
            seconds = study.launch(measuring.steps, one, budget.scaling, threads=threads)[0][1]
            rounds[name].append(study.median(seconds))
    if alone := rounds.pop("one process", None):
        found["one_process"] = {"seconds": median(alone), "rounds": alone, "threads": study.all_threads}
    strong = {p: median(times) for p, times in rounds.items()}
    found |= {"rounds": rounds, "strong": strong, "tokens": settings.tokens_per_step}
    note = [
        f"The different numbers of ranks took turns of {count(budget.scaling - budget.warm_up, 'step')}, "
        f"{budget.rounds} times each. We took the median of each turn. The table shows the median, fastest and "
        "slowest of all turns.",
        "For the cost model (chapter 11), we timed the kernels of one layer while all of the ranks were busy.",
        "Megatron-LM's numbers are from V100 GPUs (Shoeybi et al. 2019, table 8 and figure 5).",
        *notes,
    ]
    first, last = min(strong), max(strong)
    times = strong[first] / strong[last]
    says = f"{count(last, 'rank')} are {times:.2f} times as fast as {count(first, 'rank')}"
    return found | {"note": " ".join(note), "says": says}


def _layouts(settings: Settings) -> dict[int, Settings]:
    """Return {p: settings} for p = 1, 2, 4, ... up to all ranks, except those that can't divide the model or batch."""
    found = {}
    for p in sorted({2**power for power in range(settings.ranks.bit_length())} | {settings.ranks}):
        with suppress(ValueError):
            found[p] = _on(settings, p)
    return found


def _on(settings: Settings, p: int) -> Settings:
    """Return the settings for p ranks with tplab's layers. The ranks go to tp first, then to pp, then to dp.

    Raises ValueError if the model and the batch can't be divided that way.
    """
    tp = min(p, settings.tp)
    pp = min(p // tp, settings.pp)
    dp = p // (tp * pp)
    if tp * pp * dp != p:
        raise ValueError(f"{p} ranks can't be divided by tp={tp} · pp={pp}")
    cut, zero = settings.sequence_parallel and tp > 1, settings.zero if dp > 1 else 0
    return replace(settings, layers="tplab", tp=tp, pp=pp, dp=dp, zero=zero, sequence_parallel=cut)


PARTS: dict[str, Callable[[Study], Measured]] = {
    "machine": _machine, "before": _before, "alone": _alone, "traffic": _traffic, "memory": _memory,
    "timeline": _timeline, "layers": _layers, "baseline": _baseline, "scaling": _scaling,
}  # fmt: skip
