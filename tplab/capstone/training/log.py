"""The log of a run, log.jsonl.

    {"kind": "start", "time": .., "settings": {..}, "machine": {..}, "step": 1, "resumed_from": null, ..}
    {"kind": "step", "step": 1, "loss": 7.63, "learning_rate": .., "norm": .., "seconds": .., "sent": [..], ..}
    {"kind": "evaluation", "step": 100, "loss": 4.2}
    {"kind": "sample", "step": 100, "prompt": "def ", "text": ".."}
    {"kind": "checkpoint", "step": 100, "seconds": ..}
    {"kind": "end", "step": 600, "why": "done"}

Losses are in nats per token. Lists in a "step" row have one value per rank: bytes for `sent`, `memory` and `tensors`,
and for `communication` the fraction of the time that the rank waited (`tplab.capstone.training.meter`). The list of
`communication` is empty until all GPUs have finished a step.

Each row is one line and is written immediately, so a run that is killed loses at most the last line. A resumed run
appends a new "start" row, and steps that the killed run completed after its last checkpoint appear twice.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tplab.capstone.learners_loop import learning_rate
from tplab.capstone.settings.run_folder import LOG
from tplab.capstone.settings.settings import Settings
from tplab.capstone.training.meter import this_machine
from tplab.capstone.training.ranks import Ranks
from tplab.capstone.training.step_summary import StepSummary
from tplab.memory.config import parameter_count

Row = dict[str, Any]


class Log:
    """A run's log. One rank writes its rows, and the other ranks create a `Log` with `writes=False`.

    tell    a function that is called with each row after it has been written
    """

    def __init__(self, folder: Path, *, writes: bool = True, tell: Callable[[Row], None] | None = None) -> None:
        self.path, self.writes, self.tell = folder / LOG, writes, tell
        if not writes:
            return
        folder.mkdir(parents=True, exist_ok=True)
        if self.path.exists():  # drop a last line that a kill cut off
            os.truncate(self.path, self.path.read_bytes().rfind(b"\n") + 1)

    def write(self, row: Row) -> None:
        """Write a row in a single call, so readers see complete rows, and a killed run can only truncate its last one.

        If that fails, raises OSError with the name of the file.
        """
        if not self.writes:
            return
        data = (json.dumps(row, allow_nan=False) + "\n").encode()
        try:
            with open(self.path, "ab", buffering=0) as file:
                if file.write(data) != len(data):
                    raise OSError("only a part could be written")
        except OSError as error:
            raise OSError(
                f"couldn't write to {self.path}: {error.strerror or error}. The checkpoints are intact, and the same "
                "command resumes from the newest one"
            ) from error
        if self.tell is not None:
            self.tell(row)


def start_row(settings: Settings, answers: Any, ranks: Ranks) -> Row:
    """Return the part of a "start" row that describes the run."""
    return {
        "kind": "start", "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "settings": asdict(settings), "machine": this_machine(ranks.device), "ranks": ranks.size,
        "backend": None if ranks.mesh is None else dist.get_backend(), "shares_memory": ranks.shares,
        "device": ranks.device.type, "parameters": parameter_count(settings.model),
        "answers": answers and {name: getattr(answers, name) for name in ("whose", "checked", "lines")},
    }  # fmt: skip


def step_row(step: int, summary: StepSummary, settings: Settings, seconds: float) -> Row:
    """Return the row for a step. `seconds` is the mean time per step since the last row."""
    shares, sent, memory, tensors = map(list, zip(*summary.figures, strict=True))
    return {
        "kind": "step", "step": step, "loss": summary.loss, "learning_rate": learning_rate(step, settings),
        "norm": summary.norm, "seconds": seconds, "tokens_per_second": settings.tokens_per_step / seconds,
        "communication": [] if None in shares else shares, "sent": sent, "memory": memory, "tensors": tensors,
    }  # fmt: skip


def read_log(folder: Path) -> list[Row]:
    """Return the rows of a run's log, oldest first, or [] if there is no log. An incomplete last line is ignored."""
    if not (folder / LOG).exists():
        return []
    return [json.loads(line) for line in (folder / LOG).read_bytes().split(b"\n")[:-1]]


def steps_of(rows: Sequence[Row], kind: str = "step") -> list[Row]:
    """Return the rows of the given kind, ordered by step. A resumed run replaces older rows from its first step on."""
    last: dict[int, Row] = {}
    for row in rows:
        if row["kind"] == "start":
            last = {step: kept for step, kept in last.items() if step < row["step"]}
        elif row["kind"] == kind:
            last[row["step"]] = row
    return [last[step] for step in sorted(last)]
