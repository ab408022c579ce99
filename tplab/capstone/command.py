"""Training runs from a shell, on ranks that this process starts or that torchrun has started."""

import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from tplab.capstone.settings.io import read_settings, settings_of
from tplab.capstone.settings.presets import preset_for
from tplab.capstone.settings.run_folder import SETTINGS, check_unchanged, locked, set_aside
from tplab.capstone.settings.settings import Settings
from tplab.capstone.training.log import check_tensorboard, read_log, steps_of
from tplab.capstone.training.loop import Outcome, train
from tplab.capstone.training.ranks import check_started
from tplab.capstone.training.signals import hand_on
from tplab.capstone.watching.console import ConsoleLog, shown
from tplab.checkpoint.files import gathered
from tplab.runtime import RankError, launch, torchrun
from tplab.runtime.devices import backend_for

WAYS_TO_END = {
    "done": "All {step} steps are done.",
    "stop_after": "Stopped after step {step}. Run the same command without --stop-after to continue.",
    "SIGTERM": "Stopped and saved a checkpoint after step {step}. Run the same command again to continue.",
}


_OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def settings_from(given: Mapping[str, Any]) -> Settings:
    """Build the settings from flags and a base: a preset, a file, the folder's run, or else a preset that fits."""
    base = None
    if "preset" not in given and "config" not in given:
        there = Path(str(given["folder"]), SETTINGS) if "folder" in given else None
        if there is not None and there.exists():
            base = replace(read_settings(there), stop_after=None)
        else:
            gpus = torch.cuda.device_count()
            gpu = torch.cuda.get_device_name(0) if gpus else None
            if torchrun.is_active():  # on one or more machines
                ranks = int(os.environ["WORLD_SIZE"])
                gpus *= ranks // int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
            base = preset_for(gpu, *(given.get(name) for name in ("tp", "dp", "pp")), gpus=gpus)
    return settings_of(dict(given), base)


def carry_out(settings: Settings, *, fresh: bool = False) -> int:
    """Train and return the exit code. If the run is impossible, raises ValueError or ImportError before it starts."""
    if not fresh:
        check_unchanged(settings)
    if settings.tensorboard:
        check_tensorboard()
    return _on_torchruns_ranks(settings, fresh) if torchrun.is_active() else _on_ranks_of_its_own(settings, fresh)


def _on_torchruns_ranks(settings: Settings, fresh: bool) -> int:
    check_started(settings, int(os.environ["WORLD_SIZE"]))
    answers = None
    if os.environ["RANK"] == "0":
        with patch.dict(os.environ):  # without torchrun's variables, the chapters' checks can start ranks
            for name in _OF_TORCHRUN:
                os.environ.pop(name, None)
            answers = _answers(settings)
    try:
        outcome = launch(_on_a_rank, settings.ranks, args=(settings, answers, fresh), timeout=None)[0]
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # now, because Python would wait for threads, threads for other ranks, and torchrun for us
    if dist.get_rank() == 0:
        print(_summary(outcome))
    dist.destroy_process_group()
    return 0


def _on_a_rank(settings: Settings, answers: Any, fresh: bool) -> Outcome:
    if fresh and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":  # torchrun repeats the command
        if dist.get_rank() == 0:
            set_aside(Path(settings.folder))
        dist.barrier()
    if settings.layers == "mine":
        answers = gathered(answers, dist.group.WORLD)[0]
    return train(settings, answers, ConsoleLog(settings.last_step))


def _on_ranks_of_its_own(settings: Settings, fresh: bool) -> int:
    from tplab.capstone.data.prepare import prepare
    from tplab.capstone.watching.panel import panel

    folder = Path(settings.folder)
    with locked(folder):
        pass  # otherwise, it would be noticed only after the text is prepared, and by every rank
    answers = _answers(settings)
    if fresh and (aside := set_aside(folder)):
        print(f"Moved the previous run from {folder} to {aside}.")
    print(prepare(settings))
    tell = None if sys.stderr.isatty() else ConsoleLog(settings.last_step)
    with hand_on(folder), panel(settings):
        try:
            backend = backend_for(settings.ranks)
            outcome = launch(train, settings.ranks, args=(settings, answers, tell), backend=backend, timeout=None)[0]
        except RankError as error:
            diverged = error.cause_type == "FloatingPointError"  # what to do matters then, and not the line of code
            print(error.cause_message if diverged else error, file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("Ended without saving. The same command resumes from the newest checkpoint.", file=sys.stderr)
            return 130
    if tell is None and (samples := steps_of(read_log(folder), "sample")):
        print(shown(samples[-1]))
    print(_summary(outcome))
    return 0


def _answers(settings: Settings) -> Any:
    if settings.layers != "mine":
        return None
    from tplab.capstone.own_layers.find import find_answers

    return find_answers(settings.chapters, settings)


def _summary(outcome: Outcome) -> str:
    how = WAYS_TO_END[outcome.stopped].format(step=outcome.step)
    return f"{how} To write the report: python -m tplab.capstone report {outcome.folder}"
