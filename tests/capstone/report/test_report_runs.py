"""The report of runs that are less plain: a thinned log, other ranks half-way, dropout, GPUs, old measurements."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.capstone.made_up import MEASURED, SETTINGS, Log, losses, start_row, step_row, write_measurements, write_run
from tplab.capstone.report import compose
from tplab.capstone.report.blocks import Figure, to_markdown
from tplab.capstone.report.run import Run
from tplab.capstone.settings.settings import MATTER


def words_of(folder: Path, title: str = "") -> str:
    report = compose(Run(folder))
    return report.about + str([part for part in report.sections if title in part.title])


def test_a_log_of_every_tenth_step_tells_the_whole_run(tmp_path: Path):
    write_run(tmp_path, replace(SETTINGS, log_every=10), MEASURED)
    report, words = compose(Run(tmp_path)), words_of(tmp_path)
    assert "60 of 60 steps" in report.about
    assert f"In 60 steps in float32, the model has read {60 * SETTINGS.tokens_per_step:,} tokens." in words
    values = losses(60)
    assert f"The training loss was {values[9]:.2f} nats per token at step 10 and {values[59]:.2f} at step 60." in words
    assert "In 3 of the first 30 steps, the losses agree." in words
    figures = {block.name: block for part in report.sections for block in part.blocks if isinstance(block, Figure)}
    above, _ = figures["one-rank"].picture.axes
    assert list(above.lines[0].get_xdata()) == [10, 20, 30]


def test_a_run_that_went_on_at_another_tp_is_reported_as_it_is_now(tmp_path: Path):
    log, wide = Log(tmp_path), replace(SETTINGS, tp=4)
    log.add(start_row(SETTINGS), *(step_row(SETTINGS, step, 5.0) | {"seconds": 9.0} for step in range(1, 31)))
    later = {"time": "2026-03-02T08:00:00+00:00", "step": 31, "resumed_from": 30}
    log.add(start_row(wide, **later), *(step_row(wide, step, 4.0) | {"seconds": 0.5} for step in range(31, 61)))
    run = Run(tmp_path)
    assert (run.ranks, run.done, run.step_seconds) == (4, 60, 0.5)
    assert len(run.memory) == len(run.communication or []) == 4
    assert "started 2026-03-01 12:00" in compose(run).about
    log.add(start_row(SETTINGS, step=61, resumed_from=60))
    assert Run(tmp_path).ranks == 4, "a start behind which no step was done says nothing of those there are"
    log.add(step_row(SETTINGS, 61, 3.9) | {"seconds": 7.0})
    assert Run(tmp_path).step_seconds == 7.0
    assert compose(Run(tmp_path)).title == "A GPT on 2 ranks"


def test_a_run_that_is_trained_differently_from_some_step_on_says_so(tmp_path: Path):
    log = Log(tmp_path)
    log.add(start_row(SETTINGS), *(step_row(SETTINGS, step, 5.0) for step in range(1, 31)))
    changes = {"learning_rate": [0.001, 0.0005], "steps": [60, 90]}
    log.add(start_row(SETTINGS, step=31, resumed_from=30, changes=changes), step_row(SETTINGS, 31, 4.0))
    write_measurements(tmp_path, MEASURED)
    words = words_of(tmp_path, "Loss")
    assert "At step 31, learning_rate changed from 0.001 to 0.0005 and steps changed from 60 to 90." in words
    assert "a single rank can't reproduce its losses" in words
    assert "The run was restarted once, from step 30." in words_of(tmp_path)


@pytest.mark.parametrize(("change", "seconds"), [({}, 0.1), ({"precision": "bfloat16"}, 3.0)])
def test_a_run_that_went_on_as_it_was_is_told_as_one(tmp_path: Path, change: dict, seconds: float):
    log, now = Log(tmp_path), replace(SETTINGS, **change)
    log.add(start_row(SETTINGS), *(step_row(SETTINGS, step, 5.0) | {"seconds": 0.1} for step in range(1, 31)))
    log.add(start_row(now, step=31, resumed_from=30), step_row(now, 31, 5.0) | {"seconds": 3.0})
    assert Run(tmp_path).step_seconds == seconds


@pytest.mark.parametrize(
    ("change", "off", "says"),
    [
        ({}, 1e-8, "the losses agree. They differ by at most 3e-07"),
        ({}, 0.5 / 30, "differ by up to 0.5, which is more than rounding in float32 can explain (about 0.001)"),
        ({"precision": "bfloat16"}, 0.02 / 30, "the losses agree. They differ by at most 0.02"),
        ({"precision": "float64"}, 1e-8, "more than rounding in float64 can explain"),
        ({"dropout": 0.1}, 0.5 / 30, "With dropout = 0.1, several ranks draw different masks than a single rank would"),
    ],
)
def test_a_difference_is_called_what_it_is(tmp_path: Path, change: dict, off: float, says: str):
    alone = {"losses": losses(30, off)}
    write_run(tmp_path, replace(SETTINGS, **change), MEASURED | {"alone": alone})
    words = words_of(tmp_path, "Loss")
    assert says in words
    assert ("in a different order" in words) == ("the losses agree" in words)


def test_whose_answers_trained_is_said_from_the_step_on_from_which_they_did(tmp_path: Path):
    mine = replace(SETTINGS, layers="mine")
    borrowed = {"whose": {"4.1": "yours", "5.2": "the course's solution"},
                "checked": {"4.1": "passed on 2026-03-01", "5.2": "in place of one that is still to do"}}  # fmt: skip
    own = {"whose": dict.fromkeys(("4.1", "5.2"), "yours"), "checked": dict.fromkeys(("4.1", "5.2"), "passed")}
    log = Log(tmp_path)
    log.add(start_row(mine, answers=borrowed), step_row(mine, 1, 5.0))
    assert "but 1 of the 2 answers comes from the course's solutions" in words_of(tmp_path)
    log.add(start_row(mine, step=2, resumed_from=1, answers=borrowed), step_row(mine, 2, 4.9))
    log.add(start_row(mine, step=3, resumed_from=2, answers=own), step_row(mine, 3, 4.8))
    words = words_of(tmp_path, "Whose layers")
    for line in (
        "Since step 1: 1 of the 2 answers is yours: 4.1. For 5.2, the course's solution is used, because your own "
        "answer is still to do.",
        "Since step 3: 2 of the 2 answers are yours: 4.1 and 5.2.",
    ):
        assert words.count(line) == 1
    assert "Since step 2" not in words
    assert "the course's solutions" not in words_of(tmp_path, "At a glance")


def planned(folder: Path, seconds: float, sent: int, **other: object) -> str:
    """What the report says about a run whose steps took so long, beside a plan of 100 ms, 29 MB and 1,234,567 bytes."""
    log = Log(folder)
    row = {"seconds": seconds, "sent": [sent, sent]}
    log.add(start_row(SETTINGS, **other), *(step_row(SETTINGS, step, 5.0) | row for step in range(1, 11)))
    return to_markdown(compose(Run(folder)))


@pytest.mark.parametrize(
    ("seconds", "sent", "other", "says"),
    [
        (0.11, 1_234_567, {}, ["1.10 times as long as predicted. The ranks sent exactly as many bytes as predicted.",
                               "| time per step | 100 ms | 110 ms | 1.10 |",
                               "| peak memory of tensors on a rank | 29 MB | 31.9 MB | 1.10 |",
                               "| bytes that a rank sends per step | 1,234,567 | 1,234,567 | 1.00 |"]),
        (0.2, 1_234_567, {}, ["2.00 times as long as predicted. That's quite far off, so maybe something else was"]),
        (0.05, 1_234_567, {}, ["0.50 times as long as predicted. Something else was probably using the machine while"]),
        (0.1, 1_234_667, {}, ["The ranks sent 100 bytes more than predicted."]),
        (0.1, 1_234_567, {"device": "cuda"}, ["| peak memory of tensors on a rank | 29 MB | 412 MB | 14.21 |"]),
        (0.1, 1_234_567, {"plan": None}, ["the predicted time, memory and traffic", "start a run with `--plan`"]),
    ],
)  # fmt: skip
def test_a_run_stands_beside_its_plan(seconds: float, sent: int, other: dict, says: list[str], tmp_path: Path):
    words = planned(tmp_path, seconds, sent, **other)
    for line in says:
        assert line in words


@pytest.mark.parametrize(("flops", "impossible"), [(6.1e10, False), (1e6, True)])
def test_more_than_the_machine_can_do_is_called_impossible(flops: float, impossible: bool, tmp_path: Path):
    write_run(tmp_path, measured=MEASURED | {"machine": MEASURED["machine"] | {"flops": flops}})
    assert ("More than 100% is impossible" in words_of(tmp_path, "Speed")) == impossible


@pytest.mark.parametrize(
    ("of_two", "threads", "says", "never"),
    [
        (0.08, 0.1, "2 ranks can't really be 2.38 times as fast as 1 rank. Something else must have used",
         "to exchange sums"),
        (0.1, 0.08, "A step of a single process with 2 threads takes 0.80 times as long as one of 2 ranks. Its threads "
         "work on the same tensors, so they don't have to exchange sums", "Be careful"),
        (0.1, None, "2 ranks are 1.90 times as fast as 1 rank.", "a single process"),
    ],
)  # fmt: skip
def test_an_impossible_speedup_is_called_that_and_threads_stand_beside_ranks(
    of_two: float, threads: float | None, says: str, never: str, tmp_path: Path
):
    write_scaling(tmp_path, {(1, 1): 0.19, (2, 1): of_two} | ({(1, 2): threads} if threads else {}))
    words = words_of(tmp_path, "Scaling")
    assert says in words
    assert never not in words


def test_scaling_begins_at_the_fewest_ranks_that_had_room(tmp_path: Path):
    write_scaling(tmp_path, {(2, 1): 0.2, (4, 1): 0.1})
    words = words_of(tmp_path, "Scaling")
    assert "4 ranks are 2.00 times as fast as 2 ranks." in words
    write_scaling(tmp_path, {(2, 1): 0.2})
    assert "a curve needs at least two" in words_of(tmp_path, "Scaling")


def write_scaling(folder: Path, times: dict[tuple[int, int], float]) -> None:
    """A run with the times of a step by ranks and threads."""
    turns = [
        {"ranks": p, "threads": threads, "predicted": time, "rounds": [time - 1e-3, time, time + 1e-3]}
        for (p, threads), time in times.items()
    ]
    write_run(folder, measured=MEASURED | {"scaling": MEASURED["scaling"] | {"turns": turns}})


def test_what_was_measured_with_another_layout_is_left_out(tmp_path: Path):
    now = {name: getattr(SETTINGS, name) for name in MATTER}
    then = {"settings": now | {"tp": 4, "recompute": "layers"}}
    write_run(tmp_path, measured=MEASURED | {"alone": MEASURED["alone"] | then})
    report = compose(Run(tmp_path))
    assert [block.what for block in report.missing] == ["a comparison with the losses of a single rank"]
    assert "made with other settings: alone (tp = 4, recompute = layers)." in str(report.sections[-1])
