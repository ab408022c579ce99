"""Every cell of every chapter runs on a machine with eight GPUs, which are emulated."""

import pytest

from tests.course.test_chapters import STEMS, spread
from tests.emulated_gpu.machine import PATIENCE, pytest_on

pytestmark = pytest.mark.timeout(PATIENCE + 60)


@pytest.mark.parametrize("stem", spread(STEMS))
def test_every_cell_runs_and_launches_use_the_gpus(stem: str) -> None:
    assert pytest_on(8, "tests.notebooks.test_chapters", "-k", stem, marked="not gpu") == 1
