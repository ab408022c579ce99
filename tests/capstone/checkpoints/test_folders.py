"""What has the name of a checkpoint is never overwritten."""

from pathlib import Path

import pytest

from tplab.capstone.checkpoints.folders import StepFolders


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
