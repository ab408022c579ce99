"""The first 12 losses of a capstone run on GPUs are those of one rank on the CPU."""

import math
from pathlib import Path

import pytest

from tests.gpu import real_gpu
from tests.gpu.first_losses import RUNS, SETTINGS, all_losses, far_apart, first_losses
from tests.gpu.implementations import WAYS, Way, over_nccl
from tests.gpu.test_layers import SHARED_NCCL, check_is_open

ON_THE_CPU = Way("gloo", 1, 0)
pytestmark = pytest.mark.timeout(1200)  # a launch with all runs of a way, one more if it fails, and NCCL's start


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    losses = first_losses(ON_THE_CPU, tmp_path_factory.mktemp("right"))
    assert len(losses) == SETTINGS.steps
    assert losses[-1] < losses[0] - 0.3
    return losses


TRIED = ("2 ranks share a GPU, gloo", SHARED_NCCL, "2 GPUs, NCCL")  # with all runs
PRECISIONS = ("float64", "float32", "bfloat16")
FOR_ONE_RANK = (*PRECISIONS, "the learner's, bfloat16")


def runs_on(name: str) -> tuple[str, ...]:
    if name not in TRIED:
        return FOR_ONE_RANK if WAYS[name].world_size == 1 else PRECISIONS
    return tuple(run for run in RUNS if WAYS[name].messages or RUNS[run].get("pp", 1) == 1)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "run"),
    [
        pytest.param(name, run, id=f"{name}: {run}")
        for name, way in WAYS.items()
        if way.world_size <= SETTINGS.num_heads
        for run in runs_on(name)
    ],
)
def test_losses_are_those_of_the_cpu(name: str, run: str, right: list[float], tmp_path: Path) -> None:
    check_is_open(name)
    found = all_losses(WAYS[name], runs_on(name))
    losses = first_losses(WAYS[name], tmp_path, **RUNS[run]) if isinstance(found, Exception) else found[run]
    assert far_apart(losses, right, RUNS[run].get("precision", "float64")) == {}


@pytest.mark.gpu
@real_gpu
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_losses_of_compiled_layers_are_those_of_the_cpu(precision: str, right: list[float], tmp_path: Path) -> None:
    name = "1 rank, NCCL"
    check_is_open(name)
    losses = first_losses(WAYS[name], tmp_path, precision=precision, compile=True, sample_tokens=4)
    assert far_apart(losses, right, precision) == {}


@pytest.mark.gpu
def test_a_run_that_was_stopped_on_a_gpu_goes_on_there(right: list[float], tmp_path: Path) -> None:
    name = "1 rank, NCCL"
    check_is_open(name)
    same = {"folder": str(tmp_path / "run"), "save_every": 4}
    first = first_losses(WAYS[name], tmp_path, stop_after=8, **same)
    then = first_losses(WAYS[name], tmp_path, **same)
    assert (len(first), len(then)) == (8, 4)
    assert far_apart(first + then, right, "float64") == {}


GRIDS = {  # how a run is started, and how it goes on
    "from two shards to two replicas": ({"tp": 2}, {"tp": 1, "dp": 2}),
    "from stages that share weights to shards in stages": (
        {"pp": 2, "dp": 2, "zero": 3, "micro_batch_size": 2}, {"tp": 2, "pp": 2, "sequence_parallel": True},
    ),
    "from shards of all kinds to replicas": (
        {"tp": 2, "pp": 2, "dp": 2, "zero": 2, "micro_batch_size": 2}, {"dp": 8, "zero": 1, "micro_batch_size": 1},
    ),
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("first", "then"), GRIDS.values(), ids=GRIDS)
def test_a_run_goes_on_with_another_grid(
    first: dict[str, int], then: dict[str, int], right: list[float], tmp_path: Path
) -> None:
    ranks = math.prod(first.get(name, 1) for name in ("tp", "pp", "dp"))
    way = over_nccl(ranks)
    check_is_open(way)
    same = {"tp": 1, "folder": str(tmp_path / "run"), "save_every": 4}
    losses = first_losses(way, tmp_path, stop_after=8, **same | first) + first_losses(way, tmp_path, **same | then)
    assert far_apart(losses, right, "float64") == {}


@pytest.mark.slow
def test_two_ranks_on_the_cpu_have_them_too(right: list[float], tmp_path: Path) -> None:
    """The same programs where there is no GPU, so that on one only the GPU is new."""
    losses = first_losses(Way("gloo", 2, 0), tmp_path, precision="bfloat16", sequence_parallel=True)
    assert far_apart(losses, right, "bfloat16") == {}
    theirs = first_losses(Way("gloo", 2, 0), tmp_path, precision="bfloat16", layers="mine", sample_tokens=4)
    assert far_apart(theirs, right, "bfloat16") == {}
    assert set(far_apart([loss + 0.5 for loss in losses], right, "bfloat16")) == set(range(1, SETTINGS.steps + 1))
