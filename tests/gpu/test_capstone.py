"""The first 20 losses of a capstone run on GPUs are those of one rank on the CPU."""

import math
from pathlib import Path

import pytest

from tests.gpu import real_gpu
from tests.gpu.first_losses import SETTINGS, far_apart, first_losses
from tests.gpu.implementations import WAYS, Way, over_nccl
from tests.gpu.test_layers import SHARED_NCCL, check_is_open

ON_THE_CPU = Way("gloo", 1, 0)
pytestmark = pytest.mark.timeout(900)  # up to three launches of at most 240 s, and NCCL's start


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    losses = first_losses(ON_THE_CPU, tmp_path_factory.mktemp("right"), precision="float64")
    assert len(losses) == SETTINGS.steps
    assert losses[-1] < losses[0] - 0.3
    return losses


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("name", [name for name, way in WAYS.items() if way.world_size <= SETTINGS.num_heads])
def test_losses_on_gpus_are_those_of_the_cpu(name: str, precision: str, right: list[float], tmp_path: Path) -> None:
    check_is_open(name)
    assert far_apart(first_losses(WAYS[name], tmp_path, precision=precision), right, precision) == {}


VARIANTS = {
    "sequence parallel": {"sequence_parallel": True},
    "computed again": {"recompute": "attention"},
    "replicas": {"tp": 1, "dp": 2},
    "the learner's": {"layers": "mine"},
    "text is written": {"sample_tokens": 4},
    "stages": {"tp": 1, "pp": 2, "micro_batch_size": 2},
    "shared gradients": {"tp": 1, "dp": 2, "zero": 2},
    "shared weights": {"tp": 1, "dp": 2, "zero": 3, "sample_tokens": 4},
}


OVER = ("2 ranks share a GPU, gloo", SHARED_NCCL, "2 GPUs, NCCL")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "variant"),
    [(name, variant) for name in OVER for variant in VARIANTS if WAYS[name].messages or variant != "stages"],
)
def test_so_are_those_of_other_ways_to_cut_it(name: str, variant: str, right: list[float], tmp_path: Path) -> None:
    check_is_open(name)
    losses = first_losses(WAYS[name], tmp_path, precision="float64", **VARIANTS[variant])
    assert far_apart(losses, right, "float64") == {}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["1 rank, NCCL", "2 GPUs, NCCL"])
def test_so_are_those_of_the_learners_layers_in_bfloat16(name: str, right: list[float], tmp_path: Path) -> None:
    check_is_open(name)
    losses = first_losses(WAYS[name], tmp_path, precision="bfloat16", layers="mine")
    assert far_apart(losses, right, "bfloat16") == {}


@pytest.mark.gpu
@real_gpu
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_so_are_those_of_compiled_layers(precision: str, right: list[float], tmp_path: Path) -> None:
    name = "1 rank, NCCL"
    check_is_open(name)
    losses = first_losses(WAYS[name], tmp_path, precision=precision, compile=True, sample_tokens=4)
    assert far_apart(losses, right, precision) == {}


@pytest.mark.gpu
def test_a_run_that_was_stopped_on_a_gpu_goes_on_there(right: list[float], tmp_path: Path) -> None:
    name = "1 rank, NCCL"
    check_is_open(name)
    same = {"precision": "float64", "folder": str(tmp_path / "run"), "save_every": 4}
    first = first_losses(WAYS[name], tmp_path, stop_after=8, **same)
    then = first_losses(WAYS[name], tmp_path, **same)
    assert (len(first), len(then)) == (8, 12)
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
    same = {"tp": 1, "precision": "float64", "folder": str(tmp_path / "run"), "save_every": 4}
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
