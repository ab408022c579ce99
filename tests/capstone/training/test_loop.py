"""On every grid, with every stage of ZeRO, a run has the losses and norms of plain PyTorch on one process in float64,
and it goes on on any other grid. So does a Llama, whose reference is written out in tests/capstone/small.py too. All
ranks end alike if the run is asked to stop, or if its loss is no number.
"""

import math
import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial, partialmethod
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

from tests import saying
from tests.capstone.small import LLAMA, apart, plain_losses, small, write_text
from tplab import RankError, launch
from tplab.capstone.checkpoints.writer import Checkpoints
from tplab.capstone.data.prepare import prepare
from tplab.capstone.settings.settings import Settings
from tplab.capstone.training import trainer
from tplab.capstone.training.log import read_log, steps_of
from tplab.capstone.training.loop import ASKED, Outcome, train
from tplab.capstone.training.stopping import stop_file
from tplab.capstone.training.trainer import Trainer
from tplab.checkpoint.sharded import load_sharded
from tplab.gpt.model import ParallelGPT
from tplab.runtime import shared_memory

pytestmark = pytest.mark.timeout(900)  # for all runs on 2, 4 and 8 ranks, on a busy machine

WRITES = {"sample_tokens": 6, "prompt": "def rank"}
SP: dict[str, Any] = {"sequence_parallel": True}
LAYERS = {"recompute": "layers"}
TWO: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2, "micro_batch_size": 2},
    "tp, sequence": {"tp": 2, "micro_batch_size": 4, "recompute": "attention", **SP},
    "dp": {"dp": 2, "micro_batch_size": 2, "async_grad_allreduce": False, **LAYERS},
    "llama, tp": {"tp": 2, **LLAMA, **WRITES},
    "stages": {"pp": 2, "micro_batch_size": 2},
    "uneven stages, one micro-batch": {"pp": 2, "num_layers": 3, "async_grad_allreduce": False},
    **{f"zero {stage}": {"dp": 2, "zero": stage, "micro_batch_size": 2} for stage in (1, 2, 3)},
    "llama, zero 3": {"dp": 2, "zero": 3, "micro_batch_size": 4, **LLAMA, **LAYERS, **WRITES},
}
FOUR: dict[str, dict[str, Any]] = {
    "tp, stages": {"tp": 2, "pp": 2, "micro_batch_size": 4, **LAYERS},
    "llama, tp, stages, sequence": {"tp": 2, "pp": 2, "micro_batch_size": 2, **LLAMA, **SP},
    "four stages": {"pp": 4, "num_layers": 5, "micro_batch_size": 1, **LAYERS},
    **{
        f"stages, zero {stage}": {"pp": 2, "dp": 2, "zero": stage, "micro_batch_size": 2, "num_layers": 3}
        for stage in (1, 2, 3)
    },
    **{
        f"tp, zero {stage}, sequence": {"tp": 2, "dp": 2, "zero": stage, "micro_batch_size": 2, **SP, **WRITES}
        for stage in (1, 2, 3)
    },
}
EIGHT: dict[str, dict[str, Any]] = {
    f"all, zero {stage}": {
        "tp": 2, "pp": 2, "dp": 2, "zero": stage, "micro_batch_size": 2, **(LLAMA if stage > 1 else {}),
        **(SP if stage % 2 else {}), **(LAYERS if stage == 3 else {}), **WRITES,
    }
    for stage in (1, 3)
}  # fmt: skip
CASES = {2: TWO, 4: FOUR, 8: EIGHT}


def train_all(runs: dict[str, Settings]) -> dict[str, Outcome]:
    """All runs on the same ranks, one after another, because a launch takes longer than a run."""
    return {name: train(settings) for name, settings in runs.items()}


def on_ranks(text: Path) -> dict[str, Any]:
    """What a rank finds in all runs on this number of ranks."""
    found: dict[str, Any] = train_all(runs_on(text, dist.get_world_size()))
    match dist.get_world_size():
        case 2:
            found |= run_all(cases(text)) | train_all(compiled_runs(text) | {"dropped": dropped(text)})
            found["graphs"] = counters["stats"]["unique_graphs"]
        case 4:
            found["sharing"] = {tuple(dist.get_process_group_ranks(group)) for group in shared_memory._slots}
            found |= {"in a row": _in_a_row(in_a_row(text)), "twice": _twice(text)}
    return found


STEPS = 5  # three in which the learning rate rises, and two in which it falls


