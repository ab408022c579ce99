"""Run workers, each of which checks one notebook, in parallel. A worker that exceeds a limit is stopped.

    run(works, jobs=4, limits=limits, ...)     yields (work, outcome) as each one finishes

When a worker is stopped, so is every process that it started. A submission may do anything that its user may do, so
nothing here relies on its cooperation. We read its output without waiting for it, and measure from outside what it
uses. On Linux, this process also adopts any process that leaves its worker's process tree, and ends it.
"""

import json
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from tplab.course.grading.check_notebook import STATUSES, Verdict
from tplab.course.tools.grading_many.limits import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    Limits,
    environment,
    prctl,
)
from tplab.course.tools.grading_many.submissions import Notebook, copy
from tplab.course.tools.grading_many.worker import COMMAND, order

POLL = 0.2  # seconds between two measurements of what the workers use
MOST_TOLD = 20_000_000  # bytes that a worker may send
MOST_ENTRIES = 50_000  # files and folders that a submission may make
KILLS = 50  # attempts to end a submission that keeps starting processes
SIGKILL = 9


@dataclass(frozen=True)
class Work:
    """A notebook to check against a chapter. `exercises` are the numbers and titles of the chapter's exercises."""

    notebook: Notebook
    reference: Path
    exercises: dict[str, str]
    key: str
    alone: bool = False  # whether to run it after all others, with no other check next to it


