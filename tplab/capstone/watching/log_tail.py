"""Read the status of a run from its log while it is still training.

    tail = LogTail(settings)
    status = tail.look()        # reads only what was written since the last call

A call is as fast after a hundred thousand steps as after ten, because curves are reduced to a few hundred points, each
of which is the mean of several steps.
"""

import json
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tplab.capstone.settings.run_folder import LOG
from tplab.capstone.settings.settings import Settings

POINTS = 400  # maximum per curve
RECENT = 20  # steps over which the share of communication is averaged


class Curve:
    """A curve of values over steps with at most `most` points. If there are more, neighbors are merged into a mean."""

    def __init__(self, most: int = POINTS) -> None:
        self.most, self.every = most, 1
        self._steps: list[int] = []
        self._values: list[float] = []
        self._open: list[tuple[int, float]] = []

    @classmethod
    def of(cls, points: Iterable[tuple[int, float]]) -> "Curve":
        curve = cls()
        for step, value in points:
            curve.add(step, value)
        return curve

    def add(self, step: int, value: float) -> None:
        self._open.append((step, value))
        if len(self._open) < self.every:
            return
        self._steps.append(step)
        self._values.append(_mean(part for _, part in self._open))
        self._open = []
        if len(self._steps) >= self.most:
            self.every *= 2
            pairs = range(0, len(self._steps) - 1, 2)
            self._values = [(self._values[i] + self._values[i + 1]) / 2 for i in pairs]
            self._steps = [self._steps[i + 1] for i in pairs]

    def forget(self, step: int) -> None:
        """Discard the points from `step` on, because the resumed run logs these steps again."""
        kept = sum(at < step for at in self._steps)
        self._steps, self._values = self._steps[:kept], self._values[:kept]
        self._open = [point for point in self._open if point[0] < step]

    @property
    def points(self) -> list[tuple[int, float]]:
        """The points of the curve as (step, mean), up to the newest step."""
        rest = [(self._open[-1][0], _mean(part for _, part in self._open))] if self._open else []
        return [*zip(self._steps, self._values, strict=True), *rest]


@dataclass
class RunStatus:
    """The status of a run according to its log. Values that aren't known yet are None or empty.

    step, last_step             the newest step, and the step after which the run stops
    loss, tokens_per_second     of the newest step
    seconds_left                at the average pace since the run started, including evaluations and checkpoints
    memory, communication       per rank: bytes, and the share of time in collectives over the last steps
    losses, speeds, evaluations lists of (step, value)
    device                      "cpu" or "cuda"
    started, ended              whether the run has written its first row, and why it stopped
    """

    step: int = 0
    last_step: int = 0
    loss: float | None = None
    tokens_per_second: float | None = None
    seconds_left: float | None = None
    memory: list[float] = field(default_factory=list)
    communication: list[float] = field(default_factory=list)
    losses: list[tuple[int, float]] = field(default_factory=list)
    speeds: list[tuple[int, float]] = field(default_factory=list)
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    device: str = "cpu"
    started: bool = False
    ended: str | None = None

    @property
    def done(self) -> float:
        """The share of the run's steps that are done."""
        return min(1.0, self.step / self.last_step) if self.last_step else 0.0


class LogTail:
    """Reads the log of a run that is about to start. Existing rows belong to the run that is being resumed."""

    def __init__(self, settings: Settings) -> None:
        self.path, self.last_step = Path(settings.folder, LOG), settings.last_step
        self._past = self.path.stat().st_size if self.path.exists() else 0
        self._place = 0
        self._begin()

    def look(self) -> RunStatus:
        """Read the new rows and return the status of the run."""
        for row in self._new_rows():
            if isinstance(row, dict):
                self._take(row)
        status = self._status
        status.losses, status.speeds = self._losses.points, self._speeds.points
        status.communication = [_mean(shares) for shares in zip(*self._recent, strict=False)]
        status.evaluations = sorted(self._evaluations.items())
        return status

    def _begin(self) -> None:
        self._status = RunStatus(last_step=self.last_step)
        self._losses, self._speeds = Curve(), Curve()
        self._recent: deque[list[float]] = deque(maxlen=RECENT)
        self._evaluations: dict[int, float] = {}
        self._first: tuple[int, float] | None = None  # the first step seen of this run, and its time

    def _new_rows(self) -> Iterable[Any]:
        """Yield complete rows that haven't been read yet. If the file has become shorter, it belongs to a new run."""
        try:
            size = self.path.stat().st_size
        except FileNotFoundError:
            return
        if size < self._place:
            self._past = self._place = 0
            self._begin()
        if size == self._place:
            return
        with open(self.path, "rb") as log:
            log.seek(self._place)
            data = log.read(size - self._place)
        for line in data[: data.rfind(b"\n") + 1].splitlines(keepends=True):
            self._place += len(line)
            if line.strip():
                try:
                    yield json.loads(line)
                except ValueError:  # a row truncated by a kill; a resumed run continues after it
                    continue

    def _take(self, row: dict[str, Any]) -> None:
        kind, status = row.get("kind"), self._status
        if kind == "start":
            status.started, status.ended = self._place > self._past, None
            status.device = str(row.get("device", "cpu"))
            status.step = row.get("resumed_from") or 0
            self._first = None
            self._recent.clear()
            for curve in (self._losses, self._speeds):
                curve.forget(status.step + 1)
            self._evaluations = {step: loss for step, loss in self._evaluations.items() if step <= status.step}
        elif kind == "step":
            self._step(row)
        elif kind == "evaluation":
            self._evaluations[row["step"]] = row["loss"]
        elif kind == "end":
            status.ended = str(row.get("why", "done"))

    def _step(self, row: dict[str, Any]) -> None:
        status, now = self._status, time.monotonic()
        status.step, status.loss = row["step"], row["loss"]
        self._losses.add(status.step, status.loss)
        if row.get("tokens_per_second"):
            status.tokens_per_second = row["tokens_per_second"]
            self._speeds.add(status.step, row["tokens_per_second"])
        if row.get("communication"):
            self._recent.append(row["communication"])
        status.memory = row.get("memory") or status.memory
        if self._first is None:
            self._first = status.step, now
        since, began = self._first
        pace = (now - began) / (status.step - since) if status.step > since and now > began else row.get("seconds")
        status.seconds_left = None if pace is None else pace * (status.last_step - status.step)


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)