def runs_on(text: Path, ranks: int) -> dict[str, Settings]:
    return {name: small(text, f"{ranks} {name}", steps=STEPS, **changes) for name, changes in CASES[ranks].items()}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_text(tmp_path_factory.mktemp("grids") / "text")
    prepare(small(folder, "plain"))
    return folder


@pytest.fixture(scope="module")
def expected(text: Path) -> dict[tuple[int, bool], tuple[list[float], list[float]]]:
    """Losses and norms by number of layers, and whether it is a Llama."""
    sizes = [(layers, llama) for llama in (False, True) for layers in (2, 3, 5) if layers == 2 or not llama]
    return {
        (layers, llama): plain_losses(small(text, "plain", num_layers=layers, steps=STEPS, **(LLAMA if llama else {})))
        for layers, llama in sizes
    }


@pytest.fixture(scope="module")
def results(text: Path) -> dict[int, list[dict[str, Any]]]:
    """By number of ranks: what each rank found."""
    return {ranks: launch(on_ranks, ranks, args=(text,), timeout=600) for ranks in CASES}


@pytest.mark.parametrize("ranks", CASES)
def test_losses_and_norms_are_those_of_plain_pytorch(ranks: int, text: Path, expected, results):
    texts: dict[tuple[int, bool], set[str]] = {}
    first, *others = results[ranks]
    for name, settings in runs_on(text, ranks).items():
        kind = settings.num_layers, settings.gated
        losses, norms = expected[kind]
        rows = read_log(Path(settings.folder))
        assert apart(first[name].losses, losses) < 1e-10, name
        assert apart([row["norm"] for row in steps_of(rows)], norms) < 1e-10, name
        assert all(found[name] == first[name] for found in others), name
        (held_out,) = (row["loss"] for row in steps_of(rows, "evaluation"))
        assert 0.5 * losses[-1] < held_out < 2 * losses[-1], name
        texts.setdefault(kind, set()).update(row["text"] for row in steps_of(rows, "sample"))
    assert all(len(of_kind) <= 1 for of_kind in texts.values()), "every grid writes the same text"
    assert any(texts.values()) == any(run.pp == 1 and run.sample_tokens for run in runs_on(text, ranks).values())


def test_only_tensor_parallel_groups_share_memory(results):
    assert [found["sharing"] for found in results[4]] == [{(0, 1)}, {(0, 1)}, {(2, 3)}, {(2, 3)}]


# Each run does two steps and saves, and the next one goes on from there.
IN_A_ROW: list[dict[str, Any]] = [
    {"pp": 2, "dp": 2, "zero": 2, "micro_batch_size": 2},
    {"tp": 2, "pp": 2, **SP},
    {"tp": 2, "dp": 2, "zero": 3, "micro_batch_size": 2},
    {"pp": 4, "micro_batch_size": 2},
    {"dp": 4, "zero": 1, "micro_batch_size": 1},
]


def in_a_row(text: Path) -> Settings:
    return small(text, "in a row", num_layers=4, steps=11, **LLAMA)


def _in_a_row(settings: Settings) -> list[float]:
    """Go through all grids. Returns the losses."""
    losses: list[float] = []
    for number, changes in enumerate(IN_A_ROW):
        losses += train(replace(settings, stop_after=2 * number + 2, save_every=2, **changes)).losses
    return losses


def test_a_run_goes_on_with_any_other_grid_and_stage_of_zero(text: Path, results):
    settings = in_a_row(text)
    right, _ = plain_losses(settings)
    for found in results[4]:
        assert apart(found["in a row"], right[:10]) < 1e-10
    assert apart(train(replace(settings, save_every=1)).losses, right[10:]) < 1e-10, "and then on one process"
    alone = ParallelGPT(settings.model, dtype=torch.float64)
    load_sharded(Path(settings.folder, "checkpoints", "step-000011"), alone)
    assert all(parameter.isfinite().all() for parameter in alone.parameters())


SAME: list[dict[str, Any]] = [
    {"pp": 2, "dp": 2, "zero": stage, "micro_batch_size": 1, **kind} for stage, kind in ((0, {}), (3, LLAMA))
] + [{"tp": 2, "dp": 2, "zero": 3, **SP, "recompute": "layers"}]


