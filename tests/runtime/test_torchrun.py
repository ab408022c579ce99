"""The same script under torchrun, unchanged."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tplab.runtime import torchrun as on_torchruns_ranks

SCRIPT = """
import sys
import torch
import torch.distributed as dist
import tplab

def train(start):
    x = torch.full((2,), start) + dist.get_rank()
    dist.all_reduce(x)
    return x, dist.get_rank()

results = tplab.launch(train, int(sys.argv[1]), args=(1.0,))
rank = dist.get_rank() if dist.is_initialized() else "none"
with open(f"{sys.argv[2]}/out{rank}", "w") as file:
    print([(x.tolist(), r) for x, r in results], results.record.totals(1), file=file)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def torchrun(script: Path, started: int, asked: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={started}"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(
        [*command, str(script), str(asked), str(script.parent)], capture_output=True, text=True, env=environment
    )


def test_a_script_gives_the_same_results_with_and_without_torchrun(script: Path) -> None:
    done = torchrun(script, 2, 2)
    assert done.returncode == 0, done.stderr
    subprocess.run([sys.executable, str(script), "2", str(script.parent)], check=True)
    plain = (script.parent / "outnone").read_text()
    assert plain.strip() == "[([3.0, 3.0], 0), ([3.0, 3.0], 1)] {'all_reduce': Total(calls=1, bytes=8)}"
    assert [(script.parent / f"out{rank}").read_text() for rank in range(2)] == [plain, plain]


def test_another_number_of_ranks_than_torchrun_started_is_an_error_that_says_what_to_do(script: Path) -> None:
    done = torchrun(script, 1, 2)
    assert done.returncode != 0
    assert "launch asks for 2 ranks, but torchrun started 1" in done.stderr
    assert "--nproc-per-node 2" in done.stderr


@pytest.mark.parametrize(("gpus", "rank", "speaks"), [(1, 0, True), (1, 1, False), (0, 0, False)])
def test_ranks_that_see_too_few_gpus_say_that_they_compute_on_the_cpu(
    gpus: int, rank: int, speaks: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where a GPU is pinned to each process. With stand-ins: no group is made."""
    begun: list[str] = []
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(dist, "init_process_group", begun.append)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    on_torchruns_ranks._init_process_group()
    said = capsys.readouterr().err
    assert begun == ["gloo"]
    assert ("8 were started on this machine, and each sees 1 of its GPUs" in said) == bool(said) == speaks
