"""The check of exercise 15.1, a checkpoint that's whole or not there, no matter when the power fails.

Two ranks, which take turns in a child process, save a checkpoint and are killed along the way. The check repeats this
until they've been killed before each of their disk operations and in the middle of each file. After each kill, every
folder that's named like a checkpoint must be complete, `newest_checkpoint` must find the newest one, and the next save
must work.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tplab.course.checks.describe import describe
from tplab.course.checks.forms.alone import Alone, Call, one
from tplab.course.checks.observation import Claim, Observed, Seen
from tplab.course.checks.run_answer import called_as, run_ranks
from tplab.course.checks.trials import exercise
from tplab.course.exercises.ch15.killing import halfway, in_this_process, killed_at
from tplab.course.exercises.ch15.turns import Group, Stuck, take_turns

FOUND = "newest_checkpoint finds the newest one"
A_PATH = "newest_checkpoint returns a Path"
BY_NUMBER = "a step's number may have more than six digits"
COMPLETE = "what's named like a checkpoint is complete"
DELETED = "a checkpoint loses its name before its files"
NOT_LOST = "there's always a checkpoint"
BESIDE = "the unfinished one lies in the folder"
THERE = "`write` receives an empty folder"
TOGETHER = "no rank waits for a barrier that others don't enter"
GOES_ON = "the next save works"
KEPT = "the newest ones are kept"
NOTHING_LEFT = "nothing is left of a killed save"
OTHERS = "other files in the folder are left alone"
REFUSES = "a step that has a checkpoint is refused"
RAISES = "an error in `write` reaches the caller"
KILLS = "a save consists of many operations"

FILES = ("weights", "state")  # of each rank
RANKS, KEEP = 2, 2
MOST = 120  # maximum number of moments at which a save is killed
FULL_DISK = "no space left on the device of this check"
# What else lies in the folder
NOTES = ("notes.txt", "step-notes.txt")
DRAWINGS = ("drawings.saving", "drawings.deleting", "step-drawings", "step-12")


def content(name: str, step: int) -> bytes:
    return f"{name} of step {step}. ".encode() * 100


def name_of(step: int) -> str:
    return f"step-{step:06d}"


def step_of(path: Any) -> int | None:
    """Return the step if the path is named like a checkpoint, and None otherwise."""
    last = Path(path).name.removeprefix("step-") if isinstance(path, (str, Path)) else ""
    return int(last) if last.isdecimal() and name_of(int(last)) == Path(path).name else None


class Writer:
    """The `write` argument for the learner's function. Each rank writes its files of a step, in two halves each."""

    def __init__(self, step: int, rank: Callable[[], int], fails: bool = False) -> None:
        self.step, self.rank, self.fails = step, rank, fails
        self.given: list[Path] = []
        self.not_empty = self.too_early = ""

    def __call__(self, path: Any) -> None:
        path, mine = Path(path), [f"{name}-{self.rank()}" for name in FILES]
        self.given.append(path)
        if path.with_name(name_of(self.step)).exists():
            self.too_early = f"{name_of(self.step)} is there before rank {self.rank()} has written its files"
        if not path.is_dir():
            self.not_empty = f"{path.name} isn't there when rank {self.rank()} wants to write"
            if self.fails:  # a rank whose own `write` failed may have removed the folder
                raise FileNotFoundError(FULL_DISK)
            return
        others = [entry.name for entry in path.iterdir() if entry.name.partition("-")[0] not in FILES]
        stale = [entry.name for entry in path.iterdir() if entry.name in mine]
        self.not_empty = self.not_empty or (f"{path.name} contains {(stale + others)[0]}" if stale + others else "")
        for name in mine:
            data = content(name, self.step)
            with (path / name).open("wb") as file:
                file.write(data[: len(data) // 2])
                file.flush()
                halfway()
                if self.fails:
                    raise OSError(FULL_DISK)
                file.write(data[len(data) // 2 :])


def damage(path: Path, step: int, ranks: int) -> str:
    """Describe what's wrong with a checkpoint. Returns "" if nothing is wrong."""
    if not path.is_dir():
        return f"{path.name} isn't a folder"
    there, wanted = {entry.name for entry in path.iterdir()}, {f"{n}-{r}" for n in FILES for r in range(ranks)}
    for name in sorted(wanted):
        if name not in there:
            return f"{path.name} has no {name}"
        if (have := (path / name).read_bytes()) != content(name, step):
            return f"{path.name}/{name} is {'half written' if content(name, step).startswith(have) else 'wrong'}"
    return f"{path.name} also contains {min(there - wanted)}" if there - wanted else ""


class Folder:
    """A folder of checkpoints, the learner's two functions, and what they did to the folder.

    order: in which order the ranks run between two barriers
    group: the group that they form, or None for the default group
    """

    def __init__(
        self, path: Path, functions: tuple[Any, Any], order: Sequence[int] = (0, 1), group: Group | None = None
    ) -> None:
        self.path, self.functions, self.order, self.group = path, functions, order, group
        self.given: list[Path] = []
        self.not_empty = self.too_early = ""
        self.interleaved = False

    def at(self, path: Path) -> "Folder":
        return Folder(path, self.functions, self.order, self.group)

    def outcomes(self, step: int, keep: int, fails: bool = False) -> list[BaseException | None]:
        """Save a checkpoint as all ranks, and return what each of them has raised."""
        writer = Writer(step, self.rank, fails)

        def work() -> None:
            with called_as(f"save_checkpoint(folder, {step}, write, keep={keep}, group=group)"):
                self.functions[0](self.path, step, writer, keep, self.group)

        with in_this_process():
            found = take_turns(work, self.order, self.group, interleaved=self.interleaved)
        self.given += writer.given
        self.not_empty, self.too_early = writer.not_empty, writer.too_early
        return found

    def rank(self) -> int:
        """Return the rank that has its turn, in the group."""
        group: Any = self.group
        return dist.get_rank(group)

    def save(self, step: int, keep: int) -> str:
        """Save a checkpoint. Returns which rank got stuck, or "". Raises what else a rank has raised."""
        found = self.outcomes(step, keep)
        if errors := [error for error in found if error is not None and not isinstance(error, Stuck)]:
            raise errors[0]
        return next((f"rank {rank} {error}" for rank, error in enumerate(found) if error), "")

    def newest(self) -> Any:
        with called_as("newest_checkpoint(folder)"):
            return self.functions[1](self.path)

    def names(self) -> list[str]:
        return sorted(entry.name for entry in self.path.iterdir()) if self.path.exists() else []

    def steps(self) -> list[int]:
        """Return the steps of all entries that are named like a checkpoint."""
        return [step for name in self.names() if (step := step_of(name)) is not None]

    def damaged(self) -> str:
        found = (damage(self.path / name_of(step), step, len(self.order)) for step in self.steps())
        return next(filter(None, found), "")

    def not_newest(self, step: int | None) -> dict[str, str]:
        """Say how `newest_checkpoint` fails. `step` is the newest one, or None if there is none."""
        found = self.newest()
        if found is None:
            return {FOUND: "" if step is None else f"it returned None, but {name_of(step)} is there"}
        if step is None:
            return {FOUND: f"it returned {describe(str(found))}, but there is none yet"}
        if not isinstance(found, Path):
            what = f"a string that ends in {Path(found).name}" if isinstance(found, str) else describe(found)
            return {A_PATH: f"it returned {what}"}
        right = found.resolve() == (self.path / name_of(step)).resolve()
        name = BY_NUMBER if step >= 10**6 else FOUND
        return {name: "" if right else f"it returned {found.name}, but {name_of(step)} is the newest"}

    def not_kept(self, steps: Sequence[int]) -> str:
        there = [name for name in self.names() if name not in (*NOTES, *DRAWINGS)]
        wanted = sorted(map(name_of, steps))
        return "" if there == wanted else f"there are {there}, but {wanted} should be there"


def without_kills(folder: Folder) -> dict[str, str]:
    """Test the names, order, and cleanup of consecutive saves. Testing stops after the first save that goes wrong."""
    said = folder.not_newest(None)  # there's no folder yet
    steps = (90, 100, 110, 999_990, 1_000_000)
    for place, step in enumerate(steps):
        try:
            said[TOGETHER] = folder.save(step, KEEP)
        except ValueError:
            if not folder.damaged():
                raise
            return said | {COMPLETE: f"when another rank looks for it, {folder.damaged()}"}
        said[COMPLETE] = folder.too_early
        outside = [path for path in folder.given if folder.path.resolve() not in path.resolve().parents]
        said[BESIDE] = "it lies outside, perhaps on another disk" if outside else ""
        said[THERE] = "" if folder.too_early else folder.not_empty
        if any(said.values()):
            return said
        if place == 0 and folder.path.is_dir():
            add_others(folder.path)
        said[COMPLETE] = folder.damaged()
        kept = BY_NUMBER if step >= 10**6 else KEPT  # the earlier saves have kept the right ones
        said[kept] = folder.not_kept(steps[max(0, place + 1 - KEEP) : place + 1])
        said |= {} if any(said.values()) else folder.not_newest(step)
        gone = [
            name for name in (*NOTES, *(f"{each}/loss.svg" for each in DRAWINGS)) if not (folder.path / name).exists()
        ]
        said[OTHERS] = f"{gone[0]} is gone after saving step {step}" if gone else ""
        if any(said.values()):
            return said
        for age, saved in enumerate(reversed(steps[: place + 1])):  # in a copied folder, files may have any date
            if (folder.path / name_of(saved)).is_dir():
                os.utime(folder.path / name_of(saved), (10**9 + age, 10**9 + age))
        said |= folder.not_newest(step)
    return said if any(said.values()) else said | refusal(folder, steps[-1])


def add_others(path: Path) -> None:
    """Put files and a folder that aren't the learner's next to the checkpoints."""
    for name in NOTES:
        (path / name).write_text("other files may lie here")
    for name in DRAWINGS:
        (path / name).mkdir()
        (path / name / "loss.svg").write_text("and other folders")


def refusal(folder: Folder, step: int) -> dict[str, str]:
    """Test that all ranks refuse to save a step that has a checkpoint, in words, and leave the checkpoint alone."""
    (folder.path / name_of(step) / "touched").write_text("to see whether this checkpoint is replaced")
    for rank, error in enumerate(folder.outcomes(step, KEEP)):
        if isinstance(error, Stuck):
            return {TOGETHER: f"rank {rank} {error}"}
        if not isinstance(error, ValueError) or str(step) not in str(error):
            raised = f"raised {describe(error)}" if error else "raised nothing"
            return {REFUSES: f"for step {step}, which has a checkpoint, rank {rank} {raised}"}
    there = (folder.path / name_of(step) / "touched").exists()
    return {REFUSES: "" if there else "the ranks refused, but the checkpoint isn't the same anymore"}


def with_an_error(folder: Folder, before: int, step: int) -> dict[str, str]:
    """Test a save whose `write` raises an error. The error must reach the caller, and no new checkpoint may appear."""
    for rank, error in enumerate(folder.outcomes(step, KEEP, fails=True)):
        if FULL_DISK not in str(error):
            return {RAISES: f"on rank {rank}, {describe(error) if error else 'no error'} reached the caller"}
    wrong = folder.damaged() or ("" if step not in folder.steps() else f"{name_of(step)} is there")
    return {RAISES: wrong} if wrong else folder.not_newest(before)


def with_kills(base: Folder, before: Sequence[int]) -> tuple[dict[str, str], int]:
    """Kill the next save (with keep=1) before each disk operation. Return what's wrong and the number of kills."""
    step = before[-1] + 10 if before else 10
    for place in range(1, MOST + 1):
        folder = base.at(base.path.with_name(f"killed-{place}"))
        shutil.copytree(base.path, folder.path)
        moment = killed_at(place, partial(folder.save, step, 1))
        if not moment:
            return {}, place - 1
        said = after_a_kill(folder, before, step)
        shutil.rmtree(folder.path)
        if any(said.values()):
            when = f"save of step {step} was killed before its operation {place} on the disk, when {moment}: "
            names = {COMPLETE: DELETED} if "removes" in moment else {}
            return {names.get(name, name): text and when + text for name, text in said.items()}, place
    return {GOES_ON: f"a save takes more than {MOST} operations on the disk"}, MOST


def after_a_kill(folder: Folder, before: Sequence[int], step: int) -> dict[str, str]:
    said, there = {COMPLETE: folder.damaged()}, folder.steps()
    lost = before and before[-1] not in there and step not in there
    said[NOT_LOST] = f"{name_of(before[-1])} is gone" if lost else ""
    said |= {} if any(said.values()) else folder.not_newest(max(there, default=None))
    if any(said.values()):
        return said
    next_step = step + 10 if step in there else step  # the run continues from the newest checkpoint
    other = folder.at(folder.path.with_name(f"{folder.path.name}-other"))
    shutil.copytree(folder.path, other.path)
    other.interleaved = True
    said |= save_again(folder, next_step)
    if not any(said.values()):
        said |= save_again(other, next_step + 5)  # as in a run that now saves at different steps
    shutil.rmtree(other.path)
    return said


def save_again(folder: Folder, step: int) -> dict[str, str]:
    try:
        stuck = folder.save(step, 1)
    except Exception as error:
        return {GOES_ON: f"the save of step {step} raises {type(error).__name__}: {error}"[:200]}
    empty = f"in the next save, {folder.not_empty}" if folder.not_empty else ""
    said = {TOGETHER: stuck, THERE: empty, COMPLETE: "" if empty else folder.damaged()}
    if any(said.values()):
        return said
    left, name = folder.not_kept([step]), KEPT if folder.steps() != [step] else NOTHING_LEFT
    return {name: f"after the next save, of step {step}, {left}" if left else ""} | folder.not_newest(step)


def attack(functions: tuple[Any, Any]) -> Observed:
    """Run all tests of saving in a temporary folder, with the learner's two functions."""
    home = Path(tempfile.mkdtemp(prefix="tplab-saving-"))
    tempfile.tempdir = str(home)  # so that an answer's temporary files are removed, too
    names = (
        TOGETHER, BESIDE, THERE, COMPLETE, DELETED, NOT_LOST, A_PATH, FOUND, BY_NUMBER, OTHERS, KEPT, NOTHING_LEFT,
        GOES_ON, REFUSES, RAISES,
    )  # fmt: skip
    claims = dict.fromkeys(names, "")
    try:
        worlds: tuple[tuple[list[int], Group | None], ...] = (
            ([0], None),
            ([0, 1], None),
            ([1, 0], None),
            ([0, 1], Group(RANKS, first=2)),
            ([0, 1], None),
        )
        for number, (order, group) in enumerate(worlds):
            folder = Folder(home / f"run-{number}" / "new" / "checkpoints", functions, order, group)
            folder.interleaved = number == 4
            said = without_kills(folder)
            if any(said.values()):
                return as_observed(claims | said)
        kills = 0
        for before, turns in (((), (0, 1)), ((100,), (0, 1)), ((100,), (1, 0))):
            base = Folder(home / f"base-{len(before)}-{turns[0]}" / "checkpoints", functions, turns)
            base.path.mkdir(parents=True)
            for step in before:
                base.save(step, 1)
            said, count = with_kills(base, before)
            kills += count
            if any(said.values()):
                return as_observed(claims | said)
        base = Folder(home / "error" / "checkpoints", functions)
        base.save(100, KEEP)
        return as_observed(claims | with_an_error(base, 100, 110), kills > 10)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def as_observed(said: dict[str, str], many: bool = True) -> Observed:
    """Return the claims. `many` is only known if all of them hold."""
    return {name: Claim(text) for name, text in said.items()} | {KILLS: many}


def run(functions: tuple[Any, Any], call: Call) -> Seen:
    return one(run_ranks(attack, 1, functions)[0])


exercise(
    "15.1", "A checkpoint that's whole or not there", takes=["save_checkpoint", "newest_checkpoint"],
    trials=[
        Alone(
            calls=lambda generator: [Call(torch.empty(0), "save_checkpoint on 1 and 2 ranks")], run=run,
            right=lambda call: one({KILLS: True}),
        )
    ],
    passed="Two ranks were killed at every moment of a save, and each time, the newest complete checkpoint was found.",
)  # fmt: skip
