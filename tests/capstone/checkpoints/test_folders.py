"""What killed programs left is removed, but not what another machine makes, of whose lock this one knows nothing."""

import os
import time
from pathlib import Path

import pytest

from tplab.capstone.checkpoints.folders import StepFolders, new_folder


def test_only_what_nobody_makes_any_more_is_removed(tmp_path: Path) -> None:
    with new_folder(tmp_path / "made") as place:
        left = tmp_path / ".making-of-a-killed-one"
        left.mkdir()
        two_days_ago = time.time() - 2 * 24 * 3600
        os.utime(left, (two_days_ago, two_days_ago))
        with new_folder(tmp_path / "another"):
            assert place.is_dir()
            assert not left.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["another", "made"]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_has_the_name_of_a_checkpoint_stays_and_is_named(tmp_path: Path, kind: str) -> None:
    steps = StepFolders(tmp_path)
    steps.path(3, ".saving").mkdir()
    steps.path(3).write_text("mine") if kind == "file" else (steps.path(3) / "mine").mkdir(parents=True)
    with pytest.raises(FileExistsError, match=f"something else is at {steps.path(3)}. Move it out of the way"):
        steps.publish(3)
    assert steps.path(3).read_text() == "mine" if kind == "file" else (steps.path(3) / "mine").is_dir()
    with pytest.raises(FileNotFoundError, match="step-000004.saving"):
        steps.publish(4)
