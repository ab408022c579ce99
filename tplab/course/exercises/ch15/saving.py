"""The check for exercise 15.4, checkpoints that are complete after a kill, no matter when the kill happens.

A child process saves a checkpoint and is killed along the way. The check repeats this until the process has been killed
before each of its disk operations and in the middle of each file. After each kill, every directory that is named like a
checkpoint must be complete, `newest_checkpoint` must find the newest of them, and the next save must work.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tplab.course.checks import Claim, Differences, Observed, Question, Verdict, called_as, exercise, run_ranks, verify
from tplab.course.checks.describe import describe
from tplab.course.exercises.ch15.killing import halfway, in_this_process, killed_at

FOUND = "newest_checkpoint finds the newest one"
COMPLETE = "what is called a checkpoint is complete"
BESIDE = "the unfinished one lies in the folder"
GOES_ON = "the next save works"
EMPTY = "`write` is given an empty directory"
KEPT = "the newest ones are kept, and no leftovers"
LATER_STEP = "after a save of a later step"
OTHERS = "other files in the folder are left alone"
KILLS = "each of the kills"

FILES = {"model.bin": 3000, "optimizer.bin": 5000, "about.txt": 20}  # size of each file in bytes
MOST = 120  # maximum number of moments at which a save is killed
KEEP = 2
ERROR = "when `write` raises, its error comes out and no checkpoint"
FULL_DISK = "no space left on the device of this check"
NOTES = ("notes.txt", "step-notes.txt")  # other files in the checkpoint folder
DRAWINGS = "drawings.saving"  # another directory in the checkpoint folder


def content(name: str, step: int) -> bytes:
    return (f"{name} of step {step}. ".encode() * 400)[: FILES[name]]


class Writer:
    """The `write` argument for the learner's function. It fills a directory with the files of a step."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.given: list[Path] = []
        self.in_the_way = ""

    def __call__(self, path: Any) -> None:
        path = Path(path)
        self.given.append(path)
        lies = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
        self.in_the_way = f"{path.name} holds {lies[0]} already" if lies else ""
        for name in FILES:
            half = len(content(name, self.step)) // 2
            with (path / name).open("wb") as file:
                file.write(content(name, self.step)[:half])
                file.flush()
                halfway()
                file.write(content(name, self.step)[half:])


def name_of(step: int) -> str:
    return f"step-{step:06d}"


def step_of(path: Any) -> int | None:
    """Return the step if the path is named like a checkpoint, and None otherwise."""
    last = Path(path).name.removeprefix("step-") if isinstance(path, (str, Path)) else ""
    return int(last) if last.isdecimal() and name_of(int(last)) == Path(path).name else None


def damage(path: Path, step: int) -> str:
    """Describe what is wrong with a checkpoint. Returns "" if nothing is wrong."""
    if not path.is_dir():
        return f"{path.name} is not a directory"
    there = {entry.name for entry in path.iterdir()}
    for name in FILES:
        if name not in there:
            return f"{path.name} has no {name}"
        have = (path / name).read_bytes()
        if have != content(name, step):
            wrong = content(name, step).startswith(have)
            return f"{path.name}/{name} is {'cut off' if wrong else 'of another step'}"
    return f"{path.name} holds {sorted(there - set(FILES))[0]} too" if there - set(FILES) else ""


class Folder:
    """A folder of checkpoints, the learner's two functions, and what they did to the folder."""

    def __init__(self, path: Path, save: Callable[..., Any], newest: Callable[..., Any]) -> None:
        self.path, self._save, self._newest = path, save, newest
        self.given: list[Path] = []
        self.in_the_way = ""  # what the last save's directory already held

    def save(self, step: int, keep: int, writer_class: type[Writer] = Writer) -> None:
        writer = writer_class(step)
        with called_as(f"save_checkpoint(folder, {step}, write, keep={keep})"), in_this_process():
            self._save(self.path, step, writer, keep)
        self.given += writer.given
        self.in_the_way = writer.in_the_way

    def newest(self) -> Any:
        with called_as("newest_checkpoint(folder)"):
            return self._newest(self.path)

    def names(self) -> list[str]:
        return sorted(entry.name for entry in self.path.iterdir()) if self.path.exists() else []

    def damaged(self) -> str:
        return next(filter(None, (damage(self.path / name_of(step), step) for step in self.steps())), "")

    def steps(self) -> list[int]:
        """Return the steps of all entries that are named like a checkpoint."""
        return [step for name in self.names() if (step := step_of(name)) is not None]

    def not_newest(self, step: int | None) -> str:
        """Describe how `newest_checkpoint` fails, or return "". `step` is the newest one, or None if there is none."""
        found = self.newest()
        if step is None:
            return "" if found is None else f"{describe(str(found))} where there is none yet"
        if found is None:
            return f"None, where {name_of(step)} is there"
        if not isinstance(found, Path):
            ends = f"a text that ends in {Path(found).name}" if isinstance(found, str) else describe(found)
            return f"{ends}, not a Path"
        if step_of(found) != step or Path(found).resolve() != (self.path / name_of(step)).resolve():
            return f"{found.name}, where {name_of(step)} is the newest"
        return ""

    def not_kept(self, steps: Sequence[int]) -> str:
        there = [name for name in self.names() if name not in (*NOTES, DRAWINGS)]
        wanted = [name_of(step) for step in steps]
        return "" if there == sorted(wanted) else f"{there} where {sorted(wanted)} is right"


