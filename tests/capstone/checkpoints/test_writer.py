"""Checkpoints of a run: whole or not there, and a clear word where one is damaged. (Kills at random: test_kill.py.)"""

import hashlib
import json
import os
import re
import resource
import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.capstone.small_training import CONFIG, build, learn, train
from tplab import launch
from tplab.capstone.checkpoints import folders as step_folders
from tplab.capstone.checkpoints import writer as module
from tplab.capstone.checkpoints.folders import (
    DamagedCheckpointError,
    check_files,
    file_sum,
    read_manifest,
)
from tplab.capstone.checkpoints.writer import Checkpoints
from tplab.checkpoint.files import TyingWriter

BOTH = pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "in the background"])


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
        checkpoints.save(step, model, optimizer, {"note": f"behind step {step}"})
        states[step] = held(model, optimizer)
    return checkpoints.folders.root, states


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(saved[0], tmp_path / "checkpoints"))


@BOTH
def test_the_newest_are_kept_and_what_is_loaded_is_what_was_saved(asynchronous, tmp_path):
    model, optimizer = build()
    checkpoints, states = Checkpoints(tmp_path / "run" / "new", 2, asynchronous), {}
    assert checkpoints.latest() is None
    for step in range(1, 5):
        learn(model, optimizer, step)
        checkpoints.save(step, model, optimizer, {"note": [step]})
        states[step] = held(model, optimizer)
    learn(model, optimizer, 5)
    assert checkpoints.latest() == tmp_path / "run" / "new" / "step-000004"
    assert names(tmp_path / "run" / "new") == ["step-000003", "step-000004"]
    for step in (3, 4):
        folder, others = tmp_path / "run" / "new" / f"step-{step:06d}", build()
        manifest = json.loads((folder / "manifest.json").read_text())
        contents = {name: (folder / name).read_bytes() for name in (".metadata", "__0_0.distcp")}
        sums = {name: {"bytes": len(c), "sha256": hashlib.sha256(c).hexdigest()} for name, c in contents.items()}
        assert (manifest["step"], manifest["files"]) == (step, sums)
        extra = Checkpoints(tmp_path / "run" / "new").load(folder, *others)
        assert extra == {"step": step, "note": [step]}
        assert same(held(*others), states[step])


def test_a_step_that_is_there_is_not_saved_again(saved, folder):
    checkpoints = Checkpoints(folder)
    model, optimizer = build()
    before = file_sum(folder / "step-000002" / "manifest.json")
    says = r"step 2 wasn't saved: something else is at .*step-000002. Move it out of the way.*step-000001, is intact"
    with pytest.raises(RuntimeError, match=says):
        checkpoints.save(2, model, optimizer)
    assert file_sum(folder / "step-000002" / "manifest.json") == before
    assert names(folder) == ["step-000001", "step-000002"]
    checkpoints.load(checkpoints.latest(), model, optimizer)
    checkpoints.save(2, model, optimizer)
    checkpoints.save(3, model, optimizer)
    checkpoints.save(3, model, optimizer)
    assert names(folder) == ["step-000002", "step-000003"]
    assert file_sum(folder / "step-000002" / "manifest.json") == before


# In the background


def test_training_goes_on_while_what_was_saved_stays(tmp_path, monkeypatch):
    go_on, write = threading.Event(), module.write_sharded
    monkeypatch.setattr(module, "write_sharded", lambda *args, **kwargs: go_on.wait() and write(*args, **kwargs))
    model, optimizer = build()
    learn(model, optimizer, 1)
    state, note = held(model, optimizer), ["first"]
    checkpoints = Checkpoints(tmp_path, asynchronous=True)
    checkpoints.save(1, model, optimizer, {"note": note})
    learn(model, optimizer, 2)
    note.append("second")
    assert checkpoints.folders.steps() == []
    go_on.set()
    checkpoints.wait()
    others = build()
    assert checkpoints.load(checkpoints.latest(), *others) == {"step": 1, "note": ["first"]}
    assert same(held(*others), state)


