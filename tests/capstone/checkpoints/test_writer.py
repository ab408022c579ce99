"""Checkpoints of a run: whole or not there, and a clear word where one is damaged. (Killed runs: test_loop.py.)"""

import os
import re
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter

from tests import saying
from tests.reference import random
from tplab import launch
from tplab.capstone.checkpoints import folders as step_folders
from tplab.capstone.checkpoints.writer import Checkpoints
from tplab.gpt.model import ParallelGPT
from tplab.memory.config import GPTConfig
from tplab.tensor.rng import seed_all

CONFIG = GPTConfig(num_layers=2, hidden_size=32, num_heads=4, vocab_size=40, seq_length=8, dropout=0.0)


def build():
    """A model and its optimizer, the same for every number of ranks."""
    seed_all(3)
    model = ParallelGPT(CONFIG)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return model, torch.optim.AdamW(groups, lr=1e-2)


def learn(model, optimizer, step):
    """Take one step of training, with the learning rate of a schedule."""
    optimizer.param_groups[0]["lr"] = 1e-2 / step
    optimizer.zero_grad()
    ids = (random((4, CONFIG.seq_length), "ids", step).abs() * 1000).long() % CONFIG.vocab_size
    model(ids, ids).backward()
    optimizer.step()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def held(model, optimizer):
    """Everything that training goes on from, in copies."""
    state = optimizer.state_dict()
    tensors = [t.clone() for entries in state["state"].values() for t in entries.values()]
    rates = [torch.tensor(group["lr"]) for group in state["param_groups"]]
    return [*(t.clone() for t in model.state_dict().values()), *tensors, *rates]


def same(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model in training, what it held after each step, and a folder with the checkpoints of steps 1 and 2."""
    model, optimizer = build()
    root, states = tmp_path_factory.mktemp("run") / "checkpoints", {}
    for step in (1, 2, 3):
        learn(model, optimizer, step)
        if step < 3:
            Checkpoints(root).save(step, model, optimizer)
        states[step] = held(model, optimizer)
    return model, optimizer, states, root


@pytest.fixture
def folder(trained, tmp_path):
    """A copy of the folder, to be damaged."""
    return Path(shutil.copytree(trained[-1], tmp_path / "checkpoints"))


def test_the_newest_are_kept_and_what_is_loaded_is_what_was_saved(tmp_path):
    model, optimizer = build()
    checkpoints, states = Checkpoints(tmp_path / "run" / "new", 2), {}
    assert checkpoints.latest() is None
    for step in range(1, 5):
        learn(model, optimizer, step)
        checkpoints.save(step, model, optimizer)
        states[step] = held(model, optimizer)
    assert checkpoints.latest() == tmp_path / "run" / "new" / "step-000004"
    assert names(tmp_path / "run" / "new") == ["step-000003", "step-000004"]
    for step in (3, 4):
        others = build()
        assert Checkpoints(tmp_path / "run" / "new").load(checkpoints.folders.path(step), *others) == step
        assert same(held(*others), states[step])


@pytest.mark.parametrize("kind", ["checkpoint", "file"])
def test_what_has_the_name_of_a_checkpoint_is_not_overwritten(kind, folder):
    there = folder / "step-000003"
    if kind == "checkpoint":
        shutil.copytree(folder / "step-000002", there)
    else:
        there.write_text("mine")
    before = contents(folder)
    with pytest.raises(RuntimeError, match=rf"step 3\b.*{there}(?!\.saving).*step-000002.*intact"):
        Checkpoints(folder).save(3, *build())
    assert contents(folder) == before


def contents(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


# Killed at each point of a save, for real: the process is a copy of this one, and kills itself


def killed(work):
    """Run `work` in a copy of this process, which must end by SIGKILL."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def kill_myself(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def kill_behind(function):
    def wrapped(*args, **kwargs):
        function(*args, **kwargs)
        kill_myself()

    return wrapped


def kill_within(path):
    """In place of shutil.rmtree: one file is gone, the others are there."""
    next(path.iterdir()).unlink()
    kill_myself()


POINTS = {  # where a save of step 3 is killed: (what is replaced, by what, the newest checkpoint then)
    "behind the files": (FileSystemWriter, "write_data", kill_behind(FileSystemWriter.write_data), 2),
    "behind .metadata": (FileSystemWriter, "finish", kill_behind(FileSystemWriter.finish), 2),
    "before the rename": (step_folders.StepFolders, "publish", kill_myself, 2),
    "before deleting": (step_folders.StepFolders, "delete_old", kill_myself, 3),
    "while deleting": (step_folders.shutil, "rmtree", kill_within, 3),
}


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_any_point_leaves_the_last_complete_one(point, trained, folder, monkeypatch):
    model, optimizer, states, _ = trained
    where, name, wrong, newest = POINTS[point]
    with monkeypatch.context() as patched:
        patched.setattr(where, name, wrong)
        killed(lambda: Checkpoints(folder).save(3, model, optimizer))
    checkpoints = Checkpoints(folder)
    for step in checkpoints.folders.steps():
        others = build()
        assert checkpoints.load(checkpoints.folders.path(step), *others) == step
        assert same(held(*others), states[step])
    assert checkpoints.latest() == folder / f"step-{newest:06d}"
    checkpoints.save(4, *others)
    assert names(folder) == [f"step-{newest:06d}", "step-000004"]


# What can't be loaded, or saved (tests/checkpoint has more cases, without the advice)


def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_can_be_loaded(trained, folder):
    os.truncate(folder / "step-000002" / "__0_0.distcp", 5000)
    model, optimizer = build()
    before = held(model, optimizer)
    with pytest.raises(FileNotFoundError, match=r"__0_0\.distcp\D*5,000 bytes\D*\d+,\d+") as error:
        Checkpoints(folder).load(folder / "step-000002", model, optimizer)
    assert same(held(model, optimizer), before)
    source, target = re.search(r"mv (\S+) (\S+\.damaged)", str(error.value)).groups()
    shutil.move(source, target)  # as it says
    checkpoints = Checkpoints(folder)
    assert checkpoints.load(checkpoints.latest(), model, optimizer) == 1
    assert same(held(model, optimizer), trained[2][1])


def _on_two_ranks(folder):
    """What both are told when one of them can't write so much, after they were told that they have different disks."""
    rank = dist.get_rank()
    own = folder if rank else folder.with_name("of another machine")
    with pytest.raises(ValueError, match=saying("[None, 2]")):
        Checkpoints(own).latest()
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    with pytest.raises(RuntimeError) as full:
        Checkpoints(folder).save(3, *build())
    return str(full.value)


def test_an_error_of_one_rank_is_raised_on_all_and_a_full_disk_leaves_nothing_behind(folder):
    for full in launch(_on_two_ranks, 2, args=(folder,)):
        assert re.search(saying("step 3", "step-000003.saving", "step-000002", "intact"), full)
    assert names(folder) == ["step-000001", "step-000002"]
    Checkpoints(folder).load(folder / "step-000002", *build())
