"""Train a GPT on this machine's GPUs, or on its CPU, with tensor, pipeline and data parallelism.

    python -m tplab.capstone --preset laptop
    python -m tplab.capstone --preset llama --tp 1 --pp 2
    torchrun --standalone --nproc-per-node 8 -m tplab.capstone --tp 8
    torchrun --standalone --nproc-per-node 8 -m tplab.capstone --tp 2 --pp 2 --dp 2 --zero 1
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST -m tplab.capstone --tp 8 --dp 2

Without torchrun, the command starts tp · pp · dp processes itself. If there are several machines, run the same command
on each. HOST is the name of one of them, and --folder has to be on a disk that all of them share.

To stop a run, press Ctrl-C, or with torchrun, `touch FOLDER/stop`. It then saves a checkpoint. Run the same command
again to resume from the newest checkpoint.

If a rank fails, torchrun ends all of them. With --max-restarts 3, it restarts them up to three times, and they resume
from the newest checkpoint.

Without --preset and --config, the settings are those of the run in --folder, if there is one. Otherwise, a preset is
chosen to fit this machine. The exit code is 0 if the run is finished or was stopped on request after saving a
checkpoint, 1 if it failed, 2 if the command can't be carried out, and 130 if a second Ctrl-C ended it without saving.

other commands:
    python -m tplab.capstone sample FOLDER     generate text with the newest checkpoint of a run
    python -m tplab.capstone report FOLDER     write a report about a run
    python -m tplab.capstone study [flags]     finish the run, then train on fewer ranks for comparison
"""

import argparse
import os
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tplab.capstone.data.prepare import prepare
from tplab.capstone.own_layers.find import find_answers
from tplab.capstone.settings.io import add_arguments, preset_for, read_settings, settings_of
from tplab.capstone.settings.run_folder import SETTINGS, check_unchanged, locked
from tplab.capstone.settings.settings import Settings
from tplab.capstone.training.console import ConsoleLog
from tplab.capstone.training.loop import ASKED, Outcome, train
from tplab.capstone.training.ranks import check_started
from tplab.capstone.training.stopping import stops_on_signal
from tplab.checkpoint.files import gathered
from tplab.runtime import RankError, launch, torchrun
from tplab.runtime.devices import backend_for

_OTHERS = {
    "sample": "tplab.capstone.writing", "report": "tplab.capstone.report", "study": "tplab.capstone.study.run",
}  # fmt: skip
_WAYS_TO_END = {
    "done": "All {step} steps are done.",
    "stop_after": "Stopped after step {step}. Run the same command without --stop-after to continue.",
    ASKED: "Stopped and saved a checkpoint after step {step}. Run the same command again to continue.",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the given command line and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments.pop(0) if arguments[:1] and arguments[0] in _OTHERS else ""
    try:
        if name:  # imported here because training doesn't need it
            return import_module(_OTHERS[name]).main(arguments)
        return carry_out(settings_from(vars(parser().parse_args(arguments))))
    except (ValueError, OSError, ImportError) as error:
        if torchrun.local_rank() == 0:  # once per machine, because only one machine may be misconfigured
            where = f" (on {socket.gethostname()})" if torchrun.is_active() else ""
            print(f"python -m tplab.capstone{name and ' ' + name}{where}: {error}", file=sys.stderr)
        return 2
    except RankError as error:
        diverged = error.cause_type == "FloatingPointError"  # in this case, the message alone says what to do
        print(error.cause_message if diverged else error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        trains = name in ("", "study")
        said = "Ended without saving. The same command resumes from the newest checkpoint." if trains else ""
        print(said, file=sys.stderr)
        return 130


def parser() -> argparse.ArgumentParser:
    """Create the argument parser for a training run."""
    made = argparse.ArgumentParser(
        prog="python -m tplab.capstone",
        usage="python -m tplab.capstone [--preset NAME] [--config FILE] [flags]",
        description=__doc__,
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=34, width=110),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    add_arguments(made)
    return made


def settings_from(given: Mapping[str, Any]) -> Settings:
    """Build the settings from the flags and a preset or file, the run in the folder, or a preset for this machine."""
    if "preset" in given or "config" in given:
        return settings_of(given)
    if "folder" in given and (there := Path(given["folder"], SETTINGS)).exists():
        return settings_of(given, replace(read_settings(there), stop_after=None))
    gpus = torch.cuda.device_count()
    sizes = [given[name] for name in ("tp", "pp", "dp") if name in given]
    ranks = prod(sizes) if sizes else None
    if torchrun.is_active():  # on one or more machines
        ranks = int(os.environ["WORLD_SIZE"])
        gpus *= ranks // int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    tp = {} if "tp" in given or not sizes else {"tp": 1}
    return settings_of(tp | dict(given), preset_for(gpus, ranks))


def carry_out(settings: Settings) -> int:
    """Train and return the exit code. If the run isn't possible, raises ValueError or OSError before it starts."""
    check_unchanged(settings)
    return _on_torchruns_ranks(settings) if torchrun.is_active() else _on_ranks_of_its_own(settings)


def _on_torchruns_ranks(settings: Settings) -> int:
    check_started(settings, int(os.environ["WORLD_SIZE"]))
    answers = _answers(settings) if os.environ["RANK"] == "0" else None
    try:
        outcome = launch(_on_a_rank, settings.ranks, args=(settings, answers), timeout=None)[0]
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # sys.exit would wait for threads that wait for other ranks, while torchrun waits for us
    if dist.get_rank() == 0:
        print(_summary(outcome))
    dist.destroy_process_group()
    return 0


def _on_a_rank(settings: Settings, answers: Any) -> Outcome:
    if settings.layers == "mine":
        answers = gathered(answers, None)[0]
    return train(settings, answers, ConsoleLog(settings.last_step))


def _on_ranks_of_its_own(settings: Settings) -> int:
    folder = Path(settings.folder)
    with locked(folder):
        pass  # without this check, every rank would fail, and only after the text is prepared
    answers = _answers(settings)
    print("Preparing the text. The first run takes longer, because it turns the text into tokens.", flush=True)
    print(prepare(settings))
    tell, backend = ConsoleLog(settings.last_step), backend_for(settings.ranks)
    with stops_on_signal(folder):
        outcome = launch(train, settings.ranks, args=(settings, answers, tell), backend=backend, timeout=None)[0]
    print(_summary(outcome))
    return 0


def _answers(settings: Settings) -> Any:
    return find_answers(settings.chapters, settings) if settings.layers == "mine" else None


def _summary(outcome: Outcome) -> str:
    how = _WAYS_TO_END[outcome.stopped].format(step=outcome.step)
    return f"{how} To write the report: python -m tplab.capstone report {outcome.folder}"