@pytest.mark.parametrize("then", ["save", "latest"])
def test_what_goes_wrong_in_the_background_is_raised_afterwards(then, tmp_path, monkeypatch):
    model, optimizer = build()
    checkpoints = Checkpoints(tmp_path, asynchronous=True)
    checkpoints.save(1, model, optimizer)
    checkpoints.wait()
    with monkeypatch.context() as broken:
        broken.setattr(module, "write_manifest", no_space)
        checkpoints.save(2, model, optimizer)
        with pytest.raises(RuntimeError, match=r"No space left.*step-000001, is intact"):
            checkpoints.save(3, model, optimizer) if then == "save" else getattr(checkpoints, then)()
    assert names(tmp_path) == ["step-000001"]
    checkpoints.save(2, model, optimizer)  # it is not there, so it is saved
    checkpoints.wait()
    assert names(tmp_path) == ["step-000001", "step-000002"]


def no_space(*args):
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
    "before the folder": (module, "write_sharded", kill_myself, 2),
    "behind the files": (TyingWriter, "write_data", kill_behind(TyingWriter.write_data), 2),
    "behind .metadata": (TyingWriter, "finish", kill_behind(TyingWriter.finish), 2),
    "before the manifest": (module, "write_manifest", kill_myself, 2),
    "behind the rename": (step_folders, "sync_folder", kill_once_published, 3),
    "before deleting": (step_folders.StepFolders, "delete_old", kill_myself, 3),
    "while deleting": (step_folders.shutil, "rmtree", kill_within, 3),
}


@BOTH
@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_any_point_leaves_the_last_complete_one(point, asynchronous, trained, folder, monkeypatch):
    model, optimizer, states = trained
    where, name, wrong, newest = POINTS[point]

    def save():
        checkpoints = Checkpoints(folder, 2, asynchronous)
        checkpoints.save(3, model, optimizer)
        checkpoints.wait()

    with monkeypatch.context() as patched:
        patched.setattr(where, name, wrong)
        killed(save)
    (folder / f"{step_folders.PROBE}0").touch()  # what a kill leaves at the very start, with more than one rank
    checkpoints, others = Checkpoints(folder, 2, asynchronous), build()
    for step in checkpoints.folders.steps():
        check_files(checkpoints.folders.path(step), read_manifest(checkpoints.folders.path(step)))
    assert checkpoints.load(checkpoints.latest(), *others)["step"] == newest
    assert same(held(*others), states[newest])
    checkpoints.save(newest, *others)
    checkpoints.save(4, *others)
    checkpoints.wait()
    assert names(folder) == [f"step-{newest:06d}", "step-000004"]


# Damaged afterwards


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << place % 8
    path.write_bytes(content)


def refused(folder, step, kind=DamagedCheckpointError, config=CONFIG):
    """The message for a checkpoint that must not be loaded; nothing may have been changed."""
    model, optimizer = build(config=config)
    before = held(model, optimizer)
    with pytest.raises(kind) as caught:
        Checkpoints(folder).load(folder / f"step-{step:06d}", model, optimizer)
    assert same(held(model, optimizer), before)
    return str(caught.value)


