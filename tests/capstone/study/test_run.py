"""The study: every part measures a run for real and is kept at once; what is there is left; the report reads it all."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.capstone.made_up import MEASURED, write_run
from tplab import launch
from tplab.capstone.checkpoints.folders import StepFolders
from tplab.capstone.planning.predictions import calibrated_step, predicted_memory
from tplab.capstone.report import compose
from tplab.capstone.report.run import Run
from tplab.capstone.settings.run_folder import write_settings
from tplab.capstone.settings.settings import MATTER, Settings
from tplab.capstone.study import run as study_module
from tplab.capstone.study.programs import Short
from tplab.capstone.study.run import PARTS, Budget, is_done, main, study
from tplab.cost.calibration import Kernels, Line
from tplab.memory import MemoryMeter
from tplab.memory.memory_bill import rank_parameters
from tplab.runtime import RankError

pytestmark = pytest.mark.slow

TINY = Settings(data_limit=60_000, vocab_size=300, num_layers=1, hidden_size=32, num_heads=2, seq_length=16, tp=2,
                steps=4, batch_size=2, micro_batch_size=2, sample_tokens=4, evaluation_batches=1, save_every=0,
                warmup_steps=1, chapters="nowhere")  # fmt: skip
BUDGET = Budget(alone=3, scaling=2, warm_up=1)
MACHINE = {"ranks": 2, "flops": 1e12, "bandwidth": 1e10, "memory": 1e9, "alpha": 1e-5, "beta": 1e-9}  # as if measured
KERNELS = Kernels((1e-3, 2e-3), (3e-4, 4e-4), (5e-4, 6e-4), 7e-3, 1e-9, Line(1e-4, 1e-9), Line(2e-4, 3e-9))


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return replace(TINY, folder=str(tmp_path_factory.mktemp("runs") / "tiny"))


@pytest.fixture(scope="module")
def measured(settings: Settings) -> dict:
    said: list[str] = []
    path = study(settings, budget=BUDGET, say=said.append)
    assert [line.partition(":")[0] for line in said] == list(PARTS)
    return json.loads(path.read_text())


def test_the_run_is_done_first_and_measured_and_the_report_misses_nothing(settings: Settings, measured: dict):
    assert is_done(settings)
    assert list(measured) == list(PARTS)
    run = Run(Path(settings.folder))
    assert measured["alone"]["losses"] == pytest.approx([run.steps[step]["loss"] for step in (1, 2, 3)], abs=1e-5)
    turns = measured["scaling"]["turns"]
    assert [turn["ranks"] for turn in turns][:2] == [1, 2]
    for turn in turns:
        assert turn["predicted"] > 0
        assert len(turn["rounds"]) == BUDGET.rounds
        assert min(turn["rounds"]) > 0
    report = compose(Run(Path(settings.folder)))
    assert report.missing == []
    assert "The ranks sent exactly as many bytes as predicted." in str(report.sections)


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The parts that a study asks for, each replaced by one that measures nothing."""
    done: list[str] = []
    for name in PARTS:
        monkeypatch.setitem(study_module.PARTS, name, lambda _, name=name: done.append(name) or {"says": "anew"})
    return done


def test_what_is_there_is_left_and_what_is_asked_for_is_done_again(
    tmp_path: Path, done: list[str], capsys: pytest.CaptureFixture[str]
):
    settings = write_run(tmp_path, measured={name: part for name, part in MEASURED.items() if name != "alone"})
    study(settings)
    assert done == ["alone"]
    assert "alone: anew" in capsys.readouterr().out
    assert main(["--folder", str(tmp_path), "--only", "machine", "alone"]) == 0
    assert done == ["alone", "machine", "alone"]
    measured = json.loads((tmp_path / "measurements.json").read_text())
    of_run = {"settings": {name: getattr(settings, name) for name in MATTER}}
    anew = {"says": "anew"} | of_run
    scaling = json.loads(json.dumps(MEASURED["scaling"])) | of_run
    assert measured == {"machine": anew, "alone": anew, "scaling": scaling}


def test_what_was_measured_with_other_settings_is_measured_anew(tmp_path: Path, done: list[str]):
    settings = write_run(tmp_path)
    study(settings)
    assert done == list(PARTS)
    study(replace(settings, keep=5))
    assert done == list(PARTS), "nothing depends on how many checkpoints are kept"
    for other in ({"tp": 1}, {"sequence_parallel": True}, {"recompute": "layers"}, {"micro_batch_size": 4}):
        done.clear()
        study(replace(settings, **other))
        assert done == list(PARTS), other


def test_settings_of_another_run_and_unknown_parts_are_refused_before_anything_is_measured(tmp_path: Path):
    settings = write_run(tmp_path)
    write_settings(settings)
    StepFolders(tmp_path / "checkpoints").path(60).mkdir(parents=True)
    with pytest.raises(ValueError, match="hidden_size +was 64 and is now 128"):
        study(replace(settings, hidden_size=128))
    with pytest.raises(ValueError, match=r"no parts called \['everything'\]. Its parts are machine, alone, scaling"):
        study(replace(TINY, folder=str(tmp_path)), only=["everything"])


