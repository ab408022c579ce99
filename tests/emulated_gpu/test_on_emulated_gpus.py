"""The tests marked `gpu`, and the learner's script, on machines with 1, 2 and 8 emulated GPUs."""

from pathlib import Path

import pytest

from tests import ROOT
from tests.course.learn.test_library import EXERCISES, empty_course, pass_all
from tests.emulated_gpu.machine import PATIENCE, on_gpus, pytest_on

pytestmark = [pytest.mark.slow, pytest.mark.timeout(PATIENCE + 60)]


def test_planted_faults_are_found() -> None:
    # one of them hangs on a real GPU. That takes the emulation's patience, which is short here
    assert pytest_on(4, "tests.emulated_gpu.test_planted_faults", EMULATED_GPU_PATIENCE="6") >= 15


def test_pipelines_and_grids_get_through() -> None:
    assert pytest_on(8, "tests.gpu.test_pipelines", "tests.gpu.test_grids") >= 5


def test_ranks_that_wait_forever_are_named_and_steps_that_are_not_finite_left_out() -> None:
    assert pytest_on(8, "tests.gpu.test_failures", "tests.gpu.test_updates") >= 13


def test_the_gpu_check_can_be_rehearsed(tmp_path: Path) -> None:
    """A few of its items. The second call finds that nothing is left to do."""
    report = tmp_path / "report.md"
    options = ("--report", str(report), "--seconds", str(PATIENCE - 20))
    for call in ("first", "second"):
        done = on_gpus(2, "-m", "benchmarks.gpu_check", *options, "--only", "ring", "a step", "constants")
        assert done.returncode == 0, done.stdout + report.read_text()
        assert "3 of 3" in done.stdout
        assert ("..." in done.stdout) == (call == "first"), "each item that runs has a line"
    said = report.read_text()
    for part in ("rehearsal", "2 x emulated GPU", "| tplab |", "fraction: "):
        assert part in said
    assert [name for name in (str(ROOT), str(tmp_path)) if name in said] == []


# Number of GPUs and what runs there, as an expression for pytest's -k; the names of the tests say how many GPUs they
# take. To the emulation, ranks that share a GPU over NCCL are ranks with a GPU each, and four ranks are like eight, so
# of these only a part runs.
PARTS = [
    (8, "GPUs or 8 and ranks or ranks and losses and not share or another_grid"),
    (1, "rank and not ranks or stopped or gloo or share and NCCL and not losses"),
]


@pytest.mark.parametrize(("gpus", "chosen"), PARTS)
def test_layers_agree_with_plain_torch_and_the_capstone_trains_and_resumes(gpus: int, chosen: str) -> None:
    modules = ("tests.gpu.test_layers", "tests.gpu.test_tools", "tests.gpu.test_capstone")
    assert pytest_on(gpus, *modules, "-k", chosen) > 0


def test_the_learners_script_trains_on_gpus_as_on_the_cpu(tmp_path: Path) -> None:
    course = empty_course(tmp_path / "my_course")
    pass_all(course, EXERCISES)
    sizes = {
        "num-layers": 2,
        "hidden-size": 32,
        "num-heads": 4,
        "seq-length": 16,
        "steps": 6,
        "batch-size": 8,
        "sample": 4,
    }
    flags = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    losses = {}
    for gpus, precision in ((0, "float32"), (2, "float32"), (2, "bfloat16")):
        run = f"{precision} on {gpus}"
        start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py")
        done = on_gpus(gpus, *start, *flags, "--precision", precision, "--folder", run, cwd=course.folder)
        assert done.returncode == 0, done.stderr[-5000:]
        assert ("NCCL" if gpus else "gloo") in done.stdout.splitlines()[0]
        rows = (course.folder / run / "log.csv").read_text().split()
        losses[run] = [float(row.split(",")[1]) for row in rows]
    assert len(losses["float32 on 0"]) == 6
    assert losses["float32 on 2"] == pytest.approx(losses["float32 on 0"], rel=1e-4)
    assert losses["bfloat16 on 2"] == pytest.approx(losses["float32 on 0"], rel=1e-2)
