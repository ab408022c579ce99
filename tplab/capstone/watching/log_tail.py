"""Read the status of a run from its log while it is still training.

tail = LogTail(settings)
status = tail.look()        # reads only what was written since the last call
"""

import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from tplab.capstone.settings.run_folder import LOG
from tplab.capstone.settings.settings import Settings

POINTS = 400  # maximum number of points per curve
RECENT = 20  # the fraction of time spent communicating is averaged over this many steps
Points = Sequence[tuple[int, float]]  # (step, value)


def thinned(points: Points) -> tuple[int, list[tuple[int, float]]]:
    """Average each group of n adjacent points, so that at most `POINTS` remain. Returns n and (step, mean) pairs."""
    every = max(1, -(-len(points) // POINTS))
    groups = (points[at : at + every] for at in range(0, len(points), every))
    return every, [(group[-1][0], fmean(value for _, value in group)) for group in groups]


@dataclass
class RunStatus:
    """The status of a run according to its log. Values that aren't known yet are None or empty."""

    step: int = 0  # the newest step in the log
    last_step: int = 0  # the step after which the run stops
    loss: float | None = None  # the loss of the newest step
    tokens_per_second: float | None = None
    seconds_left: float | None = None  # at the average pace so far, including evaluations and checkpoints
    memory: list[float] = field(default_factory=list)  # bytes per rank
    communication: list[float] = field(default_factory=list)  # fraction of recent time spent communicating, per rank
    losses: list[tuple[int, float]] = field(default_factory=list)
    speeds: list[tuple[int, float]] = field(default_factory=list)
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    device: str = "cpu"  # or "cuda"
    started: bool = False  # whether the run has written its first row
    ended: str | None = None  # why the run ended

    @property
    def done(self) -> float:
        """The fraction of the run's steps that have been completed."""
        return min(1.0, self.step / self.last_step) if self.last_step else 0.0


class LogTail:
    """Reads the log of a run from its start. Rows that are already there belong to the run that is being resumed."""

    def __init__(self, settings: Settings) -> None:
        self.path, self.last_step = Path(settings.folder, LOG), settings.last_step
        self._past = self.path.stat().st_size if self.path.exists() else 0
        self._begin()

    def look(self) -> RunStatus:
        """Read the new rows and return the status of the run."""
        for row in self._new_rows():
            self._take(row)
        for name, values in self._curves.items():
            setattr(self._status, name, thinned(sorted(values.items()))[1])
        self._status.communication = [fmean(shares) for shares in zip(*self._recent, strict=False)]
        return self._status

    def _begin(self) -> None:
        self._place = 0
        self._status = RunStatus(last_step=self.last_step)
        self._curves: dict[str, dict[int, float]] = {"losses": {}, "speeds": {}, "evaluations": {}}
        self._recent: deque[list[float]] = deque(maxlen=RECENT)
        self._first: tuple[int, float] | None = None  # this run's first step in the log, and when we read it

    def _new_rows(self) -> Iterator[dict[str, Any]]:
        """Yield complete rows that haven't been read yet. If the file has become shorter, it belongs to a new run."""
        try:
            size = self.path.stat().st_size
        except FileNotFoundError:
            return
        if size < self._place:
            self._past = 0
            self._begin()
        with open(self.path, "rb") as log:
            log.seek(self._place)
            data = log.read(size - self._place)
        for line in data[: data.rfind(b"\n") + 1].splitlines(keepends=True):
            self._place += len(line)
            try:
                yield json.loads(line)
            except ValueError:  # a row truncated by a kill; a resumed run continues after it
                continue

    def _take(self, row: dict[str, Any]) -> None:
        status, kind = self._status, row["kind"]
        if kind == "start":
            status.started, status.ended = self._place > self._past, None
            status.device, status.step = row["device"], row["resumed_from"] or 0
            self._first = None
            self._recent.clear()
            for name, values in self._curves.items():  # the resumed run logs later steps again
                self._curves[name] = {step: value for step, value in values.items() if step <= status.step}
        elif kind == "step":
            self._step(row)
        elif kind == "evaluation":
            self._curves["evaluations"][row["step"]] = row["loss"]
        elif kind == "end":
            status.ended = row["why"]

    def _step(self, row: dict[str, Any]) -> None:
        status, now = self._status, time.monotonic()
        status.step, status.loss, status.memory = row["step"], row["loss"], row["memory"]
        status.tokens_per_second = row["tokens_per_second"]
        self._curves["losses"][status.step] = row["loss"]
        self._curves["speeds"][status.step] = row["tokens_per_second"]
        if row["communication"]:  # on a GPU, it's measured one step later
            self._recent.append(row["communication"])
        since, began = self._first = self._first or (status.step, now)
        pace = (now - began) / (status.step - since) if status.step > since and now > began else row["seconds"]
        status.seconds_left = pace * (status.last_step - status.step)