def _twice(text: Path) -> list[tuple[list[float], list[float]]]:
    """Each grid: without a stop, and stopped after step 2, which saves, and resumed. Returns the losses."""
    found = []
    for number, changes in enumerate(SAME):
        settings = small(text, f"same {number}", precision="float32", dropout=0.1, save_every=4, steps=4)
        one = replace(settings, **{"micro_batch_size": 2, **changes})
        two = replace(one, folder=f"{one.folder} in two")
        parts = train(replace(two, stop_after=2, save_every=2)).losses + train(two).losses
        found.append((train(one).losses, parts))
    return found


def test_a_run_that_was_stopped_goes_on_bit_for_bit_on_the_same_grid(results):
    for on_rank in results[4]:
        for changes, (whole, parts) in zip(SAME, on_rank["twice"], strict=True):
            assert parts == whole, changes
            assert len(whole) == 4


# A rank is killed in each part of its work

SAVE_EVERY = 2
KILLED = {"tp": 2, **LLAMA, "precision": "float32", "dropout": 0.1, "save_every": SAVE_EVERY}
KILLS: tuple[tuple[type, str, int], ...] = (  # in which call of which method
    (Trainer, "run", 2 * SAVE_EVERY + 1),
    (Checkpoints, "_save", 2),
    (Checkpoints, "load", 1),
)


def train_until_killed(settings: Settings, owner: type, name: str, call: int) -> None:
    """Train on a rank. The last rank kills itself in the given call of a method."""
    if dist.get_rank() == dist.get_world_size() - 1:
        original, left = getattr(owner, name), [call]

        def method(self: Any, *args: Any) -> Any:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(self, *args)

        setattr(owner, name, method)
    train(settings)


def test_after_a_kill_the_run_goes_on_bit_for_bit(text: Path, results):
    killed = small(text, "killed", **KILLED)
    for kill in KILLS:
        with pytest.raises(RankError, match="SIGKILL"):
            launch(train_until_killed, 2, args=(killed, *kill))
    launch(train, 2, args=(killed,))
    rows = read_log(text.parent / "killed")
    assert [row["loss"] for row in steps_of(rows)] == results[2][0]["never killed"].losses
    for before, start in pairwise(rows):
        if start["kind"] == "start" and before["kind"] == "step":
            assert before["step"] - (start["resumed_from"] or 0) <= SAVE_EVERY


def test_every_step_and_micro_batch_has_other_dropout(text: Path, monkeypatch: pytest.MonkeyPatch):
    seeds: list[int] = []
    monkeypatch.setattr(trainer, "seed_all", lambda seed, group: seeds.append(seed))
    train(small(text, "seeds", dropout=0.1, micro_batch_size=2, steps=3))
    assert len(set(seeds)) == 3 * 4


def dropped(text: Path) -> Settings:
    return small(text, "dropped", dropout=0.5, pp=2, micro_batch_size=4, steps=2, learning_rate=0.0,
                 min_learning_rate=0.0, evaluate_every=1)  # fmt: skip


def test_a_stage_drops_something_in_training_alone(text: Path, results):
    settings = dropped(text)
    none = replace(settings, folder=f"{settings.folder} alone", pp=1, dropout=0.0)
    losses = results[2][0]["dropped"].losses
    assert all(1e-4 < abs(a - b) < 1 for a, b in zip(losses, train(none).losses, strict=True))
    first, second = (
        [row["loss"] for row in steps_of(read_log(Path(one.folder)), "evaluation")] for one in (settings, none)
    )
    assert apart(first, second) < 1e-10


def compiled_runs(text: Path) -> dict[str, Settings]:
    """Traced and differentiated by torch.compile, without its C++ kernels: those take half a minute.

    They stop before the evaluation behind the last step, for which the layers would be compiled a second time.
    """
    nn.Module.compile = partialmethod(nn.Module.compile, backend="aot_eager")  # type: ignore[method-assign]
    same = {"precision": "float32", "compile": True, "micro_batch_size": 4, "steps": 4, "stop_after": 3}
    kinds = {"stages": {"pp": 2}, "zero": {"dp": 2, "zero": 2}, "llama": {"tp": 2, **LLAMA}}
    return {f"compiled {name}": small(text, f"compiled {name}", **same, **changes) for name, changes in kinds.items()}


def test_compiled_layers_of_stages_and_of_shared_gradients_train_the_same(text: Path, results):
    found = results[2][0]
    assert found["graphs"] >= 2
    for name, settings in compiled_runs(text).items():
        right = plain_losses(replace(settings, precision="float64", compile=False))[0]
        assert apart(found[name].losses, right[:3]) < 1e-4, name