def test_a_part_that_fails_loses_no_other(tmp_path: Path, done: list[str], monkeypatch: pytest.MonkeyPatch):
    settings = write_run(tmp_path)
    monkeypatch.setitem(study_module.PARTS, "scaling", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        study(settings)
    assert list(json.loads((tmp_path / "measurements.json").read_text())) == done
    assert done == list(PARTS)[: list(PARTS).index("scaling")]


def no_room(_) -> None:
    raise RankError("rank 0 failed: ..", 0, "OutOfMemoryError", "there is no room\nfor 2 GB")


def test_a_part_whose_ranks_fail_is_left_out(tmp_path: Path, done: list[str], monkeypatch: pytest.MonkeyPatch):
    settings, said = write_run(tmp_path), []
    monkeypatch.setitem(study_module.PARTS, "alone", no_room)
    study(settings, say=said.append)
    assert "alone: not measured, because of OutOfMemoryError: there is no room" in said
    assert set(PARTS) - {"alone"} == set(json.loads((tmp_path / "measurements.json").read_text())) == set(done)


# Predictions


def test_what_is_recomputed_takes_its_time_once_more_per_layer_and_micro_batch():
    settings = replace(TINY, num_layers=3, batch_size=4, vocab_size=512)
    assert settings.micro_batches == 2
    once, attention, layers = (
        calibrated_step(replace(settings, recompute=what), KERNELS) for what in ("nothing", "attention", "layers")
    )
    assert attention["matmuls"] - once["matmuls"] == pytest.approx(2 * 3 * 5e-4)
    assert layers["matmuls"] - once["matmuls"] == pytest.approx(2 * 3 * (1e-3 + 5e-4))
    assert layers["element-wise"] - once["element-wise"] == pytest.approx(2 * 3 * 3e-4)


def test_a_calibrated_pipeline_takes_the_slowest_stage_and_waits_once_for_each_of_the_others():
    settings = replace(TINY, num_layers=3, tp=1, pp=2, batch_size=8, vocab_size=512)
    step = calibrated_step(settings, KERNELS)
    layer = 1e-3 + 2e-3 + 3e-4 + 4e-4 + 5e-4 + 6e-4
    assert settings.layers_of_stages == [2, 1]
    assert step["matmuls"] + step["element-wise"] == pytest.approx(4 * (layer + 7e-3)), "the logits make it slower"
    assert step["pipeline bubble"] == pytest.approx(2 * layer)
    message = 2 * 16 * 32 * 4
    sums = 2 * 1e-4 + (8 + 4 * 512 * 32) * 1e-9  # the norm, and the gradient of the table
    assert step["communication"] == pytest.approx(4 * (1e-4 + message * 1e-9) + sums)
    shared = replace(settings, pp=1, dp=2, zero=1)
    assert calibrated_step(shared, KERNELS)["optimizer"] == pytest.approx(
        1e-9 * rank_parameters(settings.model, shared.layout) / 2
    )


def test_what_replicas_share_is_divided_in_the_bill():
    settings = replace(TINY, tp=1, dp=2, batch_size=4, vocab_size=384)
    bills = [predicted_memory(replace(settings, zero=zero)) for zero in range(4)]
    whole, one, two, three = (parts for parts, _ in bills)
    assert one["optimizer state"] == two["optimizer state"] == three["optimizer state"] == whole["optimizer state"] // 2
    assert (one["gradients"], two["gradients"]) == (whole["gradients"], whole["gradients"] // 2)
    assert two["weights"] == whole["weights"]
    assert three["weights"] == whole["weights"] // 2 + whole["weights"], "with one layer, all of it is gathered"


def peaks_of_the_second_step(runs: list[Settings]) -> list[int]:
    peaks = []
    for settings in runs:
        with MemoryMeter() as meter:
            short = Short(settings)
            short.once()
            begin = len(meter.curve)
            short.once()
        peaks.append(max(meter.curve[begin:]))
        del short
    return peaks


def test_the_bill_of_stages_and_of_zero_is_near_what_is_measured(tmp_path: Path):
    sizes = {"vocab_size": 1024, "num_layers": 4, "hidden_size": 128, "num_heads": 4, "seq_length": 64}
    sizes |= {"tp": 1, "batch_size": 8, "micro_batch_size": 4, "folder": str(tmp_path / "run")}
    changes = [
        {"pp": 2, "micro_batch_size": 2, "num_layers": 5},
        {"pp": 2, "micro_batch_size": 4, "recompute": "layers"},
    ]
    changes += [{"dp": 2, "zero": stage} for stage in (1, 2, 3)]
    runs = [replace(TINY, **sizes | change) for change in changes]
    peaks = launch(peaks_of_the_second_step, 2, args=(runs,), timeout=None)
    for settings, *of_ranks in zip(runs, *peaks, strict=True):
        assert max(of_ranks) == pytest.approx(sum(predicted_memory(settings)[0].values()), rel=0.2), settings
