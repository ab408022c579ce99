"""The parts of a study where a machine has few GPUs, or small ones: on pretended ranks."""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.capstone.study.test_run import BUDGET, KERNELS, TINY, no_room
from tplab.capstone.study import programs as measuring
from tplab.capstone.study import run as study_module
from tplab.capstone.study.run import PARTS, Study
from tplab.cost.machines import MACHINES
from tplab.runtime import RankError


@pytest.mark.parametrize(("gpus", "backend"), [(1, "gloo"), (2, "nccl")])
def test_one_rank_computes_where_the_whole_run_does(gpus: int, backend: str, monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[int, str]] = []

    def pretended(_, world_size: int, *, backend: str, **options: object) -> list:
        asked.append((world_size, backend))
        return [([1.0], [1.0])]

    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(study_module, "launch", pretended)
    PARTS["alone"](Study(TINY, BUDGET))
    assert asked == [(1, backend)]


def results(program, seconds: list[float]) -> list:
    """What a program returns that times steps."""
    return [(KERNELS, seconds) if program is measuring.timed else ([], seconds)]


def test_one_rank_without_room_takes_smaller_micro_batches(monkeypatch: pytest.MonkeyPatch):
    settings = replace(TINY, batch_size=4, micro_batch_size=4)

    def pretended(function, world_size: int, *, args: tuple, **options: object) -> list:
        asked = args[0]
        if world_size == 1 and asked.micro_batch_size > 1:
            raise RankError("..", 0, "OutOfMemoryError", "no room")
        return results(function, [2.0, 1.0 * world_size])

    monkeypatch.setattr(study_module, "launch", pretended)
    monkeypatch.setattr(study_module, "cores", lambda: 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    found = PARTS["scaling"](Study(settings, BUDGET))
    assert [(turn["ranks"], turn["rounds"]) for turn in found["turns"]] == [(1, [1.0] * 3), (2, [2.0] * 3)]
    assert found["notes"] == ["For 1 rank with 2 threads, we used micro-batches of 1, because larger ones didn't fit."]
    alone = PARTS["alone"]
    monkeypatch.setattr(study_module, "launch", lambda *_, **__: no_room(None))
    with pytest.raises(RankError):
        alone(Study(settings, BUDGET))
    with pytest.raises(RankError):
        PARTS["scaling"](Study(settings, BUDGET))


def test_a_smallest_measured_number_of_ranks_is_the_base(monkeypatch: pytest.MonkeyPatch):
    def pretended(function, world_size: int, *, args: tuple, **options: object) -> list:
        return no_room(None) if world_size == 1 else results(function, [2.0, 3.0])

    monkeypatch.setattr(study_module, "launch", pretended)
    monkeypatch.setattr(study_module, "cores", lambda: 2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = PARTS["scaling"](Study(TINY, BUDGET))
    assert [turn["ranks"] for turn in found["turns"]] == [2]
    told = [f"We couldn't measure 1 rank with {threads} (OutOfMemoryError)." for threads in ("1 thread", "2 threads")]
    assert found["notes"] == told
    assert found["says"] == "a step takes 3 s on 2 ranks with 1 thread each"


def test_a_single_process_with_the_threads_of_all_ranks_takes_its_turns_too(monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[int, str]] = []

    def pretended(function, world_size: int, **options: object) -> list:
        asked.append((world_size, os.environ["OMP_NUM_THREADS"]))
        return results(function, [2.0, 1.0])

    monkeypatch.setattr(study_module, "launch", pretended)
    monkeypatch.setattr(study_module, "cores", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = PARTS["scaling"](Study(TINY, BUDGET))
    assert [(turn["ranks"], turn["threads"]) for turn in found["turns"]] == [(1, 2), (2, 2), (1, 4)]
    assert asked == [(1, "2"), (2, "2"), (1, "4")] * (1 + BUDGET.rounds), "all take turns"


def test_the_machine_is_measured_in_the_precision_of_the_run(monkeypatch: pytest.MonkeyPatch):
    asked: list[torch.dtype] = []
    monkeypatch.setattr(measuring, "join", lambda _: SimpleNamespace(device=torch.device("cuda", 0), size=1))
    monkeypatch.setattr(measuring, "known_machine", lambda _: MACHINES["H100 DGX"])
    monkeypatch.setattr(measuring, "matrix_rate", lambda *, dtype: asked.append(dtype) or 1.0)
    monkeypatch.setattr(measuring, "memory_rate", lambda: 1.0)
    peaks = [measuring.machine(replace(TINY, precision=name)).get("peak") for name in ("float32", "bfloat16")]
    assert asked == [torch.float32, torch.bfloat16]
    assert peaks == [None, MACHINES["H100 DGX"].flops], "what is published is for bfloat16"
