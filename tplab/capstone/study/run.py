"""Study a run: train the first steps on a single rank for comparison, and time it on fewer ranks.

    python -m tplab.capstone study --preset laptop

The results go into measurements.json in the run's folder, together with the `MATTER` settings.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from tplab.capstone.command import carry_out, settings_from
from tplab.capstone.report.run import MEASUREMENTS
from tplab.capstone.settings.io import add_arguments
from tplab.capstone.settings.run_folder import check_unchanged
from tplab.capstone.settings.settings import MATTER, Settings
from tplab.capstone.training.log import Row, read_log, steps_of
from tplab.capstone.training.loop import train
from tplab.common import files
from tplab.common.cores import cores
from tplab.common.units import count, duration
from tplab.runtime import RankError, launch
from tplab.runtime.devices import backend_for


@dataclass(frozen=True)
class Budget:
    """How long each part of the study trains."""

    alone: int = 60  # steps on a single rank, whose losses are compared with the run's
    scaling: int = 12  # steps per turn on each number of ranks
    warm_up: int = 3  # steps at the start of each turn that don't count
    rounds: int = 3  # turns per number of ranks


def study(settings: Settings, *, budget: Budget | None = None, say: Callable[[str], None] = print) -> Path:
    """Compare the run with one rank, and time it on 1, 2, 4, ... ranks. Returns the path of measurements.json.

    say    called with one line per part
    Raises ValueError for settings that don't match the run in the folder, and RankError if ranks fail.
    """
    check_unchanged(settings)
    budget, folder = budget or Budget(), Path(settings.folder)
    layouts, losses = _layouts(settings), list[float]()
    if layouts[0].ranks == 1:
        try:
            losses = [row["loss"] for row in _steps(settings, layouts[0], budget.alone)[1]]
            say(f"trained {count(len(losses), 'step')} on one rank for comparison")
        except RankError as error:  # a GPU may be too small for the full model
            say(f"couldn't train on one rank ({error.cause_type})")
            del layouts[0]
    turns: dict[int, Row] = {}
    for _ in range(budget.rounds):  # they take turns, so other load on the machine slows all of them down
        for one in layouts:
            start, rows = _steps(settings, replace(one, plan=one.ranks not in turns), budget.scaling)
            turn = turns.setdefault(one.ranks, {"ranks": one.ranks, "predicted": {}, "rounds": []})
            if made := start["plan"]:
                turn["predicted"] = made["seconds"]
            turn["rounds"].append(median(row["seconds"] for row in rows[budget.warm_up :] or rows))
    for p, turn in turns.items():
        say(f"a step on {count(p, 'rank')} takes {duration(median(turn['rounds']))}")
    measured = {"settings": {name: getattr(settings, name) for name in MATTER}, "alone": losses}
    scaling = {"turns": list(turns.values()), "steps": budget.scaling - budget.warm_up}
    folder.mkdir(parents=True, exist_ok=True)
    files.replace(folder / MEASUREMENTS, json.dumps(measured | {"scaling": scaling}).encode())
    return folder / MEASUREMENTS


def _steps(whole: Settings, settings: Settings, steps: int) -> tuple[Row, list[Row]]:
    """Train the first steps in a temporary folder, and return the log's "start" row and its "step" rows.

    The ranks use the same kind of device as the full run, and as many CPU threads as one of its ranks.
    """
    few: dict[str, Any] = {"stop_after": min(steps, settings.steps), "log_every": 1, "save_every": 0}
    none: dict[str, Any] = {"evaluate_every": 0, "sample_every": 0, "sample_tokens": 0}
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, cores() // whole.ranks))
    parent = Path(whole.folder).absolute().parent  # where it finds the run's tokens
    parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix=".study-", dir=parent) as folder,
        patch.dict(os.environ, {"OMP_NUM_THREADS": threads}),
    ):
        one, backend = replace(settings, folder=folder, **few, **none), backend_for(whole.ranks)
        launch(train, one.ranks, args=(one,), backend=backend, timeout=None)
        rows = read_log(Path(folder))
    return rows[0], steps_of(rows)


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
    return replace(settings, layers="tplab", tp=tp, pp=pp, dp=dp, zero=zero, sequence_parallel=cut, plan=False)


def is_done(settings: Settings) -> bool:
    """Return True if the run in the folder has reached its last step."""
    steps = steps_of(read_log(Path(settings.folder)))
    return bool(steps) and steps[-1]["step"] >= settings.last_step


def main(argv: Sequence[str]) -> int:
    """Run the given command line and return its exit code. Raises the same errors as `study`."""
    parser = argparse.ArgumentParser(
        prog="python -m tplab.capstone study", argument_default=argparse.SUPPRESS, allow_abbrev=False,
        usage="python -m tplab.capstone study [--preset NAME] [flags]",
        description="Finish the run if necessary, then take the measurements that its report needs.",
    )  # fmt: skip
    add_arguments(parser)
    settings = settings_from(vars(parser.parse_args(argv)))
    if not is_done(settings):
        if code := carry_out(settings):
            return code
        if not is_done(settings):
            print("The run was stopped, so nothing has been measured yet. Run the same command again to continue.")
            return 0
    study(settings)
    return 0
