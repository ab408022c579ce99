"""Study a run: measure its machine, train it on a single rank for comparison, and time it on fewer ranks.

    python -m tplab.capstone study --preset laptop
    python -m tplab.capstone study --folder runs/laptop --only machine scaling

Each part runs a program of `tplab.capstone.study.programs` on the ranks, returns its entry in measurements.json, and
prints the entry's `says`. The entry is saved immediately, along with the `MATTER` settings used. If a run resumes with
a different number of ranks or different layers, the next study measures its parts again.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from tplab.capstone.command import carry_out, settings_from
from tplab.capstone.planning.predictions import calibrated_step
from tplab.capstone.report.run import MEASUREMENTS, measured_with, read_measurements
from tplab.capstone.settings.io import add_arguments
from tplab.capstone.settings.run_folder import check_unchanged
from tplab.capstone.settings.settings import MATTER, Settings
from tplab.capstone.study import programs
from tplab.capstone.training.log import read_log, steps_of
from tplab.capstone.words import listed
from tplab.common import files
from tplab.common.cores import cores
from tplab.common.units import count, duration, rate
from tplab.runtime import RankError, Results, launch
from tplab.runtime.devices import backend_for

Measured = dict[str, Any]


@dataclass(frozen=True)
class Budget:
    """How long each part of the study trains."""

    alone: int = 60  # steps on a single rank, whose losses are compared with the run's
    scaling: int = 12  # steps per turn on each number of ranks
    warm_up: int = 3  # steps at the start of each turn that don't count
    rounds: int = 3  # turns per number of ranks


@dataclass(frozen=True)
class Study:
    """The input of a part."""

    settings: Settings
    budget: Budget

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


def _machine(study: Study) -> Measured:
    found = study.launch(programs.machine, study.settings)[0]
    return found | {"says": f"a rank reaches {rate(found['flops'])} in large matmuls"}


def _alone(study: Study) -> Measured:
    steps = min(study.budget.alone, study.settings.steps)
    _, (losses, seconds) = study.with_room(programs.steps, _on(study.settings, 1), steps)
    return {"losses": losses, "says": f"{steps} steps on one rank took {duration(median(seconds))} each"}


def _scaling(study: Study) -> Measured:
    """Time the model on 1 to p ranks in turns, and predict the time with the cost model.

    On a CPU, a single process with as many threads as all of the ranks together takes its turns, too.
    """
    settings, budget = study.settings, study.budget
    threads = int(os.environ.get("OMP_NUM_THREADS") or max(1, cores() // settings.ranks))  # of a rank in the full run
    of_all = min(cores(), settings.ranks * threads)
    wanted = [(one, threads) for one in _layouts(settings)]
    if study.backend == "gloo" and of_all > threads:
        wanted.append((_on(settings, 1), of_all))
    turns: list[tuple[Settings, Measured]] = []
    notes: list[str] = []
    for asked, number in wanted:
        try:  # two steps need as much memory as more of them
            one, (kernels, _) = study.with_room(programs.timed, asked, 2, threads=number)
        except RankError as error:
            if asked.ranks == settings.ranks and not turns:
                raise
            notes.append(f"We couldn't measure {_named(asked.ranks, number)} ({error.cause_type}).")
            continue
        if one != asked:
            smaller = f"micro-batches of {one.micro_batch_size}, because larger ones didn't fit"
            notes.append(f"For {_named(one.ranks, number)}, we used {smaller}.")
        device = torch.device("cuda" if study.backend == "nccl" else "cpu")
        predicted = sum(calibrated_step(one, kernels, device).values())
        turns.append((one, {"ranks": one.ranks, "threads": number, "predicted": predicted, "rounds": []}))
    for _ in range(budget.rounds):  # they take turns, so other load on the machine slows all of them down
        for one, found in turns:
            seconds = study.launch(programs.steps, one, budget.scaling, threads=found["threads"])[0][1]
            found["rounds"].append(median(seconds[budget.warm_up :] or seconds))
    says = [f"{duration(median(one['rounds']))} on {_named(one['ranks'], one['threads'])}" for _, one in turns]
    return {
        "turns": [found for _, found in turns], "steps": budget.scaling - budget.warm_up, "notes": notes,
        "says": f"a step takes {listed(says)}",
    }  # fmt: skip


def _named(ranks: int, threads: int) -> str:
    return f"{count(ranks, 'rank')} with {count(threads, 'thread')}{' each' if ranks > 1 else ''}"


def _layouts(settings: Settings) -> list[Settings]:
    """Return the settings for 1, 2, 4, ... up to all ranks, except where the model or batch can't be divided."""
    found = []
    for p in sorted({2**power for power in range(settings.ranks.bit_length())} | {settings.ranks}):
        with suppress(ValueError):
            found.append(_on(settings, p))
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


PARTS: dict[str, Callable[[Study], Measured]] = {"machine": _machine, "alone": _alone, "scaling": _scaling}


def study(
    settings: Settings,
    *,
    only: Sequence[str] = (),
    budget: Budget | None = None,
    say: Callable[[str], None] = print,
) -> Path:
    """Finish the run if necessary, then measure the parts that are missing or were measured with different settings.

    Returns the path of measurements.json.

    only       measure just these parts, even if they were measured before, and don't finish the run
    say        called with one line per part. A part whose ranks fail (out of GPU memory, for example) isn't saved
    Raises ValueError for an unknown part, and for settings that don't match the run in the folder.
    """
    if unknown := sorted(set(only) - set(PARTS)):
        raise ValueError(f"a study has no parts called {unknown}. Its parts are {', '.join(PARTS)}")
    check_unchanged(settings)
    folder = Path(settings.folder)
    if not only and not is_done(settings):
        carry_out(settings)
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in PARTS.items():
        before = read_measurements(folder).get(name)
        if name in only or (not only and (before is None or measured_with(before, settings))):
            began = time.monotonic()
            try:
                measured = part(Study(settings, budget or Budget()))
            except RankError as error:
                say(f"{name}: not measured, because of {error.cause_type}: {error.cause_message.partition(chr(10))[0]}")
                continue
            measured |= {"settings": {key: getattr(settings, key) for key in MATTER}}
            files.replace(folder / MEASUREMENTS, json.dumps(read_measurements(folder) | {name: measured}).encode())
            say(f"{name}: {measured['says']} ({time.monotonic() - began:.0f} s)")
    return folder / MEASUREMENTS


def is_done(settings: Settings) -> bool:
    """Return True if the run in the folder has reached its last step."""
    steps = steps_of(read_log(Path(settings.folder)))
    return bool(steps) and steps[-1]["step"] >= settings.last_step


def main(argv: Sequence[str]) -> int:
    """Run the given command line and return its exit code. Raises the same errors as `study`."""
    parser = argparse.ArgumentParser(
        prog="python -m tplab.capstone study", argument_default=argparse.SUPPRESS, allow_abbrev=False,
        usage="python -m tplab.capstone study [--preset NAME] [--config FILE] [flags] [--only PART ..]",
        description="Finish the run if necessary, then take the measurements that its report needs.",
    )  # fmt: skip
    add_arguments(parser)
    text = f"measure only these parts, even if they were measured before: {', '.join(PARTS)}"
    parser.add_argument("--only", nargs="+", choices=list(PARTS), metavar="PART", help=text)
    given = vars(parser.parse_args(argv))
    only = given.pop("only", [])
    settings = settings_from(given)
    if not only and not is_done(settings):
        if code := carry_out(settings):
            return code
        if not is_done(settings):
            print("The run was stopped, so nothing has been measured yet. Run the same command again to continue.")
            return 0
    study(settings, only=only)
    return 0
