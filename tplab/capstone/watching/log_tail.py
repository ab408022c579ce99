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

POINTS = 400  # maximum per curve
RECENT = 20  # steps over which the share of communication is averaged


def thinned(points: Sequence[tuple[int, float]]) -> tuple[int, list[tuple[int, float]]]:
    """Average every n neighbors of a curve, so that at most `POINTS` are left. Returns n and (step, mean) pairs."""
    every = max(1, -(-len(points) // POINTS))
    groups = (points[at : at + every] for at in range(0, len(points), every))
    return every, [(group[-1][0], fmean(value for _, value in group)) for group in groups]


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
        self._begin()

    def look(self) -> RunStatus:
        """Read the new rows and return the status of the run."""
        for row in self._new_rows():
            if isinstance(row, dict):
                self._take(row)
        status = self._status
        for name, values in self._curves.items():
            setattr(status, name, thinned(sorted(values.items()))[1])
        status.communication = [fmean(shares) for shares in zip(*self._recent, strict=False)]
        return status

    def _begin(self) -> None:
        self._place = 0
        self._status = RunStatus(last_step=self.last_step)
        self._curves: dict[str, dict[int, float]] = {"losses": {}, "speeds": {}, "evaluations": {}}
        self._recent: deque[list[float]] = deque(maxlen=RECENT)
        self._first: tuple[int, float] | None = None  # the first step seen of this run, and its time

    def _new_rows(self) -> Iterator[Any]:
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
        kind, status = row.get("kind"), self._status
        if kind == "start":
            status.started, status.ended = self._place > self._past, None
            status.device = str(row.get("device", "cpu"))
            status.step = row.get("resumed_from") or 0
            self._first = None
            self._recent.clear()
            for name, values in self._curves.items():  # the resumed run logs later steps again
                self._curves[name] = {step: value for step, value in values.items() if step <= status.step}
        elif kind == "step":
            self._step(row)
        elif kind == "evaluation":
            self._curves["evaluations"][row["step"]] = row["loss"]
        elif kind == "end":
            status.ended = str(row.get("why", "done"))

    def _step(self, row: dict[str, Any]) -> None:
        status, now = self._status, time.monotonic()
        status.step, status.loss = row["step"], row["loss"]
        self._curves["losses"][status.step] = status.loss
        if row.get("tokens_per_second"):
            status.tokens_per_second = self._curves["speeds"][status.step] = row["tokens_per_second"]
        if row.get("communication"):
            self._recent.append(row["communication"])
        status.memory = row.get("memory") or status.memory
        self._first = self._first or (status.step, now)
        since, began = self._first
        pace = (now - began) / (status.step - since) if status.step > since and now > began else row.get("seconds")
        status.seconds_left = None if pace is None else pace * (status.last_step - status.step)
