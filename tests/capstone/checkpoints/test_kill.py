"""A rank of a training run is killed in each part of its work. The run resumes, and no loss differs by a single bit."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import tplab
from tplab import RankError, launch
from tplab.capstone.checkpoints.writer import Checkpoints
from tplab.capstone.data.prepare import prepare
from tplab.capstone.settings.io import PRESETS
from tplab.capstone.settings.settings import Settings
from tplab.capstone.training.log import read_log
from tplab.capstone.training.loop import train
from tplab.capstone.training.step import Step

STEPS, SAVE_EVERY = 8, 2
KIND = ("gated", "bias", "tied_embedding", "learned_positions", "rotary_base", "norm_eps")
LLAMA = {"num_kv_heads": 2, "ffn_hidden_size": 48} | {name: getattr(PRESETS["llama"], name) for name in KIND}
Kill = tuple[type, str, int]  # in which call of which method
WRITING: tuple[Kill, ...] = (  # the second write runs in the background, while the next steps run
    (Checkpoints, "_stage", 2),
    (Checkpoints, "_write", 1),
)
TRAINING: tuple[Kill, ...] = (  # the first checkpoint is complete once the second save begins
    (Step, "run", 2 * SAVE_EVERY + 1),
    (Checkpoints, "load", 1),
)
GRIDS: dict[str, tuple[dict[str, Any], tuple[Kill, ...]]] = {
    "tp": ({"tp": 2}, WRITING),
    "llama, stages, zero": ({"pp": 2, "dp": 2, "zero": 3, "micro_batch_size": 2, **LLAMA}, TRAINING),
}


def settings_for(folder: Path, **changes: Any) -> Settings:
    """A tiny GPT that trains on some of tplab's own source files."""
    tiny: dict[str, Any] = {
        "data": str(Path(tplab.__file__).parent / "tensor"), "vocab_size": 300, "num_layers": 2, "hidden_size": 32,
        "num_heads": 4, "seq_length": 32, "dropout": 0.1, "batch_size": 8, "micro_batch_size": 4, "warmup_steps": 2,
        "evaluate_every": 0, "evaluation_batches": 1, "sample_tokens": 0, "steps": STEPS, "save_every": SAVE_EVERY,
    }  # fmt: skip
    return Settings(**{**tiny, "folder": str(folder), **changes})


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


@pytest.mark.parametrize("grid", GRIDS)
def test_after_a_kill_the_run_goes_on_bit_for_bit(grid, tmp_path):
    changes, kills = GRIDS[grid]
    whole, killed = (settings_for(tmp_path / name, **changes) for name in ("whole", "killed"))
    prepare(whole)  # tokenizes the text, for both runs
    launch(train, whole.ranks, args=(whole,))
    for kill in kills:
        with pytest.raises(RankError, match="SIGKILL"):
            launch(train_until_killed, killed.ranks, args=(killed, *kill))
    launch(train, killed.ranks, args=(killed,))
    expected, found = losses(tmp_path / "whole"), losses(tmp_path / "killed")
    assert list(expected) == list(range(1, STEPS + 1))
    assert found == expected
    rows = read_log(tmp_path / "killed")
    for before, start in zip(rows, rows[1:], strict=False):
        if start["kind"] == "start" and before["kind"] == "step":  # between two saves, and while one is under way
            assert before["step"] - (start["resumed_from"] or 0) <= 2 * SAVE_EVERY
