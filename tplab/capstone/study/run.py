"""Study a run: time it on fewer ranks and with different layers, and measure memory, traffic and one step in detail.

    python -m tplab.capstone study --preset laptop
    python -m tplab.capstone study --folder runs/laptop --only memory scaling

Each part (`tplab.capstone.study.parts`) trains for a few steps and prints its result in one line. The result is saved
in measurements.json immediately, along with the `MATTER` settings used. If a run resumes with a different number of
ranks or different layers, the next study measures its parts again.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tplab.capstone.command import carry_out, settings_from
from tplab.capstone.own_layers.find import find_answers
from tplab.capstone.report.run import MEASUREMENTS, measured_with, read_measurements
from tplab.capstone.settings.io import add_arguments
from tplab.capstone.settings.run_folder import check_unchanged
from tplab.capstone.settings.settings import MATTER, Settings
from tplab.capstone.study.parts import PARTS, Budget, Study
from tplab.capstone.training.log import read_log, steps_of
from tplab.capstone.watching.panel import run
from tplab.common.files import replace
from tplab.runtime import RankError


def study(
    settings: Settings,
    *,
    only: Sequence[str] = (),
    budget: Budget | None = None,
    answers: Any = None,
    say: Callable[[str], None] = print,
) -> Path:
    """Finish the run if necessary, then measure the parts that are missing or were measured with different settings.

    Returns the path of measurements.json.

    only       measure just these parts, even if they were measured before, and don't finish the run
    answers    the learner's code. If None, it's read from `settings.chapters` when needed
    say        called with one line per part. A part whose ranks fail (out of GPU memory, for example) isn't saved
    Raises ValueError for an unknown part, and for settings that don't match the run in the folder.
    """
    if unknown := sorted(set(only) - set(PARTS)):
        raise ValueError(f"a study has no parts called {unknown}. Its parts are {', '.join(PARTS)}")
    check_unchanged(settings)
    folder = Path(settings.folder)
    if settings.layers == "mine" and answers is None:
        answers = find_answers(settings.chapters, settings)
    if not only and not is_done(settings):
        run(settings, answers)
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in PARTS.items():
        before = read_measurements(folder).get(name)
        if name in only or (not only and (before is None or measured_with(before, settings))):
            began = time.monotonic()
            try:
                measured = part(Study(settings, budget or Budget(), answers))
            except RankError as error:
                say(f"{name}: not measured, because of {error.cause_type}: {error.cause_message.partition(chr(10))[0]}")
                continue
            measured |= {"settings": {key: getattr(settings, key) for key in MATTER}}
            replace(folder / MEASUREMENTS, json.dumps(read_measurements(folder) | {name: measured}).encode())
            says = measured.get("says") or f"not measured ({measured['why']})"
            say(f"{name}: {says} ({time.monotonic() - began:.0f} s)")
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
