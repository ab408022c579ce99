"""A run's losses are those of plain PyTorch on one process (on other grids: test_grids.py). A run that was stopped goes
on as if nothing had happened. Asked to stop, or when the loss is no number, all ranks end alike.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.capstone.small import apart, plain_losses, small, write_text
from tplab import launch
from tplab.capstone.settings.settings import Settings
from tplab.capstone.training.log import Row, read_log, steps_of
from tplab.capstone.training.loop import Outcome, train
from tplab.capstone.training.stopping import stop_file

Report = dict[str, Any]


def run_all(cases: dict[str, tuple[Callable[..., Any], Settings]]) -> Report:
    """All cases on the same ranks, one after another: a launch costs more than a run."""
    return {name: way(settings) for name, (way, settings) in cases.items()}


def raises(settings: Settings) -> str:
    with pytest.raises((ValueError, FloatingPointError)) as error:
        train(settings)
    return str(error.value)


def at_step_2(do: Callable[[], object]) -> Callable[[Row], None]:
    """A `tell` callback that calls `do` when step 2 is logged."""

    def tell(row: Row) -> None:
        if row["kind"] == "step" and row["step"] == 2:
            do()

    return tell


def with_a_file(settings: Settings) -> Outcome:
    return train(settings, tell=at_step_2(stop_file(Path(settings.folder)).touch))


def with_another_seed(settings: Settings) -> str:
    train(settings)
    return raises(replace(settings, seed=5))


def mended(settings: Settings) -> tuple[str, Outcome]:
    """Train two steps, go on until the loss is no number, and then to the end as planned, but with other settings."""
    train(replace(settings, stop_after=2))
    said = raises(replace(settings, learning_rate=1e30, max_norm=0.0))
    return said, train(replace(settings, learning_rate=1e-3, max_norm=0.1, steps=6, precision="bfloat16"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("capstone") / "text")


@pytest.fixture(scope="module")
def expected(text: Path) -> tuple[list[float], list[float]]:
    return plain_losses(small(text, "plain"))


@pytest.fixture(scope="module")
def on_two(text: Path) -> list[Report]:
    run = partial(small, text)
    float32 = {"precision": "float32", "tp": 2, "micro_batch_size": 4}
    cases: dict[str, tuple[Callable[..., Any], Settings]] = {
        "float32": (train, run("d", **float32)),
        "bfloat16": (train, run("e", **float32 | {"precision": "bfloat16"})),
        "planned": (train, run("o", **float32, plan=True)),
        "dropout, dp=2": (train, run("n", dp=2, micro_batch_size=2, dropout=0.1)),
        "diverged": (mended, run("i", **float32, save_every=1)),
        "asked": (with_a_file, run("k", **float32)),
        "changed": (with_another_seed, run("l", **float32, save_every=2, stop_after=2)),
    }
    return launch(run_all, 2, args=(cases,), timeout=300)


def test_alone_the_losses_and_norms_are_those_of_plain_pytorch(text, expected):
    outcome = train(small(text, "alone"))
    assert (outcome.step, outcome.stopped) == (8, "done")
    assert apart(outcome.losses, expected[0]) < 1e-9
    rows = steps_of(read_log(Path(outcome.folder)))
    assert apart([row["norm"] for row in rows], expected[1]) < 1e-9
    assert min(expected[1]) > 0.5, "every step should be clipped"
    assert [row["communication"] for row in rows] == [[0.0]] * 8
    assert [row["sent"] for row in rows] == [[0]] * 8


def test_in_lower_precision_the_losses_are_nearly_the_same(on_two, expected):
    assert apart(on_two[0]["float32"].losses, expected[0]) < 1e-4
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
    other = read_log(text.parent / "d")
    assert other[0]["plan"] is None
    assert {tuple(row["tensors"]) for row in other if row["kind"] == "step"} == {(0, 0)}


def test_a_micro_batch_is_dropped_alike_by_whichever_replica_computes_it(text, on_two, expected):
    alone = train(small(text, "dropped", micro_batch_size=2, dropout=0.1)).losses
    assert apart(alone, on_two[0]["dropout, dp=2"].losses) < 1e-9
    assert apart(alone, expected[0]) > 1e-3


def test_weights_whose_loss_is_no_number_are_not_saved_and_the_run_goes_on_with_other_settings(text, on_two):
    """The loss of step 3 is finite: its update is what destroys the weights."""
    said, outcome = on_two[0]["diverged"]
    assert said == on_two[1]["diverged"][0]
    assert "the loss on held-out text after step 3 is nan, so the training has diverged" in said
    rows = read_log(text.parent / "i")
    losses = {row["step"]: row["loss"] for row in steps_of(rows) if row["step"] < 3}
    assert "If you run the same command again, the run resumes from step 2." in said
    assert "lower --learning-rate (it was 1e+30 at this step)" in said
    ends = [(row["step"], row["why"]) for row in rows if row["kind"] == "end"]
    assert ends == [(2, "stop_after"), (3, "the loss on held-out text after step 3 is nan"), (6, "done")]
    assert (outcome.step, len(outcome.losses)) == (6, 4), "steps 3 to 6"
    assert all(map(math.isfinite, [*outcome.losses, *losses.values()]))


def test_asked_to_stop_all_ranks_save_the_same_step_and_end(on_two):
    outcome = on_two[0]["asked"]
    assert outcome == on_two[1]["asked"]
    assert (outcome.stopped, outcome.step) == ("asked to stop", 3), "the file is there after step 2"
    folder = Path(outcome.folder)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"step-{outcome.step:06d}"]
    assert read_log(folder)[-1] == {"kind": "end", "step": outcome.step, "why": "asked to stop"}
    assert not (folder / "stop").exists()


def test_a_run_with_other_settings_is_refused_and_left_alone(text, on_two):
    assert "seed was 3 and is now 5" in on_two[0]["changed"]
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


def test_a_run_goes_on_in_the_current_folder_and_is_left_alone_when_it_is_done(text, expected, monkeypatch):
    """Its tokens lie beside it, as those of any run do."""
    (text.parent / "here").mkdir()
    monkeypatch.chdir(text.parent / "here")
    settings = replace(small(text, "here"), folder=".", save_every=3, stop_after=3)
    first, second = train(settings), train(replace(settings, stop_after=None))
    assert (first.step, first.stopped, second.step, second.stopped) == (3, "stop_after", 8, "done")
    assert apart(first.losses + second.losses, expected[0]) < 1e-9
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
    train(replace(settings, folder=str(text.parent / "often again")))
    again = [row for row in read_log(text.parent / "often again") if row["kind"] in ("sample", "evaluation")]
    assert again == [row for row in rows if row["kind"] in ("sample", "evaluation")]