# Lower precision, plans, other ways to end, and the log


def run_all(cases: dict[str, tuple[Callable[..., Any], Settings]]) -> dict[str, Any]:
    return {name: way(settings) for name, (way, settings) in cases.items()}


def raises(settings: Settings) -> str:
    with pytest.raises((ValueError, FloatingPointError)) as error:
        train(settings)
    return str(error.value)


def with_a_file(settings: Settings) -> Outcome:
    """Train until the file that asks to stop is there, which is after step 2."""
    stop = stop_file(Path(settings.folder))
    return train(settings, tell=lambda row: stop.touch() if row["step"] == 2 else None)


def with_another_seed(settings: Settings) -> str:
    train(settings)
    return raises(replace(settings, seed=5))


def mended(settings: Settings) -> tuple[str, Outcome]:
    """Train two steps, go on until the loss is no number, and then to the end as planned, but with other settings."""
    train(replace(settings, stop_after=2))
    said = raises(replace(settings, learning_rate=1e30, max_norm=0.0))
    return said, train(replace(settings, learning_rate=1e-3, max_norm=0.1, steps=6, precision="bfloat16"))


@pytest.fixture(scope="module")
def of_one_process(text: Path) -> tuple[list[float], list[float]]:
    return plain_losses(small(text, "plain"))


def cases(text: Path) -> dict[str, tuple[Callable[..., Any], Settings]]:
    run = partial(small, text)
    float32 = {"precision": "float32", "tp": 2, "micro_batch_size": 4}
    return {
        "never killed": (train, run("never killed", **KILLED)),
        "float32": (train, run("d", **float32)),
        "bfloat16": (train, run("e", **float32 | {"precision": "bfloat16"})),
        "planned": (train, run("o", **float32, plan=True)),
        "dropout, dp=2": (train, run("n", dp=2, micro_batch_size=2, dropout=0.1)),
        "diverged": (mended, run("i", **float32, save_every=1)),
        "asked": (with_a_file, run("k", **float32)),
        "changed": (with_another_seed, run("l", **float32, save_every=2, stop_after=2)),
    }