def without_kills(folder: Folder) -> dict[str, str]:
    """Test the names, order, and cleanup of consecutive saves. Testing stops after the first save that goes wrong."""
    said = {FOUND: folder.not_newest(None)}  # there is no folder yet
    folder.path.mkdir()
    for name in NOTES:
        (folder.path / name).write_text("other files may lie here")
    (folder.path / DRAWINGS).mkdir()
    (folder.path / DRAWINGS / "loss.svg").write_text("and other directories")
    said[FOUND] = said[FOUND] or folder.not_newest(None)
    steps = (90, 100, 110, 999_990, 1_000_000)
    for place, step in enumerate(steps):
        folder.save(step, KEEP)
        age = 10**9 - 1000 * place
        for saved in range(place + 1):  # in a copied folder, files may have any date
            if (folder.path / name_of(steps[saved])).is_dir():
                os.utime(folder.path / name_of(steps[saved]), (age, age))
                age -= 10
        said[EMPTY] = folder.in_the_way
        said[COMPLETE] = folder.damaged()
        said[KEPT] = folder.not_kept(steps[max(0, place + 1 - KEEP) : place + 1])
        said[FOUND] = said[FOUND] or ("" if said[KEPT] else folder.not_newest(step))
        gone = [name for name in (*NOTES, f"{DRAWINGS}/loss.svg") if not (folder.path / name).exists()]
        said[OTHERS] = f"{gone[0]} is gone after saving step {step}" if gone else ""
        outside = [path for path in folder.given if folder.path.resolve() not in path.resolve().parents]
        said[BESIDE] = "it lies outside, perhaps on another disk" if outside else ""
        if any(said.values()):
            return said
    return said


class Broken(Writer):
    """A `write` that raises after its first file, as if the disk were full."""

    def __call__(self, path: Any) -> None:
        name, half = next(iter(FILES)), Path(path)
        (half / name).write_bytes(content(name, self.step))
        raise OSError(FULL_DISK)


def with_an_error(folder: Folder, before: int, step: int) -> dict[str, str]:
    """Test a save whose `write` raises an error. The error must reach the caller, and no new checkpoint may appear."""
    try:
        folder.save(step, KEEP, Broken)
    except OSError as error:
        said = "" if FULL_DISK in str(error) else f"another error was raised: {error}"
    else:
        said = "save_checkpoint returned as if nothing had happened"
    if said:
        return {ERROR: said}
    wrong = folder.damaged() or ("" if step not in folder.steps() else f"{name_of(step)} is there")
    return {ERROR: wrong and f"after an error in `write`, {wrong}", FOUND: folder.not_newest(before)}


def with_kills(base: Folder, before: Sequence[int]) -> tuple[dict[str, str], int]:
    """Kill the next save (with keep=1) before each disk operation. Return what is wrong and the number of kills."""
    step = before[-1] + 10 if before else 10
    for place in range(1, MOST + 1):
        path = base.path.with_name(f"killed-{place}")
        shutil.copytree(base.path, path)
        folder = Folder(path, base._save, base._newest)
        moment = killed_at(place, partial(folder.save, step, 1))
        if not moment:
            return {}, place - 1
        said = after_a_kill(folder, before, step)
        shutil.rmtree(path)
        if any(said.values()):
            when = f"save of step {step} killed before its step {place} on the disk, when {moment}: "
            return {name: text and when + text for name, text in said.items()}, place
    return {GOES_ON: f"a save takes more than {MOST} steps on the disk"}, MOST


def after_a_kill(folder: Folder, before: Sequence[int], step: int) -> dict[str, str]:
    said = {COMPLETE: folder.damaged()}
    there = folder.steps()
    lost = before and before[-1] not in there and step not in there
    said[FOUND] = f"{name_of(before[-1])} is gone" if lost else ""
    if any(said.values()):
        return said
    said[FOUND] = folder.not_newest(max(there, default=None))
    if said[FOUND]:
        return said
    next_step = step + 10 if step in there else step  # the run continues from the newest checkpoint
    other = Folder(folder.path.with_name(f"{folder.path.name}-other"), folder._save, folder._newest)
    shutil.copytree(folder.path, other.path)
    said |= save_again(folder, next_step)
    if not any(said.values()):
        said |= save_again(other, next_step + 5)  # as in a run that now saves at different steps
        said[KEPT] = said[KEPT] and f"{LATER_STEP}, {said[KEPT]}"
    shutil.rmtree(other.path)
    return said


def save_again(folder: Folder, step: int) -> dict[str, str]:
    try:
        folder.save(step, 1)
    except Exception as error:
        return {GOES_ON: f"the save of step {step} raises {type(error).__name__}: {error}"[:200]}
    return {
        EMPTY: folder.in_the_way and f"in the next save {folder.in_the_way}",
        COMPLETE: folder.damaged(),
        KEPT: folder.not_kept([step]),
        FOUND: folder.not_newest(step),
    }


