"""The all-reduces of a run on one machine go through shared memory, and that changes nothing but their time."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.capstone.small import plain_losses, small, write_text
from tplab import launch
from tplab.capstone.settings.settings import Settings
from tplab.capstone.training.log import read_log
from tplab.capstone.training.loop import Outcome, train
from tplab.runtime import shared_memory

LARGE: dict[str, Any] = {"seq_length": 32, "micro_batch_size": 8, "batch_size": 8, "steps": 4, "precision": "float32"}


def counted(settings: Settings) -> tuple[Outcome, int, list[int]]:
    """Train. Also return how many all-reduces went through shared memory, and the sizes of the groups that have it."""
    count = 0
    original = shared_memory._Slots.all_reduce

    def all_reduce(*args: Any) -> Any:
        nonlocal count
        count += 1
        return original(*args)

    shared_memory._Slots.all_reduce = all_reduce  # type: ignore[method-assign]
    return train(settings), count, [dist.get_world_size(group) for group in shared_memory._slots]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("ranks") / "text")


def test_two_ranks_have_the_same_losses_bit_by_bit_through_shared_memory_and_through_gloo(text: Path) -> None:
    shared, gloos = (
        launch(counted, 2, args=(small(text, f"two {on}", tp=2, shared_memory=on, **LARGE),))[0] for on in (True, False)
    )
    assert shared[0].losses == gloos[0].losses
    settings = small(text, "two", **LARGE)
    each_step = 4 * settings.num_layers + 1 + 1  # also the embedding, and the input of the output layer
    assert shared[1] >= each_step * settings.steps
    assert gloos[1:] == (0, [])


def test_with_sequence_parallelism_nothing_could_use_it(text: Path) -> None:
    settings = small(text, "sequence", tp=2, sequence_parallel=True, **LARGE)
    assert [found[1:] for found in launch(counted, 2, args=(settings,))] == [(0, [])] * 2
    start, *_ = read_log(Path(settings.folder))
    assert not start["shares_memory"]


def test_on_a_grid_only_the_tensor_parallel_groups_share_memory(text: Path) -> None:
    settings = small(text, "grid", tp=2, dp=3, **LARGE | {"batch_size": 12, "micro_batch_size": 4, "seq_length": 64})
    found = launch(counted, 6, args=(settings,))
    expected, _ = plain_losses(replace(settings, tp=1, dp=1))
    for outcome, count, groups in found:
        assert outcome.losses == pytest.approx(expected, rel=1e-4)
        assert count > 0
        assert groups == [settings.tp]