DAMAGES = {  # what is done to the folder of a checkpoint: words of the message
    "cut off": (lambda f: os.truncate(f / "__0_0.distcp", 5000), r"__0_0\.distcp was.* had \d+,\d+ .* has 5,000 bytes"),
    "a file lost": (lambda f: (f / "__0_0.distcp").unlink(), r"__0_0\.distcp is missing\. It had \d+,\d+ bytes"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), r"manifest\.json is missing, or"),
    "an empty manifest": (
        lambda f: (f / "manifest.json").write_text(""),
        r"manifest\.json .* changed or truncated",
    ),
    "an empty folder": (lambda f: [path.unlink() for path in f.iterdir()], r"manifest\.json is missing, or"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_an_older_one_named(damage, saved, folder):
    work, words = DAMAGES[damage]
    work(folder / "step-000002")
    said = refused(folder, 2)
    assert re.search(words, said), said
    assert f"{folder / 'step-000001'} is intact. To resume from step 1, move the damaged one out of the way" in said
    source, target = re.search(r"\(mv (\S+) (\S+)\)", said).groups()
    shutil.move(source, target)  # as it says
    checkpoints, others = Checkpoints(folder), build()
    assert checkpoints.load(checkpoints.latest(), *others)["note"] == "behind step 1"
    assert same(held(*others), saved[1][1])
    checkpoints.save(2, *others)
    checkpoints.save(3, *others)
    assert names(folder) == ["step-000002", "step-000002.damaged", "step-000003"]


def test_a_flipped_bit_anywhere_is_found_and_where_no_older_one_is_whole_none_is_named(folder):
    newest = folder / "step-000002"
    for name in names(newest):
        size = (newest / name).stat().st_size
        for place in (0, size // 2, size - 1):
            flip(newest / name, place)
            said = refused(folder, 2)
            assert name in said, said
            flip(newest / name, place)
    Checkpoints(folder).load(newest, *build())

    flip(folder / "step-000001" / "__0_0.distcp", 3000)
    flip(folder / "step-000002" / ".metadata", 30)
    assert f"There is no intact checkpoint in {folder}" in refused(folder, 2)
    assert "there's no folder" in refused(folder, 7, FileNotFoundError)


def test_another_model_is_refused(folder):
    for change, words in (
        ({"num_layers": 3}, "2 entries there, 3 here"),
        ({"hidden_size": 64}, "is [40, 32] in the checkpoint; the model needs [40, 64]"),
    ):
        said = refused(folder, 2, ValueError, config=replace(CONFIG, **change))
        assert re.search(r"step-000002 can't be loaded into this model.*train in another folder", said)
        assert words in said


# No room


def test_a_full_disk_is_told_with_its_numbers_before_anything_is_written(trained, folder, monkeypatch):
    model, optimizer, _ = trained
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr("tplab.checkpoint.files.shutil.disk_usage", lambda path: usage._replace(free=1234))
    said = message(Checkpoints(folder).save, 3, model, optimizer)
    assert f"RuntimeError: step 3 wasn't saved: {folder / 'step-000003.saving'} could not be saved" in said
    needed = int(re.search(r"about ([\d,]+) bytes are to be written, and 1,234 are free", said)[1].replace(",", ""))
    written = sum(path.stat().st_size for path in (folder / "step-000002").iterdir())
    assert written < needed < 1.1 * written
    assert f"{folder / 'step-000002'}, is intact" in said
    assert names(folder) == ["step-000001", "step-000002"]


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
    words = r"of about [\d,]+ bytes a part could not be written; [\d,]+ bytes are free on its disk.*File too large"
    assert re.search(words + r".*step-000002, is intact", said.read_text()), said.read_text()
    assert names(folder) == ["step-000001", "step-000002"]
    Checkpoints(folder).load(folder / "step-000002", *build())


# On several ranks


def seems_shared(*_):
    """Stands in for the check at the start, as if the disks had come apart later."""


def _on_four_ranks(root):
    """Two replicas of two ranks: train and save, go on, and what all are told when one of them can't write."""
    folder = root / "run"
    folder.mkdir(exist_ok=True)
    whole = train(folder, 4, dp=2, asynchronous=True, dtype=torch.float64)
    saved = names(folder / "checkpoints")
    sums = sorted(read_manifest(folder / "checkpoints" / "step-000004")["files"])
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder / "checkpoints" / "step-000004")
    dist.barrier()
    again = train(folder, 4, dp=2, dtype=torch.float64)
    checkpoints = Checkpoints(folder / "broken", asynchronous=True)
    model, optimizer = build()
    if dist.get_rank() == 1:
        module.file_sum = no_space
    checkpoints.save(1, model, optimizer)
    told = message(checkpoints.wait), names(folder / "broken")
    module._check_shared = seems_shared
    apart = message(Checkpoints(root / f"of-rank{dist.get_rank()}").save, 1, model, optimizer)
    return whole, saved, sums, again, told, apart


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    root = tmp_path_factory.mktemp("four")
    return root / "run", launch(_on_four_ranks, 4, args=(root,), timeout=None)


def test_replicas_save_once_and_all_go_on_bit_for_bit(four, tmp_path):
    folder, results = four
    for (_, whole), saved, sums, (first, again), _, _ in results:
        assert saved == ["step-000002", "step-000004"]
        assert sums == [".metadata", "__0_0.distcp", "__1_0.distcp"]  # two of the four ranks
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
    for *_, (told, left), apart in results:
        assert told.startswith("RuntimeError: ")
        assert "No space left on device" in told
        assert left == []
        assert "isn't the directory that rank 0 has just made: all ranks need the same one, shared" in apart


def _on_two_ranks(root):
    """What all are told of disks of their own and of a damaged file; what was saved beside training."""
    not_shared = _not_shared(root / "not shared")
    return _apart(root / "apart"), _damaged(root / "damaged"), not_shared, _beside(root / "beside", seconds=1.5)


def _not_shared(root):
    """The same relative path leads to a disk of each rank's own."""
    own = root / f"machine{dist.get_rank()}"
    own.mkdir(parents=True)
    before, patience = os.getcwd(), module.UNTIL_SEEN
    os.chdir(own)
    module.UNTIL_SEEN = 0.2
    said = message(Checkpoints, "run/checkpoints")
    os.chdir(before)
    module.UNTIL_SEEN = patience
    return said


def _apart(root):
    rank = dist.get_rank()
    own = root / f"disk{rank}"
    (own / ("step-000004" if rank else "step-000002")).mkdir(parents=True)
    module._check_shared = seems_shared
    return message(Checkpoints(own).latest)


def _damaged(root):
    model, optimizer = build()
    checkpoints = Checkpoints(root)
    for step in (1, 2):
        checkpoints.save(step, model, optimizer)
    dist.barrier()
    if dist.get_rank() == 1:
        flip(root / "step-000002" / "__0_0.distcp", 4000)
    dist.barrier()
    return message(checkpoints.load, checkpoints.latest(), model, optimizer)


def _beside(root, seconds):
    """A slow save in the background on rank 1, while rank 0 is slow in training: neither of them waits for ever."""
    rank, x = dist.get_rank(), torch.zeros(8)
    model, optimizer = build()
    write, begun = module.file_sum, threading.Event()

    def slow(path):
        begun.set()
        time.sleep(seconds if rank == 1 else 0)
        return write(path)

    module.file_sum = slow
    checkpoints = Checkpoints(root, asynchronous=True)
    checkpoints.save(1, model, optimizer)
    begun.wait() if rank == 1 else time.sleep(seconds)
    for _ in range(3):
        dist.all_reduce(x)
    checkpoints.wait()
    return checkpoints.folders.steps()


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    root = tmp_path_factory.mktemp("two")
    return root, launch(_on_two_ranks, 2, args=(root,), timeout=None)


def test_the_record_has_nothing_of_the_background_and_nobody_seems_stuck(two):
    """RunStatus as one program, rank 0 waits for rank 1's file, and rank 1 in the all-reduce for rank 0: a deadlock."""
    _, results = two
    assert [steps for *_, steps in results] == [[1], [1]]
    assert all(found.end is not None for found in results.record)
    for rank in range(2):
        kinds = [found.kind for found in results.record if found.rank == rank]
        begins, ends = kinds.index("all_reduce"), len(kinds) - kinds[::-1].index("all_reduce")
        assert kinds[begins:ends] == ["all_reduce"] * 3


def test_all_ranks_are_told_of_different_disks_and_of_a_damaged_file_that_one_has_found(two):
    root, results = two
    for seen, said, *_ in results:
        assert "the ranks see different newest checkpoints" in seen
        assert "of steps [2, 4]" in seen
        assert said.startswith("DamagedCheckpointError: ")
        assert "step-000002/__0_0.distcp was changed or truncated" in said
        assert f"{root / 'damaged' / 'step-000001'} is intact. To resume from step 1" in said


def test_a_folder_that_the_machines_do_not_share_is_refused_at_the_start(two):
    root, results = two
    for _, _, said, _ in results:
        assert f"isn't shared: rank 0 writes to {root}/not shared/machine0/run/checkpoints on " in said
        assert f"{root}/not shared/machine1/run/checkpoints on " in said
    left = sorted(path.name for path in (root / "not shared").rglob("*"))
    assert left == ["checkpoints", "machine0", "machine1", "run"], "only the first rank makes a folder"
