"""A run as read from its folder: the rows of its log, and the measurements that `tplab.capstone.study` has added."""

import json
from itertools import takewhile
from pathlib import Path
from statistics import fmean, median
from typing import Any

from tplab.capstone.settings.io import from_values
from tplab.capstone.settings.settings import MATTER, OF_THE_LAYOUT
from tplab.capstone.training.log import read_log, steps_of

MEASUREMENTS = "measurements.json"
WARM_UP = 5  # the first logged steps of a run, which are slower


class Run:
    """A run, read from its folder. Raises ValueError if the run hasn't completed a step yet.

    start              the last "start" row that was followed by a step; settings, device, etc. are taken from it
    steps, done        {step: the latest row for that step} for each logged step, and the newest step
    recent             the step rows since the layout or machine last changed, which determine the reported speed
    evaluations        (step, loss on held-out text) pairs in step order
    samples            the "sample" rows of the log, in step order
    measured           what the study measured, or {} if there was none with the current settings
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        rows = read_log(folder)
        self.steps: dict[int, dict[str, Any]] = {row["step"]: row for row in steps_of(rows)}
        if not self.steps:
            raise ValueError(f"there's nothing to report yet, because no run in {folder} has completed a step")
        self.done = max(self.steps)
        self.starts = [row for row in rows if row["kind"] == "start"]
        earlier = [start for start in self.starts if start["step"] <= self.done]
        self.start = earlier[-1]
        self.ranks, self.device, self.machine = (self.start[name] for name in ("ranks", "device", "machine"))
        self.settings = from_values(self.start["settings"])
        *_, first = takewhile(lambda start: _place(start) == _place(self.start), reversed(earlier))
        self.recent = [row for step, row in self.steps.items() if step >= first["step"]]
        self.evaluations = [(row["step"], row["loss"]) for row in steps_of(rows, "evaluation")]
        self.samples = steps_of(rows, "sample")
        path = folder / MEASUREMENTS
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"settings": {}}
        now = {name: getattr(self.settings, name) for name in MATTER}
        self.measured: dict[str, Any] = found if found["settings"] == now else {}

    @property
    def step_seconds(self) -> float:
        """The median seconds per step in the `recent` rows, excluding the first `WARM_UP` rows if there are more."""
        values = [row["seconds"] for row in self.recent]
        return median(values[WARM_UP:] or values)

    @property
    def communication(self) -> float:
        """The mean fraction of step time spent in collectives, on the rank that spends most there (0 if not known)."""
        shares = [row["communication"] for row in self.recent if row["communication"]]
        return max((fmean(of_rank) for of_rank in zip(*shares, strict=True)), default=0.0)

    @property
    def memory(self) -> float:
        """The peak of all tensors on a rank, in bytes: on a GPU as torch measures it, on a CPU as counted (or 0)."""
        return max(max(row["memory" if self.device == "cuda" else "tensors"]) for row in self.recent)


def _place(start: dict[str, Any]) -> list[Any]:
    """Return what determines the speed of a run: its ranks, backend, device, machine, layout and precision."""
    where = [start[name] for name in ("ranks", "backend", "shares_memory", "device", "machine")]
    return where + [start["settings"].get(name) for name in (*OF_THE_LAYOUT, "precision")]
