"""The all-reduces of a run on one machine go through shared memory, and that changes nothing but their time."""

from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.capstone.small import small, write_text
from tplab import launch
from tplab.capstone.settings.settings import Settings
from tplab.capstone.training.log import read_log
from tplab.capstone.training.loop import train
from tplab.runtime import shared_memory

LARGE: dict[str, Any] = {"seq_length": 64, "micro_batch_size": 4, "batch_size": 8, "steps": 4, "precision": "float32"}
HOW: dict[str, dict[str, Any]] = {"shared": {}, "gloo": {"shared_memory": False}, "cut": {"sequence_parallel": True}}


def counted(runs: dict[str, Settings]) -> dict[str, tuple[list[float], int, list[int]]]:
    """Of each run: the losses, how many all-reduces went through shared memory, and the sizes of groups with it."""
    found, original, calls = {}, shared_memory._Slots.all_reduce, []
    shared_memory._Slots.all_reduce = lambda *args: calls.append(1) or original(*args)  # type: ignore[method-assign]
    for name, settings in runs.items():
        calls.clear()
        shared_memory._slots.clear()
        losses = train(settings).losses
        found[name] = losses, len(calls), [dist.get_world_size(group) for group in shared_memory._slots]
    return found


def test_only_tensor_parallel_groups_share_memory_and_the_losses_are_those_of_gloo_bit_by_bit(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text")
    runs = {name: small(text, name, tp=2, dp=2, **LARGE, **changes) for name, changes in HOW.items()}
    for found in launch(counted, 4, args=(runs,), timeout=300):
        losses, count, groups = found["shared"]
        each_step = 4 * runs["shared"].num_layers + 1 + 1  # also the embedding, and the input of the output layer
        assert count >= each_step * runs["shared"].steps
        assert groups == [2]
        assert found["gloo"] == (losses, 0, [])
        assert found["cut"][1:] == (0, []), "with sequence parallelism nothing could use it"
    assert not read_log(Path(runs["cut"].folder))[0]["shares_memory"]
