"""The command: it starts its own ranks or runs on torchrun's, goes on where it stopped, and says what is wrong."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import saying
from tests.capstone.small import ONE_RANK, SMALL, write_text
from tplab.capstone.__main__ import main
from tplab.capstone.command import settings_from
from tplab.capstone.settings.io import PRESETS
from tplab.capstone.settings.settings import Settings
from tplab.capstone.training.log import read_log, steps_of

ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
COMMAND = [sys.executable, "-m", "tplab.capstone"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": ENVIRONMENT}


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """Of a run that doesn't end by itself."""
    SMALL.save(tmp_path / "small.yaml")
    text = write_text(tmp_path / "text")
    changes = ["--tp", "2", "--precision", "float32", "--steps", "100000", "--save-every", "5"]
    return ["--config", str(tmp_path / "small.yaml"), "--data", str(text), "--folder", str(tmp_path / "run"), *changes]


def wait_for(path: Path, pattern: str) -> None:
    until = time.monotonic() + 600  # other work on the machine may take nearly all of its time
    while not (path.exists() and re.search(pattern, path.read_text())):
        assert time.monotonic() < until, f"{pattern!r} never came into {path}"
        time.sleep(0.02)


@pytest.mark.timeout(1800)
def test_ctrl_c_saves_and_torchrun_goes_on_and_restarts_a_killed_rank(flags, tmp_path, capsys):
    folder, log = tmp_path / "run", tmp_path / "run" / "log.jsonl"
    run = subprocess.Popen([*COMMAND, *flags], **PIPES)
    try:
        wait_for(log, '"step": 3, "loss"')
        assert main(flags) == 2, "nobody else can train in the folder"
        lock = (folder / ".lock").read_text()
        assert re.search(saying(str(folder), lock, f"{folder}/stop"), capsys.readouterr().err)
        run.send_signal(signal.SIGINT)
        said, errors = run.communicate(timeout=600)
    finally:
        run.kill()
    assert run.returncode == 0, errors
    assert "Ctrl-C" in errors
    assert "Traceback" not in errors
    stopped = read_log(folder)[-1]["step"]
    assert re.search(rf"checkpoint.* step {stopped}\b", said)

    run = subprocess.Popen([*TORCHRUN, "-m", "tplab.capstone", *flags], **PIPES)
    try:
        wait_for(log, f'"step": {stopped + 12}, "loss"')
        os.kill(int((folder / ".lock").read_text().split()[1]), signal.SIGKILL)  # rank 0
        wait_for(log, rf'"resumed_from": \d(.|\n)*"resumed_from": (?!{stopped},)\d')
        (folder / "stop").touch()
        said, errors = run.communicate(timeout=600)
    finally:
        run.terminate()  # torchrun ends its ranks
        run.wait(60)
    assert run.returncode == 0, errors
    rows = read_log(folder)
    assert [row["step"] for row in rows if row["kind"] == "start"][:2] == [1, stopped + 1]
    (third,) = [row["resumed_from"] for row in rows if row["kind"] == "start"][2:]
    assert third > stopped
    assert third % 5 == 0, "that's where a checkpoint is"
    for step in (stopped, third):
        assert re.search(rf" step 100000[^\d\n]* step {step}\b", said)
    assert [row["step"] for row in steps_of(rows)] == list(range(1, rows[-1]["step"] + 1))
    assert rows[-1]["kind"] == "end"


@pytest.mark.slow
def test_a_rank_of_torchrun_that_fails_says_where_and_ends_at_once(flags):
    """The last --learning-rate counts. One rank, started as torchrun starts it."""
    wild = [*flags, "--tp", "1", "--learning-rate", "1e30", "--max-norm", "0"]
    run = subprocess.run([*COMMAND, *wild], env=ENVIRONMENT | ONE_RANK, capture_output=True, text=True, timeout=240)
    assert run.returncode == 1
    assert re.search(r"FloatingPointError: .*\bloss\b.* step \d", run.stderr)
    assert "in _diverged" in run.stderr


def test_a_run_in_a_folder_goes_on_with_its_own_settings(tmp_path):
    settings = Settings(folder=str(tmp_path), steps=7, stop_after=3, learning_rate=0.5)
    assert settings_from({"folder": str(tmp_path)}).learning_rate == PRESETS["laptop"].learning_rate
    settings.save(tmp_path / "settings.yaml")
    again = settings_from({"folder": str(tmp_path), "keep": 5})
    assert (again.learning_rate, again.steps, again.stop_after, again.keep) == (0.5, 7, None, 5)


ON_TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "11", "WORLD_SIZE": "16", "LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("arguments", "environment", "says"),
    [
        (["report", "nowhere"], {}, "nowhere"),
        (["--preset", "h100x8", "--folder", "nowhere"], ON_TORCHRUN, saying("= 8 ranks", "16")),
        (["--config", "nowhere.yaml"], ON_TORCHRUN, saying(socket.gethostname(), "nowhere.yaml")),
        (["--config", "nowhere.yaml"], {**ON_TORCHRUN, "LOCAL_RANK": "3"}, "^$"),
    ],
)
def test_a_command_that_cannot_run_says_why_on_one_rank_per_machine(arguments, environment, says, monkeypatch, capsys):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert re.search(says, said)
    assert "Traceback" not in said
