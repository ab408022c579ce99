"""The log of a run: log.jsonl for programs, log.csv for spreadsheets, and a TensorBoard log if requested.

    {"kind": "start", "time": .., "settings": {..}, "machine": {..}, "step": 1, "resumed_from": null, ..}
    {"kind": "step", "step": 1, "loss": 7.63, "learning_rate": .., "norm": .., "seconds": .., "sent": [..], ..}
    {"kind": "evaluation", "step": 100, "loss": 4.2}
    {"kind": "sample", "step": 100, "prompt": "def ", "text": ".."}
    {"kind": "checkpoint", "step": 100, "seconds": ..}
    {"kind": "end", "step": 600, "why": "done"}

Losses are in nats per token. Lists in a "step" row have one value per rank: bytes for `sent`, `memory` and `tensors`,
and for `communication` the fraction of the time that the rank waited (`tplab.capstone.training.meter`). The list of
`communication` is empty until all GPUs have finished a step. For every list but `tensors`, log.csv
has only the largest value.

Each row is one line and is written immediately, so a run that is killed loses at most the last line. A resumed run
appends a new "start" row, and steps that the killed run completed after its last checkpoint appear twice.
"""

import json
import mmap
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tplab.capstone.own_layers.link import used
from tplab.capstone.settings.run_folder import LOG
from tplab.capstone.settings.settings import Settings
from tplab.capstone.training.meter import this_machine
from tplab.capstone.training.optimizer import learning_rate
from tplab.capstone.training.ranks import Ranks
from tplab.capstone.training.step_summary import StepSummary
from tplab.memory.config import parameter_count

Row = dict[str, Any]
TABLE = "log.csv"
COLUMNS = (
    "step", "loss", "evaluation", "learning_rate", "norm", "seconds", "tokens_per_second", "communication", "sent",
    "memory",
)  # fmt: skip


class Log:
    """A run's log. One rank writes its rows, and the other ranks create a `Log` with `writes=False`.

    step    the first step of this run; TensorBoard discards existing data from this step on
    tell    a function that is called with each row after it has been written
    """

    def __init__(
        self, folder: Path, *, step: int = 1, tensorboard: bool = False, writes: bool = True,
        tell: Callable[[Row], None] | None = None,
    ) -> None:  # fmt: skip
        self.folder, self.writes, self.tell = folder, writes, tell
        self._board: Any = None
        if not writes:
            return
        folder.mkdir(parents=True, exist_ok=True)
        for name in (LOG, TABLE):
            _drop_cut_off_line(folder / name)
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step)

    def write(self, row: Row) -> None:
        """Write a row. If that fails, raises OSError with the name of the file."""
        if not self.writes:
            return
        _append(self.folder / LOG, json.dumps(row, allow_nan=False) + "\n")
        if cells := _cells(row):
            table = self.folder / TABLE
            head = "" if table.exists() else ",".join(COLUMNS) + "\n"
            _append(table, head + ",".join(str(cells.get(column, "")) for column in COLUMNS) + "\n")
        if self._board is not None:
            _to_tensorboard(self._board, row)
        if self.tell is not None:
            self.tell(row)

    def close(self) -> None:
        if self._board is not None:
            self._board.close()


def start_row(settings: Settings, answers: Any, idle: Collection[str], ranks: Ranks) -> Row:
    """Return the part of a "start" row that describes the run. For `idle`, see `TrainingHooks`."""
    return {
        "kind": "start", "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "settings": asdict(settings), "machine": this_machine(), "ranks": ranks.size,
        "backend": None if ranks.mesh is None else dist.get_backend(), "shares_memory": ranks.shares,
        "device": ranks.device.type, "parameters": parameter_count(settings.model), "layers": settings.layers,
        "used": [] if answers is None else used(answers.whose, settings, idle),
        "answers": None if answers is None else {"whose": answers.whose, "checked": answers.checked},
    }  # fmt: skip


def step_row(summary: StepSummary, settings: Settings, seconds: float) -> Row:
    """Return the row for a step. `seconds` is the mean time per step since the last row."""
    shares, sent, memory, tensors = map(list, zip(*summary.figures, strict=True))
    return {
        "kind": "step", "step": summary.step, "loss": summary.loss,
        "learning_rate": learning_rate(summary.step, settings), "norm": summary.norm, "seconds": seconds,
        "tokens": settings.tokens_per_step, "tokens_per_second": settings.tokens_per_step / seconds,
        "communication": [] if None in shares else shares, "sent": sent, "memory": memory, "tensors": tensors,
    }  # fmt: skip


def read_log(folder: Path) -> list[Row]:
    """Return the rows of a run's log, oldest first, or [] if there is no log. An incomplete last line is ignored.

    Raises ValueError if any other line isn't a valid row.
    """
    try:
        lines = (folder / LOG).read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    rows = []
    for number, line in enumerate(lines[:-1], 1):  # nothing or part of a row follows the last newline
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or "kind" not in row:
            raise ValueError(f"line {number} of {folder / LOG} isn't a row of a log: {line[:80]!r}. Delete this line")
        rows.append(row)
    return rows


def steps_of(rows: Sequence[Row], kind: str = "step") -> list[Row]:
    """Return the rows of the given kind, ordered by step. A resumed run replaces older rows from its first step on."""
    last: dict[int, Row] = {}
    for row in rows:
        if row["kind"] == "start":
            last = {step: kept for step, kept in last.items() if step < row["step"]}
        elif row["kind"] == kind:
            last[row["step"]] = row
    return [last[step] for step in sorted(last)]


def check_tensorboard() -> None:
    """If TensorBoard isn't installed, raise an ImportError that says what to install."""
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: F401
    except ImportError:
        raise ImportError(
            'tensorboard=True needs TensorBoard: pip install "tplab[tensorboard]". You can also train without it, '
            "because every run writes log.jsonl and log.csv"
        ) from None


def _to_tensorboard(board: Any, row: Row) -> None:
    if row["kind"] == "step":
        for name in ("loss", "learning_rate", "norm", "seconds", "tokens_per_second"):
            board.add_scalar(f"train/{name}", row[name], row["step"])
    elif row["kind"] == "evaluation":
        board.add_scalar("evaluation/loss", row["loss"], row["step"])
    elif row["kind"] == "sample":
        board.add_text("sample", row["text"], row["step"])
    board.flush()


def _cells(row: Row) -> Row:
    """Return a row's values for log.csv, with the largest value in place of each per-rank list."""
    if row["kind"] == "evaluation":
        return {"step": row["step"], "evaluation": row["loss"]}
    if row["kind"] != "step":
        return {}
    return row | {name: max(row[name], default="") for name in ("communication", "sent", "memory")}


def _append(path: Path, text: str) -> None:
    """Append text in a single write, so readers see complete rows, and a killed run can only truncate its last one."""
    data = text.encode()
    try:
        with open(path, "ab", buffering=0) as file:
            if file.write(data) != len(data):
                raise OSError("only a part could be written")
    except OSError as error:
        raise OSError(
            f"couldn't write to {path}: {error.strerror or error}. The checkpoints are intact, and the same command "
            "resumes from the newest one"
        ) from error


def _drop_cut_off_line(path: Path) -> None:
    if path.exists() and (size := path.stat().st_size):
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            whole = text.rfind(b"\n") + 1  # `rfind` only reads the end of the file
        if whole < size:
            os.truncate(path, whole)
