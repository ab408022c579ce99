"""One configuration: from a preset, a file or flags. Wrong settings are told with the field and what would fit, and a
run's folder with checkpoints binds the settings of the next one.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

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
        ({"dropout": 0.1, "layers": "mine"}, "only supports dropout=0.0"),
        ({"step": 3}, r"no settings called \['step'\]. The settings are .*steps"),
        ({"steps": "many"}, "steps should be int, not 'many'"),
        ({"tp": 3}, "num_heads=8 can't be divided over 3 ranks.*Use p in 1, 2, 4, 8"),
        ({"tp": 2, "sequence_parallel": True, "seq_length": 5}, "a multiple of tp=2, but seq_length=5"),
        ({"batch_size": 12, "micro_batch_size": 8}, "batch_size=12 should be a multiple of .* = 1 · 8 = 8. Try 16$"),
        ({"layers": "plain", "tp": 2}, 'only supports tp=1. Use that instead of tp=2, or use layers="tplab"'),
        ({"pp": 5}, "pp=5 is too large: each stage needs one of the num_layers=4 layers"),
        ({"zero": 2}, "zero=2 shards over replicas, but dp=1. Set dp to 2 or more, or zero to 0"),
        ({"zero": 3, "dp": 2, "batch_size": 32, "compile": True}, "zero=3. Set compile to False, or zero to 2"),
    ],
)
def test_a_wrong_setting_is_named_with_what_would_fit(values, message):
    with pytest.raises(ValueError, match=message):
        from_values(values)


def test_the_ranks_that_were_started_are_compared_with_those_that_are_needed():
    check_started(Settings(tp=2, pp=2, dp=2, batch_size=32), 8)
    with pytest.raises(ValueError, match="= 4 ranks, but 8 were started"):
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
    for change in ({"precision": "float64"}, {"num_layers": 2}, {"gated": True}, {"weight_decay": 0.2}, {"seed": 1}):
        with pytest.raises(ValueError, match=f"{next(iter(change))} was .* and is now"):
            check_unchanged(replace(settings, **change))
    assert read_settings(Path(settings.folder) / "settings.yaml") == settings
    (Path(settings.folder) / "settings.yaml").unlink()
    with pytest.raises(ValueError, match="checkpoints, but not the settings.yaml"):
        check_unchanged(settings)
