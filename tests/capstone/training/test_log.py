"""The log: every row is there at once, a kill costs the last line at most, and a run that goes on appends."""

import csv
import json
import os
import sys
import tracemalloc
from types import ModuleType
from typing import Any

import pytest

from tplab.capstone.training.log import Log, check_tensorboard, read_log, steps_of
from tplab.capstone.watching.console import ConsoleLog


def step(number: int, loss: float = 2.0) -> dict[str, Any]:
    return {
        "kind": "step", "step": number, "loss": loss, "learning_rate": 1e-3, "norm": 1.5, "seconds": 0.5, "tokens": 64,
        "tokens_per_second": 128.0, "communication": [0.1, 0.3], "sent": [10, 10], "memory": [7, 8],
    }  # fmt: skip


def rows_of_the_table(folder):
    with open(folder / "log.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def start(number: int) -> dict[str, Any]:
    return {"kind": "start", "step": number}


EVALUATION = {"kind": "evaluation", "step": 1, "loss": 3.0}


def test_rows_are_read_as_they_were_written_and_as_a_table(tmp_path):
    rows = [start(1), step(1), EVALUATION, {"kind": "end", "step": 1, "why": "done"}]
    log = Log(tmp_path)
    for number, row in enumerate(rows, 1):
        log.write(row)
        assert read_log(tmp_path) == rows[:number]
    first, second = rows_of_the_table(tmp_path)
    assert (first["step"], first["loss"], first["communication"], first["memory"]) == ("1", "2.0", "0.3", "8")
    assert (second["step"], second["loss"], second["evaluation"]) == ("1", "", "3.0")


def test_only_one_rank_writes(tmp_path):
    Log(tmp_path / "run", writes=False).write(step(1))
    assert not (tmp_path / "run").exists()
    assert read_log(tmp_path) == []


def test_a_line_that_a_kill_cut_off_is_dropped_and_the_log_goes_on(tmp_path):
    log = Log(tmp_path)
    log.write(step(1))
    log.write(step(2))
    for name in ("log.jsonl", "log.csv"):
        os.truncate(tmp_path / name, (tmp_path / name).stat().st_size - 5)
    assert read_log(tmp_path) == [step(1)]
    log = Log(tmp_path)
    log.write(step(3))
    assert read_log(tmp_path) == [step(1), step(3)]
    assert [row["step"] for row in rows_of_the_table(tmp_path)] == ["1", "3"]


def test_a_log_of_a_first_line_that_was_cut_off_is_empty_then(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"kind": "st')
    Log(tmp_path)
    assert (tmp_path / "log.jsonl").read_bytes() == b""


def test_of_a_long_log_only_the_end_is_read_to_go_on(tmp_path):
    (tmp_path / "log.jsonl").write_bytes(b'{"kind": "start"}\n' * 1_000_000 + b"{")
    tracemalloc.start()
    try:
        Log(tmp_path)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 4e6
    assert (tmp_path / "log.jsonl").stat().st_size == 18_000_000


def test_another_line_that_is_no_row_is_an_error_that_names_it(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"kind": "start"}\nnonsense\n{"kind": "end"}\n')
    with pytest.raises(ValueError, match=r"line 2 of .*log.jsonl isn.t a row of a log: .*nonsense.*Delete this line"):
        read_log(tmp_path)


@pytest.mark.parametrize("line", ["3", "[]", '{"step": 1}'])
def test_json_that_is_no_row_is_an_error_as_well(line, tmp_path):
    (tmp_path / "log.jsonl").write_text(f"{line}\n")
    with pytest.raises(ValueError, match="line 1 of"):
        read_log(tmp_path)


def test_of_steps_that_were_done_twice_the_later_count(tmp_path):
    rows = [start(1), step(1, 5.0), step(2, 4.0), step(3, 3.0), start(2), step(2, 4.5)]
    assert [(row["step"], row["loss"]) for row in steps_of(rows)] == [(1, 5.0), (2, 4.5)]
    assert steps_of(rows, "evaluation") == []


def test_a_number_that_is_none_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        Log(tmp_path).write(step(1, float("nan")))
    assert read_log(tmp_path) == []


def test_a_log_that_can_not_be_written_is_named(tmp_path):
    log = Log(tmp_path)
    (tmp_path / "log.jsonl").mkdir()
    with pytest.raises(OSError, match=r"couldn't write to .*log.jsonl: Is a directory.*checkpoints are intact"):
        log.write(step(1))


def test_tensorboard_gets_the_curves(tmp_path, monkeypatch):
    """With a stand-in for the package, which the course doesn't need."""
    written = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int) -> None:
            written.append((folder, purge_step))

        def __getattr__(self, name: str) -> Any:
            return lambda *values: written.append((name, *values))

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    log = Log(tmp_path, step=1, tensorboard=True)
    for row in (start(1), step(1), EVALUATION, {"kind": "sample", "step": 1, "prompt": "a", "text": "ab"}):
        log.write(row)
    log.close()
    assert written[0] == (str(tmp_path / "tensorboard"), 1)
    assert ("add_scalar", "train/loss", 2.0, 1) in written
    assert ("add_scalar", "evaluation/loss", 3.0, 1) in written
    assert ("add_text", "sample", "ab", 1) in written
    assert written[-1] == ("close",)


def test_without_tensorboard_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r'pip install "tplab\[tensorboard\]"'):
        check_tensorboard()


def test_lines_for_a_terminal(capsys):
    machine = {"gpu": None, "processor": "a processor"}
    about = {
        "machine": machine,
        "device": "cpu",
        "ranks": 2,
        "settings": {"start_from": None},
        "plan": None,
        "parameters": 1234567,
        "resumed_from": 40,
        "changes": {"learning_rate": [0.001, 0.0005]},
    }
    rows = [
        {**start(41), **about}, step(41), step(42), step(600), {"kind": "checkpoint", "step": 600, "seconds": 0.1},
        {"kind": "evaluation", "step": 600, "loss": 3.0}, {"kind": "sample", "step": 600, "text": "def f():\n    pass"},
        {"kind": "end", "step": 600, "why": "done"},
    ]  # fmt: skip
    lines = ConsoleLog(600)
    for row in rows:
        lines(json.loads(json.dumps(row)))
    assert capsys.readouterr().out.splitlines() == [
        "Training 1,234,567 parameters on 2 ranks (a processor) until step 600, resuming after step 40",
        "learning_rate changes from 0.001 to 0.0005",
        "step  41   loss 2.0000   norm 1.500   128 tokens/s   0:04:40 left",
        "step 600   loss 2.0000   norm 1.500   128 tokens/s   0:00:00 left",
        "step 600   saved a checkpoint",
        "step 600   loss 3.0000 on held-out text",
        "step 600   the model wrote:",
        "    def f():",
        "        pass",
        "step 600   the run ended (done)",
    ]
