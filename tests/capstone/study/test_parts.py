"""The parts of a study where a machine has few GPUs, or small ones: on pretended ranks."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.capstone.own_layers.libraries import Libraries
from tests.capstone.own_layers.test_build import BY_ITS_MODULE
from tests.capstone.study.test_run import BUDGET, KERNELS, TINY, no_room
from tplab.capstone.study import parts as study_parts
from tplab.capstone.study import programs as measuring
from tplab.capstone.study.parts import PARTS, Study
from tplab.cost.machines import MACHINES
from tplab.runtime import RankError


@pytest.mark.slow
def test_the_learners_losses_stand_beside_tplabs_and_what_nothing_calls_is_said(tmp_path: Path):
    settings = replace(TINY, folder=str(tmp_path / "run"))
    answers = Libraries(tmp_path / "libraries").answers(BY_ITS_MODULE)
    found = PARTS["layers"](Study(settings, BUDGET, answers))
    assert len(found["losses"]["mine"]) == BUDGET.layers
    assert found["losses"]["mine"] == pytest.approx(found["losses"]["tplab"], abs=1e-5)
    whose = {row["what"]: row["whose"] for row in found["used"]}
    assert (whose["f"], whose["g"], whose["column-parallel layer"]) == ("not called", "the course's solution", "yours")


@pytest.mark.parametrize(("gpus", "backend"), [(0, "gloo"), (1, "gloo"), (2, "nccl")])
def test_one_rank_computes_where_the_whole_run_does(gpus: int, backend: str, monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[int, str]] = []

    def pretended(_, world_size: int, *, backend: str, **options: object) -> list:
        asked.append((world_size, backend))
        return [([1.0], [1.0], frozenset())]

    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(study_parts, "launch", pretended)
    PARTS["alone"](Study(TINY, BUDGET, None))
    assert asked == [(1, backend)]


def results(program, seconds: list[float]) -> list:
    """What a program returns that times steps."""
    return [(KERNELS, seconds) if program is measuring.timed else ([], seconds, frozenset())]


def test_one_rank_without_room_takes_smaller_micro_batches_and_a_grown_model_without_room_is_noted(
    monkeypatch: pytest.MonkeyPatch,
):
    settings = replace(TINY, batch_size=4, micro_batch_size=4)

    def pretended(function, world_size: int, *, args: tuple, **options: object) -> list:
        asked = args[0]
        if asked.num_layers > 1 or (world_size == 1 and asked.micro_batch_size > 1):
            raise RankError("..", 0, "OutOfMemoryError", "no room")
        return results(function, [2.0, 1.0 * world_size])

    monkeypatch.setattr(study_parts, "launch", pretended)
    found = PARTS["scaling"](Study(settings, BUDGET, None))
    assert (found["strong"], found["weak"]) == ({1: 1.0, 2: 2.0}, {1: 1.0})
    assert "On 1 rank, we used micro-batches of 1, because larger ones didn't fit." in found["note"]
    assert "We couldn't measure the grown model on 2 ranks (OutOfMemoryError)." in found["note"]
    alone = PARTS["alone"]
    monkeypatch.setattr(study_parts, "launch", lambda *_, **__: no_room(None))
    with pytest.raises(RankError):
        alone(Study(settings, BUDGET, None))
    with pytest.raises(RankError):
        PARTS["scaling"](Study(settings, BUDGET, None))


def test_a_smallest_measured_number_of_ranks_is_the_base(monkeypatch: pytest.MonkeyPatch):
    def pretended(function, world_size: int, *, args: tuple, **options: object) -> list:
        return no_room(None) if world_size == 1 else results(function, [2.0, 3.0])

    monkeypatch.setattr(study_parts, "launch", pretended)
    found = PARTS["scaling"](Study(TINY, BUDGET, None))
    assert list(found["strong"]) == [2]
    assert found["says"] == "2 ranks are 1.00 times as fast as 2 ranks"


def test_the_machine_is_measured_in_the_precision_of_the_run(monkeypatch: pytest.MonkeyPatch):
    asked: list[torch.dtype] = []
    monkeypatch.setattr(measuring, "join", lambda _: SimpleNamespace(device=torch.device("cuda", 0), size=1))
    monkeypatch.setattr(measuring, "known_machine", lambda _: MACHINES["H100 DGX"])
    monkeypatch.setattr(measuring, "matrix_rate", lambda *, dtype: asked.append(dtype) or 1.0)
    monkeypatch.setattr(measuring, "memory_rate", lambda: 1.0)
    peaks = [measuring.machine(replace(TINY, precision=name)).get("peak") for name in ("float32", "bfloat16")]
    assert asked == [torch.float32, torch.bfloat16]
    assert peaks == [None, MACHINES["H100 DGX"].flops], "what is published is for bfloat16"


def test_a_timeline_of_thousands_of_kernels_becomes_bars_that_can_be_told_apart():
    many = [("compute", "kernel<" + "x" * 200, at * 1e-4, at * 1e-4 + 9e-5) for at in range(9000)]
    sends = [("communicate", "all_reduce", 0.1, 0.2), ("communicate", "all_gather", 0.3, 0.4)]
    kept = measuring.drawn(many + sends)
    assert [bar for bar in kept if bar[0] == "communicate"] == sends
    assert [(start, end) for lane, _, start, end in kept if lane == "compute"] == [(0.0, pytest.approx(0.89999))]
    views = [("compute", "view", at * 1e-4, at * 1e-4 + 9e-5) for at in range(9000)]
    views[4000] = ("compute", "addmm", 0.4, 0.400095)
    assert [name for _, name, *_ in measuring.drawn(views)] == ["addmm"], "the longest of what was merged"
    assert max(len(name) for _, name, *_ in kept) == 60
    assert len(measuring.drawn(many[:1000])) == 1000
