"""The parts of a study. Each part runs a program on the ranks (`tplab.capstone.study.programs`) and evaluates it.

    machine     the speed of a rank in matmuls, memory and messages
    before      text that the model generates before training
    alone       the losses on a single rank, with tplab's layers
    traffic     the trace of one step, compared with the formula
    memory      the live memory in one step, compared with the bill
    timeline    one step, operation by operation
    layers      the learner's layers, compared with tplab's
    baseline    torch's built-in tensor parallelism and tplab's layers, alternating
    scaling     step times of 1 to p ranks, for a fixed and a growing model, compared with the cost model

Each part gets a `Study` and returns its entry in measurements.json. Its `says` or `why` is a line for the terminal.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
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
MOST = 4  # exercises that are listed one by one


@dataclass(frozen=True)
class Budget:
    """The number of steps for each part.

    alone              steps on a single rank whose losses are compared
    scaling, warm_up   steps on each number of ranks, and how many of them are warm-up and don't count
    rounds             how often each number of ranks has its turn
    layers             steps with the learner's layers, and the same number with tplab's
    turns, turn        number of turns in the baseline, and steps per turn; the first turn is a warm-up
    """

    alone: int = 60
    scaling: int = 12
    warm_up: int = 3
    rounds: int = 3
    layers: int = 20
    turns: int = 5
    turn: int = 6


@dataclass(frozen=True)
class Study:
    """The input of a part."""

    settings: Settings
    budget: Budget
    answers: Any

    def launch(
        self, function: Callable[..., Any], settings: Settings, *args: Any, threads: int | None = None
    ) -> Results:
        """Run a function on `settings.ranks` ranks, on the same kind of device as the full run.

        For example, a run with two ranks on a machine with one GPU uses the CPU, so a single rank has to use it, too.
        `threads` is the number of threads of each rank on a CPU (None: as usual).
        """
        backend = backend_for(self.settings.ranks)
        with patch.dict(os.environ, {} if threads is None else {"OMP_NUM_THREADS": str(threads)}):
            return launch(function, settings.ranks, args=(settings, *args), backend=backend, timeout=None)

    @property
    def threads(self) -> int:
        """The number of threads that each rank has on a CPU in the full run."""
        return int(os.environ.get("OMP_NUM_THREADS") or max(1, cores() // self.settings.ranks))

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
    _, found = _with_room(lambda one: study.launch(measuring.steps, one, count), _on(study.settings, 1))
    losses, seconds = found[0]
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
    return {
        "peak": peak, "curve": found[0]["curve"], "marks": found[0]["marks"], "bill": bill, "note": note,
        "says": f"the peak is {size(max(peak))} per rank, and the formula predicts {size(sum(bill.values()))}",
    }  # fmt: skip


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
    losses, idle = study.launch(measuring.of_the_learner, mine, count, answers)[0]
    losses = {"mine": losses, "tplab": study.launch(measuring.steps, ours, count)[0][0]}
    off = small(apart(losses["mine"], losses["tplab"]))
    says = f"the losses of {count} steps differ by at most {off}"
    return {"losses": losses, "used": used(answers.whose, mine, idle), "says": says}


def _why(message: str) -> str:
    """Return the exercises that aren't ready, if the message lists them one per line, otherwise its first line."""
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
    found = study.launch(measuring.turns, settings, ("tplab", "dtensor"), study.budget.turns, study.budget.turn)[0]
    seconds = {name: [median(turn) for turn in times[1:] or times] for name, (_, times) in found.items()}
    ratio = median(seconds["tplab"]) / median(seconds["dtensor"])
    without = ", both without sequence parallelism" if study.settings.sequence_parallel else ""
    return {
        "losses": {name: losses for name, (losses, _) in found.items()}, "seconds": seconds,
        "says": f"a step with tplab's layers takes {ratio:.2f} times as long as one with PyTorch's{without}",
    }  # fmt: skip


