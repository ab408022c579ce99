"""train.py and my_tp of the reference answers: they train a GPT under torchrun where tplab isn't installed."""

import importlib
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch.distributed as dist

from tests import saying
from tests.course.learn.test_library import EXERCISES, empty_course, pass_all
from tplab import launch
from tplab.course.learn import library
from tplab.course.learn.course_files import Course

STEPS = 8
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
FLAGS = {
    "text": "notes.txt", "num_layers": 2, "hidden_size": 32, "num_heads": 4, "seq_length": 16, "steps": STEPS,
    "batch_size": 8, "warmup_steps": 3, "save_every": 4, "log_every": 2, "sample": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def course(tmp_path_factory) -> Course:
    """A folder with the library and train.py, which is written once everything that it needs has passed."""
    made = empty_course(tmp_path_factory.mktemp("own") / "my_course")
    pass_all(made, [exercise for exercise in EXERCISES if exercise != "8.2"])
    assert not (made.folder / library.SCRIPT).exists()
    pass_all(made, ["8.2"])
    (made.folder / "tplab.py").write_text("raise ImportError('tplab is not installed here')\n")
    (made.folder / "notes.txt").write_text("".join(f"{n} times {n} is {n * n}. " for n in range(400)))
    return made


def options(folder: str, **flags: object) -> list[str]:
    given = {**FLAGS, "folder": folder, **flags}
    return [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def _main(folder: str, runs: list[list[str]]) -> list[str]:
    """Call train.main() with each of these options, on a rank that is there already: what it exits with, if it does."""
    os.chdir(folder)
    sys.path.append(folder)
    world = str(dist.get_world_size())
    dist.init_process_group = dist.destroy_process_group = lambda *_: None
    train = importlib.import_module("train")
    os.environ |= {"RANK": str(dist.get_rank()), "LOCAL_RANK": "0", "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    ended = []
    for options in runs:
        sys.argv = [library.SCRIPT, *options]
        try:
            train.main()
            ended.append("")
        except (SystemExit, ValueError) as end:
            ended.append(str(end))
    return ended


def losses(course: Course, folder: str) -> list[float]:
    rows = (course.folder / folder / "log.csv").read_text().split()
    assert [int(row.split(",")[0]) for row in rows] == list(range(1, len(rows) + 1))
    return [float(row.split(",")[1]) for row in rows]


@pytest.fixture(scope="module")
def whole(course) -> list[float]:
    """The losses of a run on two ranks under torchrun, where `import tplab` fails."""
    environment = {**os.environ, "PYTHONPATH": str(course.folder), "OMP_NUM_THREADS": "1"}
    command = [*TORCHRUN, library.SCRIPT, *options("whole")]
    done = subprocess.run(command, cwd=course.folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = losses(course, "whole")
    assert f"step {STEPS:5}   loss {found[-1]:.4f}" in done.stdout
    return found


def test_it_learns_and_does_the_same_with_other_replicas_and_after_a_kill(course, whole):
    assert whole[-1] < whole[0] - 0.5
    shutil.copytree(course.folder / "whole", course.folder / "cut")
    checkpoint, log = course.folder / "cut" / "step-000008", course.folder / "cut" / "log.csv"
    checkpoint.rename(checkpoint.with_suffix(".saving"))  # killed during the save
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:4]))
    runs = [options("new", tp=2), options("cut", tp=1), options("misused", tp=3)]
    ended = launch(_main, 4, args=(str(course.folder), runs), backend="gloo")[0]
    assert ended[:2] == ["", ""]
    assert re.search(saying("4 ranks", "tp=3", "8 sequences"), ended[2])
    for folder in ("new", "cut"):
        assert losses(course, folder) == pytest.approx(whole, abs=2e-5)


def test_once_it_is_written_it_is_left_alone(course):
    script = course.folder / library.SCRIPT
    script.write_text("# mine now\n")
    pass_all(course, ["8.2"])
    assert script.read_text() == "# mine now\n"
