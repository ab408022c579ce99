"""train.py and my_tp of the reference answers: they train a GPT under torchrun where tplab isn't installed."""

import importlib
import os
import shutil
import subprocess
import sys

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.course.learn.test_library import EXERCISES, empty_course, pass_all
from tplab import device, launch
from tplab.capstone import Settings
from tplab.capstone.training.build_model import build_model
from tplab.capstone.training.ranks import join
from tplab.capstone.training.step import Step
from tplab.course.learn import library
from tplab.course.learn.course_files import Course
from tplab.tensor import full_state_dict, load_full_state_dict

STEPS = 8
SIZES = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "seq_length": 16}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
FLAGS = {**SIZES, "steps": STEPS, "batch_size": 8, "warmup_steps": 3, "save_every": 4, "log_every": 2, "sample": 4}


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
    given = {**FLAGS, "text": "notes.txt", "folder": folder, **flags}
    return [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def _main(folder: str, runs: list[list[str] | None]) -> list[str]:
    """Call train.main() with each of these options, on a rank that is there already: what it exits with, if it does.

    Without options, call it as if torchrun hadn't started it.
    """
    os.chdir(folder)
    sys.path.append(folder)
    world = str(dist.get_world_size())
    dist.init_process_group = dist.destroy_process_group = lambda *_: None
    train = importlib.import_module("train")
    ended = []
    for options in runs:
        os.environ |= {"RANK": str(dist.get_rank()), "LOCAL_RANK": "0", "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        if options is None:
            del os.environ["RANK"]
        sys.argv = [library.SCRIPT, *(options or [])]
        try:
            train.main()
            ended.append("")
        except (SystemExit, ValueError) as end:
            ended.append(str(end))
    return ended


def train(course: Course, ranks: int, *runs: list[str] | None) -> list[str]:
    return launch(_main, ranks, args=(str(course.folder), list(runs)), backend="gloo")[0]


def losses(course: Course, folder: str) -> list[float]:
    rows = (course.folder / folder / "log.csv").read_text().split()
    assert [int(row.split(",")[0]) for row in rows] == list(range(1, len(rows) + 1))
    return [float(row.split(",")[1]) for row in rows]


def _capstone_losses(settings: Settings, batches: list) -> list[float]:
    """The losses of the capstone's step, with the course's layers, on these batches."""
    ranks = join(settings)
    model = build_model(settings, settings.model, mesh=ranks.mesh, device=device())
    group = ranks.mesh.get_group("tp")
    weights = full_state_dict(model, group)
    torch.manual_seed(0)
    for name, weight in weights.items():  # the first weights of train.py
        if weight.dim() > 1:
            residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
            weight.normal_(std=0.02 / (2 * settings.num_layers) ** 0.5 if residual else 0.02)
    load_full_state_dict(model, weights, group)
    step = Step(model, settings, ranks)
    return [step.run(number, *one)[0].item() for number, one in enumerate(batches, 1)]


@pytest.fixture(scope="module")
def capstones(course) -> list[float]:
    settings = Settings(
        **SIZES, vocab_size=258, tp=2, steps=STEPS, batch_size=8, micro_batch_size=8, learning_rate=2e-3,
        min_learning_rate=2e-4, warmup_steps=3, weight_decay=0.1, max_norm=1.0, seed=0,
    )  # fmt: skip
    object.__setattr__(settings, "vocab_size", 256)  # bytes alone, which a run with a tokenizer can't have
    text = torch.tensor(list((course.folder / "notes.txt").read_bytes()))
    windows = (len(text) - 1) // 16
    batches = []
    for done in range(STEPS):
        order = torch.randperm(windows, generator=torch.Generator().manual_seed(0)).tolist()  # all in the first epoch
        rows = torch.stack([text[16 * k : 16 * k + 17] for k in order[8 * done : 8 * done + 8]])
        batches.append((rows[:, :-1].contiguous(), rows[:, 1:].contiguous()))
    return launch(_capstone_losses, 2, args=(settings, batches))[0]


def under_torchrun(course: Course, *options: str, **how: int) -> subprocess.Popen:
    """Start train.py on two ranks, where `import tplab` fails."""
    environment = {**os.environ, "PYTHONPATH": str(course.folder), "OMP_NUM_THREADS": "1"}
    command = [*TORCHRUN, library.SCRIPT, *options]
    return subprocess.Popen(command, cwd=course.folder, env=environment, stdout=subprocess.PIPE, text=True, **how)


@pytest.fixture(scope="module")
def whole(course) -> str:
    """The folder of a run on two ranks under torchrun."""
    with under_torchrun(course, *options("whole"), stderr=subprocess.PIPE) as run:
        told, errors = run.communicate()
    assert run.returncode == 0, errors[-3000:]
    assert f"step {STEPS:5}   loss {losses(course, 'whole')[-1]:.4f}" in told
    return "whole"


def test_its_ranks_end_if_torchrun_is_killed(course):
    with under_torchrun(course, *options("killed", steps=10**6, log_every=1)) as run:
        next(line for line in run.stdout if line.startswith("step"))
        ranks = psutil.Process(run.pid).children()
        run.kill()
        _, left = psutil.wait_procs(ranks, timeout=120)
        for rank in left:
            rank.kill()
    assert (len(ranks), left) == (2, [])


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
        1: train(course, 1, options("one"), options("alone"), None),
        2: train(course, 2, options("cut"), *misused),
        4: train(course, 4, options("four", tp=2)),
    }


def test_its_losses_are_the_capstones_on_any_number_of_ranks(course, whole, ended, capstones):
    assert capstones[-1] < capstones[0] - 0.5
    assert (ended[1][0], ended[4]) == ("", [""])
    for folder in (whole, "one", "four"):
        assert losses(course, folder) == pytest.approx(capstones, abs=2e-5)


def test_it_goes_on_from_its_checkpoint_as_if_it_had_never_stopped(course, whole, ended):
    assert ended[1][1] == ended[2][0] == ""
    assert losses(course, "cut") == losses(course, whole)
    assert losses(course, "alone") == pytest.approx(losses(course, whole), abs=2e-5)


def test_misuse_is_told_in_a_sentence(ended):
    told = ended[2][1:]
    assert [says in text for text, (_, says) in zip(told, MISUSES, strict=True)] == [True] * len(MISUSES), told
    assert "Start it with torchrun: torchrun --standalone --nproc-per-node 2 train.py" in ended[1][2]


def test_once_it_is_written_it_is_left_alone(course):
    script = course.folder / library.SCRIPT
    script.write_text("# mine now\n")
    pass_all(course, ["8.2"])
    assert script.read_text() == "# mine now\n"