def _scaling(study: Study) -> Measured:
    settings, budget = study.settings, study.budget
    found: Measured = {name: {} for name in ("weak", "work", "parts")}
    found["predicted"] = {"strong": {}, "weak": {}}
    on: dict[int, Settings] = {}  # those numbers of ranks that have room for the model
    notes: list[str] = []
    for p in _sizes(settings):
        try:
            _calibrated(study, p, found, on, notes)
        except RankError as error:
            if p == settings.ranks and not on:
                raise
            grown = "the grown model on " if p in on else ""
            notes.append(f"We couldn't measure {grown}{count(p, 'rank')} ({error.cause_type}).")
    found["rounds"], alone = _in_rounds(study, on)
    found["strong"] = {p: median(times) for p, times in found["rounds"].items()}
    if alone:
        found["one_process"] = {"seconds": median(alone), "rounds": alone, "threads": _all_threads(study)}
    steps = count(budget.scaling - budget.warm_up, "step")
    note = [
        f"The different numbers of ranks took turns of {steps}, {budget.rounds} times each. We took the median of each "
        "turn. The table shows the median of all turns, and the fastest and the slowest turn.",
        "For the cost model (chapter 11), we timed the kernels of one layer while all of the ranks were busy.",
        "Megatron-LM's numbers are from V100 GPUs (Shoeybi et al. 2019, table 8 and figure 5).",
        *notes,
    ]
    first, last = min(found["strong"]), max(found["strong"])
    times = found["strong"][first] / found["strong"][last]
    says = f"{count(last, 'rank')} are {times:.2f} times as fast as {count(first, 'rank')}"
    return found | {"tokens": settings.tokens_per_step, "note": " ".join(note), "says": says}


def _calibrated(study: Study, p: int, found: Measured, on: dict[int, Settings], notes: list[str]) -> None:
    """Calibrate the cost model with p ranks, and time a grown model.

    Adds the results to `found`, the settings that fit to `on`, and differences from the run's settings to `notes`.
    """
    steps, threads, wanted = study.budget.scaling, study.threads, _on(study.settings, p)
    one, timed = _with_room(lambda one: study.launch(measuring.timed, one, steps, threads=threads), wanted)
    kernels, seconds = timed[0]
    on[p] = one
    found["parts"][p] = calibrated_step(one, kernels)
    found["predicted"]["strong"][p] = sum(found["parts"][p].values())
    if one != wanted:
        notes.append(
            f"On {count(p, 'rank')}, we used micro-batches of {one.micro_batch_size}, because larger ones didn't fit."
        )
    grown = replace(one, num_layers=p * study.settings.num_layers)
    if p > 1:
        grown, took = _with_room(lambda one: study.launch(measuring.steps, one, steps, threads=threads), grown)
        seconds = took[0][-1]
    found["weak"][p] = study.median(seconds)
    found["work"][p] = model_flops(grown.model, grown.batch_size)
    found["predicted"]["weak"][p] = sum(calibrated_step(grown, kernels).values())


def _in_rounds(study: Study, on: dict[int, Settings]) -> tuple[dict[int, list[float]], list[float]]:
    """Time all numbers of ranks in turns, so that other load on the machine slows all of them down.

    Returns each number's median seconds per step by round, and on a CPU those of one process with all of the threads.
    """
    rounds: dict[int, list[float]] = {p: [] for p in on}
    alone: list[float] = []
    took = partial(study.launch, measuring.steps)
    for _ in range(study.budget.rounds):
        for p, one in on.items():
            rounds[p].append(study.median(took(one, study.budget.scaling, threads=study.threads)[0][-1]))
        if 1 in on and backend_for(study.settings.ranks) == "gloo" and _all_threads(study) > study.threads:
            alone.append(study.median(took(on[1], study.budget.scaling, threads=_all_threads(study))[0][-1]))
    return rounds, alone


def _all_threads(study: Study) -> int:
    """Return the number of threads of all ranks together, or of the cores if there are fewer."""
    return min(cores(), study.settings.ranks * study.threads)


def _with_room(attempt: Callable[[Settings], Results], settings: Settings) -> tuple[Settings, Results]:
    """Halve the micro-batch size until a step fits on a GPU. This gives more micro-batches, but the same losses."""
    while True:
        try:
            return settings, attempt(settings)
        except RankError as error:
            if error.cause_type != "OutOfMemoryError" or settings.micro_batch_size % 2:
                raise
            settings = replace(settings, micro_batch_size=settings.micro_batch_size // 2)


def _sizes(settings: Settings) -> list[int]:
    """Return the numbers of ranks to measure: 1, 2, 4, .. and the run's, if model and batch can be split that way."""
    sizes = []
    for p in sorted({2**power for power in range(settings.ranks.bit_length())} | {settings.ranks}):
        try:
            _on(settings, p)
        except ValueError:
            continue
        sizes.append(p)
    return sizes


def _on(settings: Settings, p: int) -> Settings:
    """Return the settings for p ranks with tplab's layers: tp grows first, then pp, then dp.

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
