"""The folder of a run: when it binds the settings of the next one."""

from dataclasses import replace
from pathlib import Path

import pytest

from tplab.capstone.settings.run_folder import check_unchanged, checkpoints_in, set_aside, write_settings
from tplab.capstone.settings.settings import Settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    settings = Settings(folder=str(tmp_path / "run"))
    write_settings(settings)
    return settings


def test_a_first_save_that_was_killed_binds_nobody(settings: Settings) -> None:
    (Path(settings.folder) / "checkpoints" / "step-000002.saving").mkdir(parents=True)
    assert not checkpoints_in(Path(settings.folder))
    check_unchanged(replace(settings, seed=1))


def test_a_checkpoint_binds_what_is_trained_and_not_how(settings: Settings) -> None:
    (Path(settings.folder) / "checkpoints" / "step-000002").mkdir(parents=True)
    check_unchanged(replace(settings, tp=2, log_every=7))
    with pytest.raises(ValueError, match=r"seed +0 in the run, 1 now"):
        check_unchanged(replace(settings, seed=1))


def test_what_is_set_aside_is_kept_in_a_new_folder_each_time(settings: Settings) -> None:
    folder = Path(settings.folder)
    for number in (1, 2):
        write_settings(replace(settings, seed=number))
        assert set_aside(folder) == folder / f"before-{number}"
        assert f"seed: {number}" in (folder / f"before-{number}" / "settings.yaml").read_text()
    assert set_aside(folder) is None
