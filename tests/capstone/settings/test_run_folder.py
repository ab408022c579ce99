"""The folder of a run: when it binds the settings of the next one."""

import errno
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tplab.capstone.settings.io import read_settings
from tplab.capstone.settings.run_folder import check_unchanged, checkpoints_in, locked, write_settings
from tplab.capstone.settings.settings import Settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    settings = Settings(folder=str(tmp_path / "run"))
    write_settings(settings)
    return settings


def save(settings: Settings, name: str) -> None:
    (Path(settings.folder) / "checkpoints" / name).mkdir(parents=True)


def test_a_new_folder_and_a_first_save_that_was_killed_bind_nobody(settings: Settings) -> None:
    check_unchanged(replace(settings, folder=f"{settings.folder}-new"))
    save(settings, "step-000002.saving")
    assert not checkpoints_in(Path(settings.folder))
    check_unchanged(replace(settings, seed=1))


def test_a_checkpoint_binds_what_is_trained_and_not_how(settings: Settings) -> None:
    other = replace(settings, weight_decay=0.2, hidden_size=64, seed=1)
    check_unchanged(other)  # there is nothing yet
    save(settings, "step-000002")
    layout = {"tp": 2, "pp": 2, "dp": 2, "zero": 3, "sequence_parallel": True, "micro_batch_size": 4}
    check_unchanged(replace(settings, **layout, log_every=7, keep=9))
    check_unchanged(replace(settings, learning_rate=5e-4, steps=900, precision="bfloat16"))
    for change in ({"precision": "float64"}, {"num_layers": 2}, {"gated": True}):
        with pytest.raises(ValueError, match=f"{next(iter(change))} was .* and is now"):
            check_unchanged(replace(settings, **change))
    with pytest.raises(ValueError, match="different settings") as raised:
        check_unchanged(other)
    for line in ("hidden_size was 128 and is now 64", "weight_decay was 0.1 and is now 0.2"):
        assert line in str(raised.value)
    assert re.search("seed +was 0 and is now 1", str(raised.value))
    assert read_settings(Path(settings.folder) / "settings.yaml") == settings
    (Path(settings.folder) / "settings.yaml").unlink()
    with pytest.raises(ValueError, match="checkpoints, but not the settings.yaml"):
        check_unchanged(settings)


def test_a_folder_that_cannot_be_written_to_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(OSError, match=r"can't write to .*run \(Read-only file system\)\. Use a --folder in a place"):
        with locked(tmp_path / "run"):
            pass
