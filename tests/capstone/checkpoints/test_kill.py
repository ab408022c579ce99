"""A rank of a training run is killed in each part of its work. The run resumes, and no loss differs by a single bit."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.capstone.small import LLAMA, small, write_text
from tplab import RankError, launch
from tplab.capstone.checkpoints.writer import Checkpoints
from tplab.capstone.data.prepare import prepare
from tplab.capstone.settings.settings import Settings
from tplab.capstone.training.log import read_log
from tplab.capstone.training.loop import train
from tplab.capstone.training.step import Step

SAVE_EVERY = 2
RUN = {"tp": 2, **LLAMA, "precision": "float32", "dropout": 0.1, "save_every": SAVE_EVERY}
KILLS: tuple[tuple[type, str, int], ...] = (  # in which call of which method
    (Step, "run", 2 * SAVE_EVERY + 1),
    (Checkpoints, "_save", 2),
    (Checkpoints, "load", 1),
)


def train_until_killed(settings: Settings, owner: type, name: str, call: int) -> None:
    """Train on a rank. The last rank kills itself in the given call of a method."""
    if dist.get_rank() == dist.get_world_size() - 1:
        original, left = getattr(owner, name), [call]

        def method(self: Any, *args: Any) -> Any:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(self, *args)

        setattr(owner, name, method)
    train(settings)


def losses(folder: Path) -> dict[int, float]:
    """The loss of each step. If a step was repeated, it's the loss of the last time."""
    return {row["step"]: row["loss"] for row in read_log(folder) if row["kind"] == "step"}


def test_after_a_kill_the_run_goes_on_bit_for_bit(tmp_path):
    text = write_text(tmp_path / "text")
    whole, killed = (small(text, name, **RUN) for name in ("whole", "killed"))
    prepare(whole)  # tokenizes the text, for both runs
    launch(train, 2, args=(whole,))
    for kill in KILLS:
        with pytest.raises(RankError, match="SIGKILL"):
            launch(train_until_killed, 2, args=(killed, *kill))
    launch(train, 2, args=(killed,))
    expected, found = losses(tmp_path / "whole"), losses(tmp_path / "killed")
    assert list(expected) == list(range(1, whole.steps + 1))
    assert found == expected
    rows = read_log(tmp_path / "killed")
    for before, start in zip(rows, rows[1:], strict=False):
        if start["kind"] == "start" and before["kind"] == "step":
            assert before["step"] - (start["resumed_from"] or 0) <= SAVE_EVERY
