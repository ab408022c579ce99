"""Checkpoints of a run: whole or not there, and a clear word where one is damaged. (Kills at random: test_kill.py.)"""

import os
import re
import resource
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.capstone.small_training import CONFIG, build, learn, train
from tplab import launch
from tplab.capstone.checkpoints import folders as step_folders
from tplab.capstone.checkpoints import writer as module
from tplab.capstone.checkpoints.writer import Checkpoints
from tplab.checkpoint.files import TyingWriter


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


def message(function, *args):
    try:
        function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.fixture(scope="module")
def trained():
    """A model in training, and what it held behind each step."""
    model, optimizer = build()
    states = {}
    for step in (1, 2, 3):
        learn(model, optimizer, step)
        states[step] = held(model, optimizer)
    return model, optimizer, states


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with the checkpoints of steps 1 and 2, and what was held then."""
    model, optimizer = build()
    checkpoints, states = Checkpoints(tmp_path_factory.mktemp("run") / "checkpoints"), {}
    for step in (1, 2):
        learn(model, optimizer, step)
        checkpoints.save(step, model, optimizer)
        states[step] = held(model, optimizer)
    return checkpoints.folders.root, states


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(saved[0], tmp_path / "checkpoints"))


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


def test_a_step_that_is_there_is_not_overwritten(folder):
    before = contents(folder / "step-000002")
    says = r"step 2 wasn't saved: something else is at .*step-000002. Move it out of the way.*step-000001, is intact"
    with pytest.raises(RuntimeError, match=says):
        Checkpoints(folder).save(2, *build())
    assert contents(folder / "step-000002") == before
    assert names(folder) == ["step-000001", "step-000002"]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def no_space(*args, **kwargs):
    raise OSError(28, "No space left on device")


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


def kill_once_published(folder):
    """In place of sync_folder: step 3 has its name, but the disk may not know it."""
    if (folder / "step-000003").exists():
        kill_myself()


def kill_within(path):
    """In place of shutil.rmtree: one file is gone, the others are there."""
    next(path.iterdir()).unlink()
    kill_myself()


POINTS = {  # where a save of step 3 is killed: (what is replaced, by what, the newest checkpoint then)
    "before the folder": (module, "save_sharded", kill_myself, 2),
    "behind the files": (TyingWriter, "write_data", kill_behind(TyingWriter.write_data), 2),
    "behind .metadata": (TyingWriter, "finish", kill_behind(TyingWriter.finish), 2),
    "before the rename": (step_folders.StepFolders, "publish", kill_myself, 2),
    "behind the rename": (step_folders, "sync_folder", kill_once_published, 3),
    "before deleting": (step_folders.StepFolders, "delete_old", kill_myself, 3),
    "while deleting": (step_folders.shutil, "rmtree", kill_within, 3),
}


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_any_point_leaves_the_last_complete_one(point, trained, folder, monkeypatch):
    model, optimizer, states = trained
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


# Damaged afterwards


DAMAGES = {  # what is done to the folder of a checkpoint: words of the message
    "cut off": (lambda f: os.truncate(f / "__0_0.distcp", 5000), r"__0_0\.distcp has 5,000 bytes instead of \d+,\d+"),
    "a file lost": (lambda f: (f / "__0_0.distcp").unlink(), r"__0_0\.distcp is missing"),
    "an empty folder": (lambda f: [path.unlink() for path in f.iterdir()], r"has no file \.metadata"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_can_be_loaded(damage, saved, folder):
    work, words = DAMAGES[damage]
    work(folder / "step-000002")
    model, optimizer = build()
    before = held(model, optimizer)
    said = message(Checkpoints(folder).load, folder / "step-000002", model, optimizer)
    assert said.startswith("FileNotFoundError: ")
    assert re.search(words, said), said
    assert same(held(model, optimizer), before)
    source, target = re.search(r"\(mv (\S+) (\S+)\)", said).groups()
    shutil.move(source, target)  # as it says
    checkpoints = Checkpoints(folder)
    assert checkpoints.load(checkpoints.latest(), model, optimizer) == 1
    assert same(held(model, optimizer), saved[1][1])


def test_another_model_is_refused(folder):
    for change, words in (
        ({"num_layers": 3}, "2 entries there, 3 here"),
        ({"hidden_size": 64}, "is [40, 32] in the checkpoint; the model needs [40, 64]"),
    ):
        model, optimizer = build(config=replace(CONFIG, **change))
        before = held(model, optimizer)
        said = message(Checkpoints(folder).load, folder / "step-000002", model, optimizer)
        assert re.search(r"step-000002 can't be loaded into this model.*train in another folder", said)
        assert words in said
        assert same(held(model, optimizer), before)


# No room


def test_a_disk_that_is_full_in_the_middle(trained, folder, tmp_path):
    """In a copy of this process, which may write no longer files than this."""
    model, optimizer, _ = trained
    said = tmp_path / "said"

    def save():
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
        try:
            Checkpoints(folder).save(3, model, optimizer)
        except RuntimeError as error:
            said.write_text(str(error))
            kill_myself()

    killed(save)
    assert re.search("step 3 wasn't saved: .*could not be saved.*step-000002, is intact", said.read_text())
    assert names(folder) == ["step-000001", "step-000002"]
    Checkpoints(folder).load(folder / "step-000002", *build())


# On several ranks


def _on_four_ranks(root):
    """Two replicas of two ranks: train and save, go on, and what all are told when one of them can't write."""
    folder, rank = root / "run", dist.get_rank()
    whole = train(folder, 4, dp=2, dtype=torch.float64)
    saved = names(folder / "checkpoints"), names(folder / "checkpoints" / "step-000004")
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder / "checkpoints" / "step-000004")
    dist.barrier()
    again = train(folder, 4, dp=2, dtype=torch.float64)
    model, optimizer = build()
    apart = message(Checkpoints(root / f"of-rank{rank}").save, 1, model, optimizer)
    for number in range(4):
        (root / f"disk{number}" / f"step-00000{number}").mkdir(parents=True, exist_ok=True)
    different = message(Checkpoints(root / f"disk{rank}").latest)
    if rank == 1:
        TyingWriter.write_data = no_space
    told = message(Checkpoints(root / "broken").save, 1, model, optimizer), names(root / "broken")
    return whole, saved, again, told, apart, different


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    root = tmp_path_factory.mktemp("four")
    return root / "run", launch(_on_four_ranks, 4, args=(root,), timeout=None)


def test_replicas_save_once_and_all_go_on_bit_for_bit(four, tmp_path):
    folder, results = four
    for (_, whole), saved, (first, again), *_ in results:
        steps, files = saved
        assert steps == ["step-000002", "step-000004"]
        assert files == [".metadata", "__0_0.distcp", "__1_0.distcp"]  # two of the four ranks
        assert first == 2
        assert again == whole[2:]
        assert whole == results[0][0][1]
    own = Path(shutil.copytree(folder, tmp_path / "run"))
    shutil.rmtree(own / "checkpoints" / "step-000004")
    first, losses = train(own, 4, save_every=100, dtype=torch.float64)  # on one process without a group
    assert first == 2
    assert losses == pytest.approx(results[0][0][1][2:], rel=1e-10)


def test_an_error_of_one_rank_is_raised_on_all(four):
    _, results = four
    for *_, (told, left), apart, different in results:
        assert told.startswith("RuntimeError: step 1 wasn't saved")
        assert "No space left on device" in told
        assert left == []
        assert "isn't the directory that rank 0 has just made: all ranks need the same one, shared" in apart
        assert "the ranks see different newest checkpoints" in different
        assert "of steps [0, 1, 2, 3]" in different
