"""The study: it measures a run for real, and the report reads what it finds."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import saying
from tests.capstone.made_up import MEASURED, write_run
from tplab.capstone.checkpoints.folders import StepFolders
from tplab.capstone.report.run import Run
from tplab.capstone.settings.run_folder import write_settings
from tplab.capstone.settings.settings import MATTER, Settings
from tplab.capstone.study import run as study_module
from tplab.capstone.study.run import Budget, is_done, main, study
from tplab.runtime import RankError

pytestmark = pytest.mark.slow

TINY = Settings(data_limit=60_000, vocab_size=300, num_layers=1, hidden_size=32, num_heads=2, seq_length=16, tp=2,
                steps=4, batch_size=2, micro_batch_size=2, sample_tokens=4, evaluation_batches=1, save_every=0,
                warmup_steps=1, chapters="nowhere")  # fmt: skip
BUDGET = Budget(alone=3, scaling=2, warm_up=1, rounds=2)


def test_the_run_is_done_first_and_its_losses_are_those_of_one_rank(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(study_module, "Budget", lambda: BUDGET)
    settings = replace(TINY, folder=str(tmp_path / "runs" / "tiny"))
    settings.save(tmp_path / "settings.yaml")
    assert main(["--config", str(tmp_path / "settings.yaml")]) == 0
    assert is_done(settings)
    run = Run(Path(settings.folder))
    assert run.measured["alone"] == pytest.approx([run.steps[step]["loss"] for step in (1, 2, 3)], abs=1e-5)
    turns = run.measured["scaling"]["turns"]
    assert [turn["ranks"] for turn in turns] == [1, 2]
    for turn in turns:
        assert sum(turn["predicted"].values()) > 0
        assert len(turn["rounds"]) == BUDGET.rounds
        assert min(turn["rounds"]) > 0
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"tiny", "tokens"}, "nothing is left behind"


def test_a_run_that_was_stopped_is_not_measured(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(study_module, "carry_out", lambda settings: 0)
    assert main(["--folder", str(tmp_path / "run")]) == 0
    assert "measured" in capsys.readouterr().out


def pretended(found: list[tuple[int, str, str]]):
    """In place of `launch`: remember the ranks, their backend and their folder, and write the log of a run."""

    def launch(function, world_size: int, *, args: tuple, backend: str, **options: object) -> None:
        (settings,) = args
        found.append((world_size, backend, settings.layers))
        if world_size == 1 and settings.micro_batch_size > 1:
            raise RankError("..", 0, "OutOfMemoryError", "no room")
        write_run(Path(settings.folder), settings)

    return launch


@pytest.mark.parametrize(("gpus", "backend"), [(1, "gloo"), (2, "nccl")])
def test_fewer_ranks_compute_where_the_whole_run_does(gpus: int, backend: str, tmp_path: Path, monkeypatch):
    asked: list[tuple[int, str, str]] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(study_module, "launch", pretended(asked))
    study(replace(TINY, folder=str(tmp_path / "run"), layers="mine", micro_batch_size=1), budget=BUDGET)
    assert asked == [(p, backend, "tplab") for p in (1, 1, 2, 1, 2)]


def test_a_model_that_is_too_large_for_one_rank_is_timed_on_more(tmp_path: Path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(study_module, "launch", pretended([]))
    path = study(replace(TINY, folder=str(tmp_path / "run")), budget=BUDGET, say=said.append)
    measured = json.loads(path.read_text())
    assert measured["alone"] == []
    assert [turn["ranks"] for turn in measured["scaling"]["turns"]] == [2]
    assert "OutOfMemoryError" in said[0]


def test_what_was_measured_with_other_settings_is_left_out(tmp_path: Path):
    settings = write_run(tmp_path, measured=MEASURED)
    assert Run(tmp_path).measured["alone"] == MEASURED["alone"]
    for other in ({"tp": 1}, {"hidden_size": 128}):
        then = {name: getattr(replace(settings, **other), name) for name in MATTER}
        (tmp_path / "measurements.json").write_text(json.dumps(MEASURED | {"settings": then}))
        assert Run(tmp_path).measured == {}, other


def test_settings_of_another_run_are_refused_before_anything_is_measured(tmp_path: Path):
    settings = write_run(tmp_path)
    write_settings(settings)
    StepFolders(tmp_path / "checkpoints").path(60).mkdir(parents=True)
    with pytest.raises(ValueError, match=saying("hidden_size", "64", "128")):
        study(replace(settings, hidden_size=128))
