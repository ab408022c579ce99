"""One configuration: from a preset, a file or flags. Wrong settings are told with the field and what would fit, and a
run's folder with checkpoints binds the settings of the next one.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests import saying
from tplab.capstone import command
from tplab.capstone.command import parser
from tplab.capstone.settings.io import PRESETS, from_values, read_settings, settings_of
from tplab.capstone.settings.run_folder import check_unchanged, checkpoints_in, write_settings
from tplab.capstone.settings.settings import Settings
from tplab.capstone.training.ranks import check_started


@pytest.mark.parametrize(
    ("gpus", "torchrun", "flags", "name", "tp"),
    [
        (0, None, {}, "laptop", 2),
        (0, None, {"dp": 2}, "laptop", 1),
        (1, None, {}, "h100x1", 1),
        (8, None, {}, "h100x8", 8),
        (8, None, {"tp": 4, "dp": 2}, "h100x8", 4),
        (1, (2, 1), {"tp": 2}, "h100x8", 2),  # two machines
    ],
)
def test_a_preset_is_chosen_by_the_machine(gpus, torchrun, flags, name, tp, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(command.torchrun, "is_active", lambda: torchrun is not None)
    for variable, value in zip(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), torchrun or (), strict=False):
        monkeypatch.setenv(variable, str(value))
    found = command.settings_from({"folder": str(tmp_path), **flags, "micro_batch_size": 1})
    assert (found.hidden_size, found.tp) == (PRESETS[name].hidden_size, tp)


def test_flags_change_a_file_and_a_file_changes_a_preset(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("steps: 7\nlearning_rate: 1e-3\n")
    flags = ["--preset", "laptop", "--config", str(file), "--steps", "9", "--tp", "4", "--no-plan"]
    expected = replace(PRESETS["laptop"], learning_rate=1e-3, steps=9, tp=4, plan=False)
    assert settings_of(vars(parser().parse_args(flags))) == expected


def test_what_is_saved_is_read_again(tmp_path):
    for number, settings in enumerate([*PRESETS.values(), Settings(data="text", data_limit=10, prompt='"#: ')]):
        settings.save(tmp_path / f"{number}.yaml")
        assert read_settings(tmp_path / f"{number}.yaml") == settings


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dropout": 0.1, "layers": "mine"}, saying('layers="mine"', "dropout=0.0", "dropout=0.1")),
        ({"step": 3}, saying("['step']", "steps")),
        ({"steps": "many"}, saying("steps", "int", "'many'")),
        ({"tp": 3}, saying("num_heads=8", "3 ranks", "1, 2, 4, 8")),
        ({"tp": 2, "sequence_parallel": True, "seq_length": 5}, saying("tp=2", "seq_length=5")),
        ({"batch_size": 12, "micro_batch_size": 8}, saying("batch_size=12", "1 · 8 = 8", "16")),
        ({"layers": "plain", "tp": 2}, saying('layers="plain"', "tp=1", "tp=2", 'layers="tplab"')),
        ({"pp": 5}, saying("pp=5", "num_layers=4")),
        ({"zero": 2}, saying("zero=2", "dp=1", "dp", "2", "zero", "0")),
        ({"zero": 3, "dp": 2, "batch_size": 32, "compile": True}, saying("zero=3", "compile", "False", "zero", "2")),
    ],
)
def test_a_wrong_setting_is_named_with_what_would_fit(values, message):
    with pytest.raises(ValueError, match=message):
        from_values(values)


def test_the_ranks_that_were_started_are_compared_with_those_that_are_needed():
    check_started(Settings(tp=2, pp=2, dp=2, batch_size=32), 8)
    with pytest.raises(ValueError, match=saying("= 4 ranks", "8")):
        check_started(Settings(tp=2, pp=2), 8)


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
    check_unchanged(replace(settings, seed=1))  # there is nothing yet
    save(settings, "step-000002")
    check_unchanged(replace(settings, tp=2, pp=2, dp=2, zero=2, sequence_parallel=True, micro_batch_size=4, keep=9))
    check_unchanged(
        replace(settings, async_grad_allreduce=False, shared_memory=False, recompute="layers", compile=True)
    )
    check_unchanged(replace(settings, learning_rate=5e-4, steps=900, precision="bfloat16"))
    other = {"precision": "float64", "num_layers": 2, "gated": True, "weight_decay": 0.2, "seed": 1}
    for name, value in other.items():
        with pytest.raises(ValueError, match=saying(f" {name} ", repr(getattr(settings, name)), repr(value))):
            check_unchanged(replace(settings, **{name: value}))
    assert read_settings(Path(settings.folder) / "settings.yaml") == settings
    (Path(settings.folder) / "settings.yaml").unlink()
    with pytest.raises(ValueError, match=saying(settings.folder, "settings.yaml")):
        check_unchanged(settings)