@pytest.fixture(scope="module")
def on_two(results: dict[int, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return results[2]


def test_alone_the_losses_and_norms_are_those_of_plain_pytorch(text, of_one_process):
    outcome = train(small(text, "alone"))
    assert (outcome.step, outcome.stopped) == (8, "done")
    assert apart(outcome.losses, of_one_process[0]) < 1e-9
    rows = steps_of(read_log(Path(outcome.folder)))
    assert apart([row["norm"] for row in rows], of_one_process[1]) < 1e-9
    assert min(of_one_process[1]) > 0.5, "every step should be clipped"
    assert [row["communication"] for row in rows] == [[0.0]] * 8
    assert [row["sent"] for row in rows] == [[0]] * 8


def test_in_lower_precision_the_losses_are_nearly_the_same(on_two, of_one_process):
    assert apart(on_two[0]["float32"].losses, of_one_process[0]) < 1e-4
    lower, single = (on_two[0][precision].losses for precision in ("bfloat16", "float32"))
    assert 1e-5 < apart(lower[:4], single[:4]) < 0.02
    assert apart(lower, single) < 0.15  # plain PyTorch's are 0.095 apart, because the learning rate is high at step 5


def test_a_plan_changes_no_loss_and_its_bytes_and_memory_come_true(text, on_two):
    assert on_two[0]["planned"].losses == on_two[0]["float32"].losses
    start, *rows = read_log(text.parent / "o")
    plan, steps = start["plan"], [row for row in rows if row["kind"] == "step"]
    assert plan["sent"] == max(steps[0]["sent"])
    assert all(seconds > 0 for name, seconds in plan["seconds"].items() if name != "pipeline bubble")
    peaks = [row["tensors"] for row in steps]
    assert peaks[1] == peaks[-1], "after two steps, nothing is counted any more"
    assert max(peaks[1]) == pytest.approx(sum(plan["memory"].values()), rel=0.3)


def test_a_micro_batch_is_dropped_alike_by_whichever_replica_computes_it(text, on_two, of_one_process):
    alone = train(small(text, "replicas dropped", micro_batch_size=2, dropout=0.1)).losses
    assert apart(alone, on_two[0]["dropout, dp=2"].losses) < 1e-9
    assert apart(alone, of_one_process[0]) > 1e-3


def test_weights_whose_loss_is_no_number_are_not_saved_and_the_run_goes_on_with_other_settings(text, on_two):
    """The loss of step 3 is finite: its update is what destroys the weights."""
    said, outcome = on_two[0]["diverged"]
    assert said == on_two[1]["diverged"][0]
    assert re.search(saying("held-out", "step 3", "nan", "diverged", "step 2", "--learning-rate", "1e+30"), said)
    rows = read_log(text.parent / "i")
    losses = {row["step"]: row["loss"] for row in steps_of(rows) if row["step"] < 3}
    first, (step, why), last = ((row["step"], row["why"]) for row in rows if row["kind"] == "end")
    assert (first, step, last) == ((2, "stop_after"), 3, (6, "done"))
    assert re.search(saying("held-out", "step 3", "nan"), why)
    assert (outcome.step, len(outcome.losses)) == (6, 4), "steps 3 to 6"
    assert all(map(math.isfinite, [*outcome.losses, *losses.values()]))


def test_asked_to_stop_all_ranks_save_the_same_step_and_end(on_two):
    outcome = on_two[0]["asked"]
    assert outcome == on_two[1]["asked"]
    assert (outcome.stopped, outcome.step) == (ASKED, 3), "the file is there after step 2"
    folder = Path(outcome.folder)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"step-{outcome.step:06d}"]
    assert read_log(folder)[-1] == {"kind": "end", "step": outcome.step, "why": ASKED}
    assert not (folder / "stop").exists()


def test_a_run_with_other_settings_is_refused_and_left_alone(text, on_two):
    assert re.search(saying(" seed ", "3", "5"), on_two[0]["changed"])
    assert on_two[0]["changed"] == on_two[1]["changed"]
    rows = read_log(text.parent / "l")
    assert [row["kind"] for row in rows].count("start") == 1
    assert rows[0]["settings"]["seed"] == 3


def test_the_log_says_what_each_rank_did(text, on_two):
    start, *rows = read_log(text.parent / "d")
    assert (start["ranks"], start["backend"], start["device"]) == (2, "gloo", "cpu")
    assert start["shares_memory"]
    for row in (row for row in rows if row["kind"] == "step"):
        assert row["sent"][0] == row["sent"][1] > 0
        assert 0 < min(row["communication"]) <= max(row["communication"]) <= 1
        assert min(row["memory"]) > 1e7
    assert [row["kind"] for row in rows[-2:]] == ["evaluation", "end"]
    assert math.isfinite(rows[-2]["loss"])


def test_a_run_goes_on_in_the_current_folder_and_is_left_alone_when_it_is_done(text, of_one_process, monkeypatch):
    """Its tokens lie beside it, as those of any run do."""
    (text.parent / "here").mkdir()
    monkeypatch.chdir(text.parent / "here")
    settings = replace(small(text, "here"), folder=".", save_every=3, stop_after=3)
    first, second = train(settings), train(replace(settings, stop_after=None))
    assert (first.step, first.stopped, second.step, second.stopped) == (3, "stop_after", 8, "done")
    assert apart(first.losses + second.losses, of_one_process[0]) < 1e-9
    rows = read_log(Path("."))
    assert [row["resumed_from"] for row in rows if row["kind"] == "start"] == [None, 3]
    assert [row["step"] for row in rows if row["kind"] == "step"] == list(range(1, 9))
    assert [row["step"] for row in rows if row["kind"] == "checkpoint"] == [3, 6, 8]
    assert train(replace(settings, stop_after=None)) == Outcome(8, [], "done", ".")
    assert read_log(Path(".")) == rows
    assert (text.parent / "here" / "tokens").resolve().parent == (text.parent / "tokens").resolve()


def test_samples_and_evaluations_come_when_they_are_due(text):
    settings = small(
        text, "often", steps=4, evaluate_every=2, sample_every=2, sample_tokens=5, prompt="def rank(", log_every=3
    )
    train(settings)
    rows = read_log(Path(settings.folder))
    assert [(row["kind"], row["step"]) for row in rows[1:]] == [
        ("step", 2), ("evaluation", 2), ("sample", 2), ("step", 3), ("step", 4), ("evaluation", 4), ("sample", 4),
        ("end", 4),
    ]  # fmt: skip
    samples = [row for row in rows if row["kind"] == "sample"]
    assert all(row["prompt"] == "def rank(" and row["text"].startswith("def rank(") for row in samples)
