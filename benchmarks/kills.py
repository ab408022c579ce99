"""Kill ranks of a training run at random moments, resume it each time, and see whether anything was lost.

    python -m benchmarks.kills [--kills 30] [--tp 2] [--pp 1] [--dp 1] [--zero 0] [--llama] [--sequence-parallel]
                               [--micro-batch-size 4] [--steps 24] [--save-every 2] [--seed 0] [--at-once]

First, a small GPT, or one of the same kind as the preset "llama", is trained without interruption. Then it is trained
again, and at a random moment a random rank gets SIGKILL. The run resumes from its newest checkpoint, is killed again,
and so on, until it has finished. Then the next run begins, until the requested number of ranks has been killed. At the
end, the program prints where the kills hit, how many steps had to be repeated, and whether the losses of all steps are
bit-equal to those of the run that was never stopped.
"""

import argparse
import mmap
import os
import random
import shutil
import signal
import statistics
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

import tplab
from tplab import RankError, launch
from tplab.capstone.checkpoints.folders import StepFolders
from tplab.capstone.checkpoints.writer import Checkpoints
from tplab.capstone.data.prepare import prepare
from tplab.capstone.settings.io import PRESETS
from tplab.capstone.settings.settings import Settings
from tplab.capstone.training.log import read_log
from tplab.capstone.training.loop import train

PLACES = ("starting", "computing", "copying what is saved", "saving", "loading")


@dataclass
class Outcome:
    """What happened: where each kill hit, how many steps were repeated after it, and which runs didn't resume."""

    places: list[str] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    runs: int = 0
    equal: bool = True


class Notes:
    """Shared memory in a file, in which each rank of a launch notes its process id and what it's doing.

    Each rank has four words: its process id, its place (an index of `PLACES`), whether one of its threads is saving,
    and a spare word.
    """

    def __init__(self, path: Path, ranks: int) -> None:
        with open(os.open(path, os.O_RDWR | os.O_CREAT), "r+b") as file:
            os.ftruncate(file.fileno(), 16 * ranks)  # whichever rank is first; the others change nothing
            self.words = memoryview(mmap.mmap(file.fileno(), 0)).cast("I")

    def pids(self) -> list[int]:
        return list(self.words[0::4])

    def place(self, rank: int) -> str:
        place = PLACES[self.words[4 * rank + 1]]
        beside = place != "saving" and self.words[4 * rank + 2]
        return f"{place}, saving in the background" if beside else place


def noted(notes_at: Path, settings: Settings) -> float:
    """Train on a rank that notes what it's doing, and return the seconds that the training took."""
    words, start = Notes(notes_at, settings.ranks).words, 4 * dist.get_rank()

    def note(name: str, place: str) -> None:
        original = getattr(Checkpoints, name)

        def method(self: Checkpoints, *args: Any) -> Any:
            index = start + (1 if threading.current_thread() is threading.main_thread() else 2)
            words[index] = PLACES.index(place)
            try:
                return original(self, *args)
            finally:
                words[index] = PLACES.index("computing") if index == start + 1 else 0

        setattr(Checkpoints, name, method)

    for name, place in (("latest", "starting"), ("load", "loading"), ("_stage", PLACES[2]), ("_write", "saving")):
        note(name, place)
    words[start] = os.getpid()
    began = time.monotonic()
    train(settings)
    return time.monotonic() - began


def try_kills(root: Path, *, kills: int, seed: int = 0, **changes: Any) -> Outcome:
    """Train and kill one rank at a time, at random moments, until `kills` ranks have been killed.

    changes: values for the settings that differ from those in `settings_for`
    """
    draw, outcome = random.Random(seed), Outcome()
    whole = settings_for(root / "never-stopped", **changes)
    prepare(whole)  # tokenizes the text, for all runs
    seconds = launch(noted, whole.ranks, args=(root / "notes", whole), timeout=None)[0]
    expected = losses(Path(whole.folder))
    of_a_step = statistics.mean(row["seconds"] for row in read_log(Path(whole.folder)) if row["kind"] == "step")
    before = seconds - whole.steps * of_a_step
    while len(outcome.places) < kills:
        outcome.runs += 1
        settings = settings_for(root / f"run{outcome.runs}", **changes)
        _one_run(settings, outcome, draw, kills, before, of_a_step)
        outcome.equal &= losses(Path(settings.folder)) == expected
        shutil.rmtree(settings.folder)
    return outcome


def _one_run(
    settings: Settings, outcome: Outcome, draw: random.Random, kills: int, before: float, of_a_step: float
) -> None:
    """Run one training until it has finished, and kill its ranks as long as there are kills left.

    Each kill hits at a random moment between the newest checkpoint and the end, or while the run starts. The start
    counts as one more step.
    """
    folder = Path(settings.folder)
    folder.mkdir()
    for attempt in range(kills + 2):
        notes = Notes(folder / f"notes{attempt}", settings.ranks)
        newest = max(StepFolders(folder / "checkpoints").steps(), default=0)
        step = draw.randrange(newest - 1, settings.steps)
        seconds = draw.uniform(0, before if step < newest else of_a_step)
        killer = Killer(notes, folder, step if step >= newest else None, seconds, draw.randrange(settings.ranks))
        if len(outcome.places) < kills:
            killer.start()
        failure = None
        try:
            launch(noted, settings.ranks, args=(folder / f"notes{attempt}", settings), timeout=None)
        except RankError as error:
            failure = str(error)
        killer.end()
        if failure is None:
            break
        if not killer.has_killed:
            outcome.failures.append(failure)
            break
        outcome.places.append(notes.place(killer.victim))
        print(f"kill {len(outcome.places)} in run {outcome.runs}: {outcome.places[-1]}", flush=True)
    outcome.lost += lost(folder)


