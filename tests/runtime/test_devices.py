"""Which ranks get which GPU, asked without one. That they compute there is for tests/gpu."""

import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from tests import saying
from tplab.runtime import devices, torchrun


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """machine(gpus) makes torch show so many."""

    def show(gpus: int) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(dist, "is_nccl_available", lambda: True)

    return show


NCCL, SHARED = {"TPLAB_BACKEND": "nccl"}, {"TPLAB_BACKEND": "nccl", "TPLAB_SHARE_GPUS": "1"}
CHOICES = [  # GPUs, environment variables, arguments, and the backend and number of GPUs, or parts of the error
    (0, {}, ("auto", 2), ("gloo", 0)),
    (2, {}, ("auto", 2), ("gloo", 0)),
    (8, {}, ("auto", 4), ("nccl", 4)),
    (8, {}, ("gloo", 4), ("gloo", 0)),
    (1, {}, ("gloo", 4, True), ("gloo", 1)),
    (1, {}, ("nccl", 4, True), ("nccl", 1)),
    (2, NCCL, ("auto", 2), ("nccl", 2)),
    (2, SHARED, ("auto", 8), ("nccl", 2)),
    (0, {}, ("auto", 2, True), ["share_gpus=True"]),
    (8, {}, ("auto", 16), ["16 ranks", "8 GPU", "TPLAB_BACKEND=gloo"]),
    (2, NCCL, ("auto", 3), ["3 ranks", "2 GPU"]),
]


@pytest.mark.parametrize(("gpus", "variables", "arguments", "expected"), CHOICES)
def test_ranks_compute_on_gpus_of_their_own_unless_they_may_share_and_what_is_not_there_is_refused(
    gpus, variables, arguments, expected, machine, monkeypatch
) -> None:
    machine(gpus)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if isinstance(expected, tuple):
        assert devices.choose(*arguments) == expected
    else:
        with pytest.raises(ValueError, match=saying(*expected)):
            devices.choose(*arguments)


@pytest.mark.parametrize(("gpus", "own", "host"), [(0, None, None), (4, "cuda:3", None), (2, "cuda:1", "tplab-rank-3")])
def test_a_rank_takes_its_gpu_and_names_a_host_of_its_own_where_it_shares(
    gpus: int, own: str | None, host: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(devices, "_has_gpu", False)
    monkeypatch.setattr(os, "environ", {})
    taken = devices.take_gpu(3, 4, gpus)
    assert taken == (own and torch.device(own))
    assert devices.device() == torch.device(own or "cpu")
    assert os.environ.get("NCCL_HOSTID") == host


def test_a_learner_is_told_once_how_to_use_the_gpus(machine, monkeypatch, capsys: pytest.CaptureFixture) -> None:
    machine(2)
    monkeypatch.setattr(devices, "_said", set())
    for p in (2, 4):
        devices.choose("auto", p)
    said = capsys.readouterr().err
    assert "2 GPUs" in said
    assert said.count("TPLAB_BACKEND=nccl") == 1


@pytest.mark.parametrize(("gpus", "backend"), [(1, "gloo"), (2, "nccl")])
def test_a_program_with_one_number_of_ranks_takes_the_gpus_if_they_are_enough(gpus: int, backend: str, machine) -> None:
    machine(gpus)
    assert devices.backend_for(2) == backend


NONE = torchrun._NO_GPU
TORCHRUN = {  # GPUs on this rank's machine, what keeps the other rank from using NCCL: backend, what rank 0 says
    "enough GPUs everywhere": (2, "", "nccl", []),
    "no GPU anywhere": (0, NONE, "gloo", []),
    "none on the other machine": (8, NONE, "gloo", [f"rank 1: {NONE}"]),
    "the same on both": (1, torchrun._obstacle(1, 2), "gloo", ["ranks 0, 1: 2 ", " 1 ", "--gpu-bind"]),
    "different ones": (1, NONE, "gloo", ["rank 0: ", "--gpu-bind", f"rank 1: {NONE}"]),
}


@pytest.mark.parametrize(("gpus", "theirs", "backend", "says"), TORCHRUN.values(), ids=TORCHRUN)
def test_under_torchrun_all_ranks_agree_on_a_backend(
    gpus: int, theirs: str, backend: str, says: list[str], machine, monkeypatch, capsys: pytest.CaptureFixture
) -> None:
    machine(gpus)
    store, started = dist.HashStore(), {}
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "rendezvous", lambda url, timeout: iter([(store, 0, 2)]))
    monkeypatch.setattr(dist, "init_process_group", lambda name, **options: started.update(options, name=name))
    monkeypatch.setattr("atexit.register", lambda function: None)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")

    def start_both(attempt: str) -> None:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        with ThreadPoolExecutor(1) as other_rank:
            other_rank.submit(torchrun.exchange, dist.PrefixStore(f"attempt {attempt}", store), 1, 2, theirs)
            torchrun._init_process_group()

    store.set("attempt 0/tplab/1", "what a rank of the first attempt wrote")
    start_both("1")
    assert started["name"] == backend
    assert started["device_id"] == (torch.device("cuda", 0) if backend == "nccl" else None)
    assert started["timeout"] == torchrun.LOST_AFTER
    said = capsys.readouterr().err
    assert re.search(saying(*says), said)
    assert bool(says) == bool(said)
    monkeypatch.setenv("TPLAB_BACKEND", "nccl")
    if backend == "gloo":
        with pytest.raises(ValueError, match=saying("TPLAB_BACKEND", "nccl", theirs)):
            start_both("2")
