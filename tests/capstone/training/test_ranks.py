"""The all-reduces of a run on one machine go through shared memory, and that changes nothing but their time."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.capstone.small import plain_losses, small, write_text
from tplab import launch
from tplab.capstone.settings.settings import Settings
from tplab.capstone.training.loop import Outcome, train
from tplab.runtime import shared_memory

LARGE: dict[str, Any] = {"seq_length": 32, "micro_batch_size": 8, "batch_size": 8, "steps": 4, "precision": "float32"}


def counted(settings: Settings) -> tuple[Outcome, int]:
    """Train, and count the all-reduces that went through shared memory."""
    count = 0
    original = shared_memory._Slots.all_reduce

    def all_reduce(*args: Any) -> Any:
        nonlocal count
        count += 1
        return original(*args)

    shared_memory._Slots.all_reduce = all_reduce  # type: ignore[method-assign]
    return train(settings), count


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
    assert gloos[1] == 0


def test_on_a_grid_only_the_tensor_parallel_groups_share_memory(text: Path) -> None:
    settings = small(text, "grid", tp=2, dp=2, **LARGE | {"micro_batch_size": 4, "seq_length": 64})
    found = launch(counted, 4, args=(settings,))
    expected, _ = plain_losses(replace(settings, tp=1, dp=1))
    for outcome, count in found:
        assert outcome.losses == pytest.approx(expected, rel=1e-4)
        assert count > 0
