"""A run as read from its folder: the rows of its log, and the measurements that `tplab.capstone.study` has added."""

import json
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from statistics import fmean, median
from typing import Any

from tplab.capstone.settings.io import from_values
from tplab.capstone.settings.settings import MATTER, OF_THE_LAYOUT, Settings
from tplab.capstone.training.log import read_log, steps_of

MEASUREMENTS = "measurements.json"
WARM_UP = 5  # the first logged steps of a run, which are slower


class Run:
    """A run, read from its folder. Raises ValueError if there is no log, or if no run has been started in it.

    start              the last "start" row that was followed by a step; settings, device, etc. are taken from it
    steps, done        {step: the latest row for that step} for each logged step, and the newest step
    recent             the step rows since the layout or machine last changed, which determine the reported speed
    losses, speeds     (step, training loss) and (step, tokens/s) pairs in step order
    evaluations        (step, loss on held-out text) pairs in step order
    samples            the "sample" rows of the log, in step order
    measured           {name: results} of the study's parts that were measured with the current settings
    stale              {name: the settings that differed} for the parts that were measured with different settings
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        rows = read_log(self.folder)
        self.starts = [row for row in rows if row["kind"] == "start"]
        if not self.starts:
            raise ValueError(f"no run has been started in {folder}, because its log has no row of kind 'start'")
        self.steps: dict[int, dict[str, Any]] = {row["step"]: row for row in steps_of(rows)}
        self.done = max(self.steps, default=0)
        earlier = [start for start in self.starts if start["step"] <= self.done] or self.starts
        self.start = earlier[-1]
        self.ranks, self.device, self.machine = (self.start[name] for name in ("ranks", "device", "machine"))
        self.settings = from_values(self.start["settings"])
        *_, first = takewhile(lambda start: _place(start) == _place(self.start), reversed(earlier))
        self.recent = [row for step, row in self.steps.items() if step >= first["step"]]
        self.losses = [(step, row["loss"]) for step, row in self.steps.items()]
        self.speeds = [(step, row["tokens_per_second"]) for step, row in self.steps.items()]
        self.evaluations = [(row["step"], row["loss"]) for row in steps_of(rows, "evaluation")]
        self.samples = steps_of(rows, "sample")
        self.end: dict[str, Any] | None = next((row for row in reversed(rows) if row["kind"] == "end"), None)
        found = read_measurements(self.folder)
        self.stale = {name: other for name, part in found.items() if (other := measured_with(part, self.settings))}
        self.measured = {name: part for name, part in found.items() if name not in self.stale}

    @property
    def step_seconds(self) -> float:
        """The median seconds per step in the `recent` rows, excluding the first `WARM_UP` rows if there are more."""
        values = [row["seconds"] for row in self.recent]
        return median(values[WARM_UP:] or values)

    @property
    def tokens_per_second(self) -> float:
        return self.settings.tokens_per_step / self.step_seconds

    @property
    def communication(self) -> list[float]:
        """The mean fraction of step time that each rank spends in collectives, or [] if it isn't known."""
        shares = [row["communication"] for row in self.recent if row["communication"]]
        return [fmean(of_rank) for of_rank in zip(*shares, strict=True)]

    @property
    def memory(self) -> list[float]:
        """Each rank's largest memory figure in the `recent` rows, in bytes."""
        return [max(of_rank) for of_rank in zip(*(row["memory"] for row in self.recent), strict=True)]


def read_measurements(folder: Path) -> dict[str, Any]:
    """Read the study's measurements so far, as {part: results}. Returns {} if there are none."""
    path = Path(folder, MEASUREMENTS)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def measured_with(part: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """Return the `MATTER` settings that differed when a part was measured, as {name: the value at that time}."""
    return {name: then for name in MATTER if (then := part["settings"].get(name)) != getattr(settings, name)}


def _place(start: dict[str, Any]) -> list[Any]:
    """Return what determines the speed of a run: its ranks, backend, device, machine, layout and precision."""
    where = [start[name] for name in ("ranks", "backend", "shares_memory", "device", "machine")]
    return where + [start["settings"].get(name) for name in (*OF_THE_LAYOUT, "precision")]