@dataclass
class Outcome:
    """The outcome of a check. `ended` says why it was cut short, and `problem` why the notebook can't be checked."""

    verdicts: list[Verdict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    answers: dict[str, str] = field(default_factory=dict)  # the student's code by exercise
    problem: str = ""
    ended: str = ""


class Worker:
    """A running worker, which is a process that checks one notebook."""

    def __init__(self, work: Work, limits: Limits, prefix: list[str], scratch: Path) -> None:
        self.work, self.limits, self.outcome = work, limits, Outcome()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{scratch.name}-", dir=scratch.parent))
        self.done = self.vanished = False
        self._rest, self._told = b"", 0
        self.process: subprocess.Popen | None = None
        for name in ("work", "home", "tmp"):
            (self.folder / name).mkdir()
        notebook = copy(work.notebook, self.folder / "work")
        if notebook is None:
            self.outcome.problem = "The submission changed or vanished while it was being graded. Grade it again."
            return
        _share_fonts(self.folder / "home")
        with open(self.folder / "worker.txt", "wb") as errors:
            self.process = subprocess.Popen(
                [*prefix, *COMMAND], cwd=self.folder / "work", env=environment(self.folder), start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, preexec_fn=_end_with_parent,
            )  # fmt: skip
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(order(work.reference, notebook, self.folder, limits))
            self.process.stdin.close()
        self.end = time.monotonic() + limits.seconds

    @property
    def pipe(self) -> int:
        assert self.process is not None
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def read(self) -> bool:
        """Read what the worker has sent. Returns False if the worker is done or has to be stopped."""
        data = os.read(self.pipe, 1 << 16)
        self._told += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            try:
                self._take(json.loads(line))
            except (ValueError, TypeError, KeyError, AttributeError):
                self.outcome.ended = "It wrote into the checker's own pipe, so its results are worth nothing."
                self.outcome.verdicts.clear()
                return False
        if self._told > MOST_TOLD:
            self.outcome.ended = f"Its messages had more than {MOST_TOLD // 1_000_000} MB."
            return False
        return bool(data) and not self.done

    def _take(self, said: dict[str, Any]) -> None:
        if "verdict" in said:
            verdict = Verdict(**said["verdict"])
            seen = {one.number for one in self.outcome.verdicts}
            if verdict.number not in self.work.exercises or verdict.number in seen or verdict.status not in STATUSES:
                raise ValueError(verdict)
            self.outcome.verdicts.append(verdict)
        elif "note" in said:
            self.outcome.notes.append(str(said["note"]["text"]))
        elif "answers" in said:
            self.outcome.answers = {number: str(said["answers"][number]) for number in said["answers"]}
        elif "problem" in said:
            self.outcome.problem = str(said["problem"])
        self.done = "done" in said

    def excess(self) -> str:
        """Return a sentence that says which limit the worker exceeds, or "" if it exceeds none."""
        if time.monotonic() > self.end:
            return f"It was stopped after {self.limits.seconds:g} seconds, the limit for a notebook."
        assert self.process is not None
        processes = _tree(self.process.pid)
        if len(processes) > self.limits.processes:
            return f"It was stopped because it ran {len(processes)} processes; {self.limits.processes} is the limit."
        if (used := _memory(processes, self.limits.memory)) > self.limits.memory:
            return f"It was stopped because it used {_gb(used)} of memory; {_gb(self.limits.memory)} is the limit."
        size, entries = _on_disk(self.folder, processes, self.limits.disk)
        if size > self.limits.disk:
            return f"It was stopped because it wrote {_gb(size)} of files; {_gb(self.limits.disk)} is the limit."
        if entries > MOST_ENTRIES:
            return f"It was stopped because it made more than {MOST_ENTRIES} files."
        return ""

    def finish(self) -> Outcome:
        """Complete the outcome of a worker that has ended, so that every exercise has a verdict."""
        said = {verdict.number for verdict in self.outcome.verdicts}
        if not self.done and not self.outcome.ended and not self.outcome.problem:
            self.vanished = True
            self.outcome.ended = "The process that checked it ended too early. " + self._last_words()
        why = self.outcome.problem or self.outcome.ended
        self.outcome.verdicts += [one for one in not_run(self.work, why).verdicts if one.number not in said]
        place = list(self.work.exercises).index
        self.outcome.verdicts.sort(key=lambda verdict: place(verdict.number))
        self.outcome.notes = list(dict.fromkeys(self.outcome.notes))
        return self.outcome

    def _last_words(self) -> str:
        """Return the end of what the worker printed. We read only part, as the submission can change the file."""
        with suppress(OSError), open(self.folder / "worker.txt", "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 1000))
            return file.read(1000).decode(errors="replace").strip()
        return ""


def not_run(work: Work, why: str) -> Outcome:
    """Return the outcome of a notebook that isn't checked at all."""
    verdicts = [Verdict(number, title, "not run", why) for number, title in work.exercises.items()]
    return Outcome(verdicts, ended=why)


def run(
    works: list[Work], *, jobs: int, limits: Limits, prefix: list[str], scratch: Path, starts: Callable[[Work], None]
) -> Generator[tuple[Work, Outcome], None, None]:
    """Check notebooks, `jobs` at a time, and yield each with its outcome. `starts` is called as each one begins."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    mine = {process.pid for process in psutil.Process().children()}  # started elsewhere, so we don't end them
    waiting = sorted(works, key=lambda work: work.alone)
    running: dict[int, Worker] = {}
    try:
        with selectors.DefaultSelector() as selector:
            while waiting or running:
                while waiting and len(running) < (1 if _alone(waiting[0], running) else jobs):
                    starts(waiting[0])
                    worker = Worker(waiting.pop(0), limits, prefix, scratch)
                    if worker.process is None:
                        remove(worker.folder)
                        yield worker.work, worker.finish()
                    else:
                        running[worker.pipe] = worker
                        selector.register(worker.pipe, selectors.EVENT_READ)
                ended = [key.fd for key, _ in selector.select(POLL) if not running[key.fd].read()]
                for pipe, worker in running.items():
                    if pipe not in ended and (excess := worker.excess()):
                        worker.outcome.ended = excess
                        ended.append(pipe)
                for pipe in ended:
                    selector.unregister(pipe)
                    worker = running.pop(pipe)
                    _stop(worker, mine | {other.process.pid for other in running.values() if other.process})
                    outcome = worker.finish()
                    remove(worker.folder)
                    if worker.vanished and not worker.work.alone:  # perhaps another submission ended it
                        waiting.append(replace(worker.work, alone=True))
                    else:
                        yield worker.work, outcome
    finally:
        for worker in running.values():
            _stop(worker, mine)
            remove(worker.folder)
        prctl(PR_SET_CHILD_SUBREAPER, 0)


def _alone(work: Work, running: dict[int, Worker]) -> bool:
    return work.alone or any(worker.work.alone for worker in running.values())


def _end_with_parent() -> None:
    """Have the operating system end the worker if this process is killed."""
    prctl(PR_SET_PDEATHSIG, SIGKILL)


def _stop(worker: Worker, spared: set[int]) -> None:
    """End a worker and everything it started. On Linux, processes that outlive it are now children of this process."""
    assert worker.process is not None
    if worker.done:  # it has sent everything and is about to end by itself
        with suppress(subprocess.TimeoutExpired):
            worker.process.wait(5)
    for _ in range(KILLS):
        left = _tree(worker.process.pid) + (_strays(spared) if sys.platform == "linux" else [])
        alive = [process for process in left if process.pid != worker.process.pid or worker.process.poll() is None]
        if not alive:
            break
        for process in alive:  # the worker comes first: if it's process 1 of a namespace, all end with it
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(alive, timeout=1)
    worker.process.wait()
    worker.process.stdout.close()  # type: ignore[union-attr]


def _strays(spared: set[int]) -> list[psutil.Process]:
    """Return the children of this process whose ids aren't in `spared`, with all their descendants."""
    found = []
    for child in psutil.Process().children():
        if child.pid not in spared:
            found += _tree(child.pid)
    return found


def _tree(pid: int) -> list[psutil.Process]:
    """Return a process and all its descendants."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def _memory(processes: list[psutil.Process], limit: int) -> int:
    """Return how many bytes of memory processes use. If they exceed `limit`, pages that they share count only once."""
    total = 0
    for process in processes:
        with suppress(psutil.Error):
            total += process.memory_info().rss
    return total if total <= limit else sum(map(_own_memory, processes))


def _own_memory(process: psutil.Process) -> int:
    try:
        with open(f"/proc/{process.pid}/smaps_rollup") as file:
            return 1024 * next(int(line.split()[1]) for line in file if line.startswith("Pss:"))
    except (OSError, StopIteration):
        with suppress(psutil.Error):
            return process.memory_info().rss - getattr(process.memory_info(), "shared", 0)
        return 0


def _on_disk(folder: Path, processes: list[psutil.Process], limit: int) -> tuple[int, int]:
    """Return the bytes in a folder and in deleted files that are still open, and how many entries the folder has.

    It stops counting the folder's files once there are too many bytes or entries.
    """
    size = entries = 0
    folders = [str(folder)]
    while folders and size <= limit and entries <= MOST_ENTRIES:
        with suppress(OSError), os.scandir(folders.pop()) as found:
            for entry in found:
                entries += 1
                with suppress(OSError):
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                if entries > MOST_ENTRIES:
                    break
    deleted: dict[tuple[int, int], int] = {}
    for process in processes if sys.platform == "linux" else ():
        with suppress(OSError):
            for name in os.listdir(f"/proc/{process.pid}/fd"):
                with suppress(OSError):
                    status = os.stat(f"/proc/{process.pid}/fd/{name}")
                    if status.st_nlink == 0:
                        deleted[status.st_dev, status.st_ino] = status.st_blocks * 512
    return size + sum(deleted.values()), entries


def _share_fonts(home: Path) -> None:
    """Copy matplotlib's list of fonts to a worker's home, because matplotlib takes seconds to make a new one."""
    for cache in (os.environ.get("MPLCONFIGDIR", ""), str(Path.home() / ".cache" / "matplotlib")):
        for path in sorted(Path(cache).glob("fontlist-*.json")) if cache else ():
            (home / ".cache" / "matplotlib").mkdir(parents=True, exist_ok=True)
            shutil.copy(path, home / ".cache" / "matplotlib")


def remove(folder: Path) -> None:
    """Remove a folder, even if a submission has removed its permissions or made it thousands of folders deep."""
    with suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
            subprocess.run([*command, str(folder)], capture_output=True)


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
