"""Which ranks get which GPU, asked without one. That they compute there is for tests/gpu."""

import os

import pytest
import torch
import torch.distributed as dist

import tplab
from tplab.runtime import devices, torchrun


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """machine(gpus) makes torch show so many."""

    def show(gpus: int, nccl: bool = True) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)

    return show


@pytest.mark.parametrize(
    ("gpus", "backend", "world_size", "share", "expected"),
    [
        (0, "auto", 2, False, ("gloo", 0)),
        (1, "auto", 2, False, ("gloo", 0)),
        (2, "auto", 2, False, ("nccl", 2)),
        (8, "auto", 4, False, ("nccl", 4)),
        (8, "gloo", 4, False, ("gloo", 0)),
        (1, "gloo", 4, True, ("gloo", 1)),
        (1, "nccl", 4, True, ("nccl", 1)),
        (1, "auto", 4, True, ("gloo", 1)),
        (4, "auto", 4, True, ("nccl", 4)),
    ],
)
def test_ranks_compute_on_gpus_of_their_own_unless_they_may_share(
    gpus: int, backend: str, world_size: int, share: bool, expected: tuple[str, int], machine
) -> None:
    machine(gpus)
    assert devices.choose(backend, world_size, share) == expected


def test_gpus_that_nccl_cannot_use_can_be_shared_over_gloo(machine) -> None:
    machine(4, nccl=False)
    assert devices.choose("auto", 4) == ("gloo", 0)
    assert devices.choose("auto", 4, share_gpus=True) == ("gloo", 4)
    with pytest.raises(ValueError, match="needs a GPU per rank: 1 ranks, but this machine shows 0"):
        devices.choose("nccl", 1, share_gpus=True)


def test_without_a_gpu_there_is_nothing_to_share(machine) -> None:
    machine(0)
    with pytest.raises(ValueError, match="share_gpus=True needs a GPU"):
        tplab.launch(dist.get_rank, 2, share_gpus=True)


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


@pytest.mark.parametrize(("gpus", "backend"), [(0, "gloo"), (1, "gloo"), (2, "nccl"), (8, "nccl")])
@pytest.mark.parametrize("rank", [0, 1])
def test_under_torchrun_all_ranks_of_a_machine_choose_alike(
    gpus: int, backend: str, rank: int, machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """And where they leave GPUs unused, one of them says why."""
    machine(gpus)
    chosen: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "init_process_group", lambda name, **options: chosen.append(name))
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    torchrun._init_process_group()
    assert chosen == [backend]
    said = capsys.readouterr().err
    speaks = gpus == 1 and rank == 0
    assert ("2 were started on this machine, and each sees 1 of its GPUs" in said) == bool(said) == speaks