def attack(functions: tuple[Callable[..., Any], Callable[..., Any]]) -> Observed:
    """Run all tests of saving in a temporary folder, with the learner's two functions. Runs on every rank."""
    home = Path(tempfile.mkdtemp(prefix="tplab-saving-"))
    tempfile.tempdir = str(home)  # so that an answer's temporary files are removed too
    try:
        Folder(home / "new" / "checkpoints", *functions).save(10, KEEP)  # neither of these folders exists yet
        said = without_kills(Folder(home / "run", *functions))
        kills = 0
        for before in ((), (100,)) if not any(said.values()) else ():
            base = Folder(home / f"base-{len(before)}" / "checkpoints", *functions)
            base.path.mkdir(parents=True)
            for step in before:
                base.save(step, 1)
            found, count = with_kills(base, before)
            kills += count
            if any(found.values()):
                said |= found
                break
        if not any(said.values()):
            base = Folder(home / "error" / "checkpoints", *functions)
            base.save(100, KEEP)
            said |= {name: text for name, text in with_an_error(base, 100, 110).items() if text}
        return {name: Claim(text) for name, text in said.items()} | {KILLS: kills > 5}
    finally:
        shutil.rmtree(home, ignore_errors=True)


@exercise("15.4", "A checkpoint that is whole or not there")
def whole_or_not_there(save_checkpoint: Callable[..., Any], newest_checkpoint: Callable[..., Any]) -> Verdict:
    seen = run_ranks(attack, 1, (save_checkpoint, newest_checkpoint), question=CRASH)[0]
    if any(seen[name] for name in seen if name != KILLS):
        seen = {name: text for name, text in seen.items() if name != KILLS or text}
        expected: dict[str, Any] = {}
    else:
        expected = {KILLS: True}
    verify("15.4", 1, [seen], [expected], questions=QUESTIONS, alone=True)
    return Verdict("A process was killed at every moment of a save, and each time the newest complete one was found.")


CRASH = (
    "The folder may not be there yet, it may hold other files, and a directory that a killed save has left. Which line "
    "expects something else?"
)


def says(name: str, *words: str) -> Callable[[Differences], bool]:
    return lambda d: name in d.names and any(word in d.text(name) for word in words)


QUESTIONS = (
    Question(
        lambda d: ERROR in d.names,
        "Here `write` raised in the middle, as it does when the disk is full. What does your function do then? Does "
        "the error reach the caller, and which name does the incomplete directory have?",
    ),
    Question(
        lambda d: BESIDE in d.names,
        "`write` was given a directory outside of `folder`. A rename is one step only within one disk; from one to "
        "another it is a slow copy. Where should the unfinished directory lie?",
    ),
    Question(
        says(GOES_ON, "Exists", "not empty"),
        "The killed save has left its unfinished directory behind, and the next one finds it in its way. What does it "
        "do with it first?",
    ),
    Question(
        lambda d: EMPTY in d.names,
        "The directory that `write` was given held files of a killed save. With several ranks these may be shards of "
        "another run, and they become part of a checkpoint that looks complete. When does your function remove what a "
        "killed save has left?",
    ),
    Question(
        says(COMPLETE, "removes"),
        "An old checkpoint was being deleted, file by file, under its own name. How can its name be gone before the "
        "first of its files is?",
    ),
    Question(
        lambda d: COMPLETE in d.names,
        "Somebody who looks at the names now takes this directory for a checkpoint. Under which name should files be "
        "written while they are incomplete, and which single step gives them the right one?",
    ),
    Question(
        says(FOUND, "is gone"),
        "The process was killed when the old one was deleted already and the new one was not there yet. In which order "
        "do the two happen?",
    ),
    Question(
        says(FOUND, "1000000"),
        "Sorted as texts, step-1000000 comes before step-999990. By what are checkpoints sorted?",
    ),
    Question(
        says(FOUND, "not a Path"),
        "It is the right one, but a text. Whoever calls the function goes on with a path, its `.name` for one. What "
        "makes a `Path` of a text, or where did the path become one?",
    ),
    Question(
        lambda d: FOUND in d.names,
        "`newest_checkpoint` looks at what lies in the folder: complete checkpoints, an unfinished one, other files, "
        "with any dates. By what does it know a complete one, and by what the newest?",
    ),
    Question(
        lambda d: OTHERS in d.names,
        "Your function deleted a file or directory that it did not create. Which names does it create itself, and so "
        "may delete?",
    ),
    Question(
        says(KEPT, LATER_STEP),
        "A save was killed, and the next save was for a later step. What the killed save left behind is still there, "
        "and nothing will ever delete it. Your function only cleans up if it saves the same step again, but a "
        "restarted run may save at other steps. Which names should your function look for?",
    ),
    Question(
        lambda d: KEPT in d.names,
        "After a save the folder holds the `keep` newest checkpoints, that of this step among them, and nothing that a "
        "killed save has left. What is too much in it, or missing?",
    ),
)