class Killer(threading.Thread):
    """Kills a rank `seconds` after the run has logged `step`, or after all its ranks have started if `step` is None."""

    def __init__(self, notes: Notes, folder: Path, step: int | None, seconds: float, victim: int) -> None:
        super().__init__(daemon=True)
        self.notes, self.folder, self.step, self.seconds, self.victim = notes, folder, step, seconds, victim
        self.starts = len([row for row in read_log(folder) if row["kind"] == "start"])  # before this start
        self.over, self.has_killed = threading.Event(), False

    def end(self) -> None:
        self.over.set()
        if self.ident:
            self.join()

    def run(self) -> None:
        while not self._has_come() and not self.over.wait(0.005):
            pass
        if not self.over.wait(self.seconds):
            with suppress(ProcessLookupError):
                os.kill(self.notes.pids()[self.victim], signal.SIGKILL)
                self.has_killed = True

    def _has_come(self) -> bool:
        if self.step is None:
            return all(self.notes.pids())
        rows = read_log(self.folder)
        done = max([row["step"] - (row["kind"] == "start") for row in rows[-3:] if "step" in row], default=0)
        return len([row for row in rows if row["kind"] == "start"]) > self.starts and done >= self.step


def losses(folder: Path) -> dict[int, float]:
    """Return the loss of each step. If a step was repeated, it's the loss of the last time."""
    return {row["step"]: row["loss"] for row in read_log(folder) if row["kind"] == "step"}


def lost(folder: Path) -> list[int]:
    """Return, for each time that the run resumed, how many finished steps it had to repeat."""
    found, taken = [], 0
    for number, row in enumerate(row for row in read_log(folder) if row["kind"] in ("start", "step")):
        if row["kind"] == "step":
            taken = row["step"]
        elif number:
            found.append(taken - (row["resumed_from"] or 0))
            taken = row["resumed_from"] or 0
    return found


def report(outcome: Outcome) -> str:
    """Return the figures as text."""
    places = "\n".join(f"  {count:4}  {place}" for place, count in Counter(outcome.places).most_common())
    steps = outcome.lost or [0]
    return (
        f"{len(outcome.places)} kills in {outcome.runs} runs; the rank that was hit was\n{places}\n"
        f"steps taken again after a kill: {max(steps)} at most, {statistics.mean(steps):.1f} on average\n"
        f"losses of all steps bit-equal to those of the run never stopped: {'yes' if outcome.equal else 'NO'}\n"
        f"runs that did not go on: {len(outcome.failures)}" + "".join(f"\n{text}" for text in outcome.failures)
    )


KIND = ("gated", "bias", "tied_embedding", "learned_positions", "rotary_base", "norm_eps")
LLAMA: dict[str, Any] = {"num_kv_heads": 2, "ffn_hidden_size": 48} | {
    name: getattr(PRESETS["llama"], name) for name in KIND
}


def settings_for(folder: Path, **changes: Any) -> Settings:
    """Return settings for a tiny GPT that trains on some of tplab's own source files. A step takes milliseconds."""
    tiny: dict[str, Any] = {
        "data": str(Path(tplab.__file__).parent / "tensor"), "vocab_size": 300, "num_layers": 2,
        "hidden_size": 32, "num_heads": 4, "seq_length": 32, "dropout": 0.1, "batch_size": 8, "micro_batch_size": 4,
        "warmup_steps": 2, "evaluate_every": 0, "evaluation_batches": 1, "sample_tokens": 0,
    }  # fmt: skip
    return Settings(**{**tiny, "folder": str(folder), **changes})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    for name, size in (("tp", 2), ("pp", 1), ("dp", 1), ("zero", 0), ("micro-batch-size", 4)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--llama", action="store_true", help="of the same kind as the preset, but smaller")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", action="store_true", help="train on when a checkpoint is written, not meanwhile")
    options = parser.parse_args()
    same = ("tp", "pp", "dp", "zero", "micro_batch_size", "sequence_parallel", "steps", "save_every")
    chosen = {name: getattr(options, name) for name in same} | {"async_save": not options.at_once}
    print(", ".join(f"{name}={value}" for name, value in chosen.items()) + ", llama" * options.llama)
    chosen |= LLAMA if options.llama else {}
    with tempfile.TemporaryDirectory() as root:
        outcome = try_kills(Path(root), kills=options.kills, seed=options.seed, **chosen)
    print(report(outcome))


if __name__ == "__main__":
    main()
