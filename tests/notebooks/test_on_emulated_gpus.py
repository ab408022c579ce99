"""Every cell of every chapter runs on a machine with eight GPUs, which are emulated."""

import pytest

from tests.course.test_chapters import STEMS, spread
from tests.emulated_gpu.machine import PATIENCE, on_gpus, pytest_on

pytestmark = pytest.mark.timeout(PATIENCE + 60)


LAUNCH = """
from torch import distributed as dist
from tplab import launch
assert launch(dist.get_backend, 2) == ["nccl", "nccl"]
"""


def test_launches_use_the_gpus() -> None:
    done = on_gpus(8, "-c", LAUNCH)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("stem", spread(STEMS))
def test_every_cell_runs(stem: str) -> None:
    assert pytest_on(8, "tests.notebooks.test_chapters", "-k", stem, marked="not gpu") == 1
