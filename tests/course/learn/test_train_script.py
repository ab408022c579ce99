"""train.py and my_tp of the reference answers: they train a GPT under torchrun where tplab isn't installed."""

import importlib
import os
import shutil
import subprocess
import sys

import pytest
import torch.distributed as dist

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


def train(course: Course, ranks: int, *runs: list[str]) -> list[str]:
    return launch(_main, ranks, args=(str(course.folder), list(runs)), backend="gloo")[0]


def losses(course: Course, folder: str) -> list[float]:
    rows = (course.folder / folder / "log.csv").read_text().split()
    assert [int(row.split(",")[0]) for row in rows] == list(range(1, len(rows) + 1))
    return [float(row.split(",")[1]) for row in rows]


def run(course: Course, *command: str) -> subprocess.CompletedProcess:
    """Run a command where `import tplab` fails."""
    environment = {**os.environ, "PYTHONPATH": str(course.folder), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=course.folder, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def whole(course) -> str:
    """The folder of a run on two ranks under torchrun."""
    done = run(course, *TORCHRUN, library.SCRIPT, *options("whole"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"step {STEPS:5}   loss {losses(course, 'whole')[-1]:.4f}" in done.stdout
    return "whole"


MISUSES = [
    ({"tp": 3}, "2 ranks can't form replicas of tp=3"),
    ({"seq_length": 20000}, "more than 20000 are needed"),
    ({"text": "nowhere.txt"}, "nowhere.txt has 0 bytes of text"),
    ({"folder": "whole", "hidden_size": 64, "steps": STEPS + 1}, "belongs to a different model"),
    ({"learning_rate": 1e30}, "try a lower --learning-rate"),
]


@pytest.fixture(scope="module")
def ended(course, whole) -> dict[int, list[str]]:
    """What runs on 1, 2 and 4 ranks exit with: new ones, some that go on after a kill, and misuses."""
    shutil.copytree(course.folder / whole, course.folder / "cut")
    checkpoint, log = course.folder / "cut" / "step-000008", course.folder / "cut" / "log.csv"
    checkpoint.rename(checkpoint.with_suffix(".saving"))  # killed during the save
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:4]))
    shutil.copytree(course.folder / "cut", course.folder / "alone")
    misused = [options(**{"folder": f"misused{k}"} | flags) for k, (flags, _) in enumerate(MISUSES)]
    return {
        1: train(course, 1, options("one"), options("alone")),
        2: train(course, 2, options("cut"), *misused),
        4: train(course, 4, options("four", tp=2)),
    }


def test_it_learns_the_same_on_any_number_of_ranks(course, whole, ended):
    assert (ended[1][0], ended[4]) == ("", [""])
    assert losses(course, whole)[-1] < losses(course, whole)[0] - 0.5
    for folder in ("one", "four"):
        assert losses(course, folder) == pytest.approx(losses(course, whole), abs=2e-5)


def test_it_goes_on_from_its_checkpoint_as_if_it_had_never_stopped(course, whole, ended):
    assert ended[1][1] == ended[2][0] == ""
    assert losses(course, "cut") == losses(course, whole)
    assert losses(course, "alone") == pytest.approx(losses(course, whole), abs=2e-5)


def test_misuse_is_told_in_a_sentence(course, ended):
    told = ended[2][1:]
    assert [says in text for text, (_, says) in zip(told, MISUSES, strict=True)] == [True] * len(MISUSES), told
    assert "torchrun --standalone --nproc-per-node 2 train.py" in run(course, sys.executable, library.SCRIPT).stderr


def test_once_it_is_written_it_is_left_alone(course):
    script = course.folder / library.SCRIPT
    script.write_text("# mine now\n")
    pass_all(course, ["8.2"])
    assert script.read_text() == "# mine now\n"
