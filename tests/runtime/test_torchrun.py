"""The same script under torchrun, unchanged."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests import saying
from tplab.runtime import torchrun

SCRIPT = """
import atexit, os, subprocess, sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import tplab

asked, folder, ending = sys.argv[1:]
name = os.environ.get("RANK", "none") if "started" not in os.environ else "started"

def tell(file, *words):
    with open(f"{folder}/{file} {name}", "w") as file:
        print(*words, file=file)

def train(start):
    x = torch.full((2,), start) + dist.get_rank()
    dist.all_reduce(x)
    return x.tolist(), dist.get_rank()

def timeouts():
    groups = [*init_device_mesh("cpu", (dist.get_world_size(), 1)).get_all_groups(), dist.group.WORLD]
    return {str(group._get_backend(torch.device("cpu")).options._timeout) for group in groups}

atexit.register(lambda: tell("end", dist.is_initialized()))
results = tplab.launch(train, int(asked), args=(1.0,))
tell("results", list(results), results.record.totals(1))
tell("timeouts", list(tplab.launch(timeouts, int(asked))))
if name == "0" and ending == "starts another":
    subprocess.run([sys.executable, __file__, "3", folder, ""], check=True, env=os.environ | {"started": "1"})
if ending == "error":
    raise ValueError
if ending == "exit":
    tplab.launch(lambda: sys.exit(3), 1)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("torchrun") / "train.py"
    path.write_text(SCRIPT)
    return path


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo", **variables}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def told(script: Path) -> dict[str, str]:
    """What the script says by itself ("none"), under torchrun ("0", "1"), and as a program that rank 0 starts."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    for command in ((str(script), "2"), (*torchrun, str(script), "2")):
        done = run(*command, str(script.parent), "starts another")
        assert done.returncode == 0, done.stderr
    return {path.name: path.read_text().strip() for path in script.parent.iterdir() if path != script}


def test_a_script_gives_the_same_results_with_and_without_torchrun(told: dict[str, str]) -> None:
    plain = "[([3.0, 3.0], 0), ([3.0, 3.0], 1)] {'all_reduce': Total(calls=1, bytes=8)}"
    assert [told[f"results {name}"] for name in ("none", "0", "1")] == [plain] * 3


def test_a_group_without_a_timeout_gives_up_after_as_long_as_the_default_group(told: dict[str, str]) -> None:
    """torch would wait for half an hour in a device mesh's group, although one of its machines is lost."""
    assert [told[f"timeouts {name}"] for name in "01"] == ["[{'0:03:00'}, {'0:03:00'}]"] * 2


def test_a_program_that_a_rank_starts_launches_ranks_of_its_own(told: dict[str, str]) -> None:
    """It inherits torchrun's variables, but the rank is taken."""
    assert told["results started"].startswith("[([6.0, 6.0], 0), ([6.0, 6.0], 1), ([6.0, 6.0], 2)]")


def test_the_process_group_ends_before_python_does_unless_an_error_ends_both(
    told: dict[str, str], script: Path, tmp_path: Path
) -> None:
    assert [told[f"end {name}"] for name in "01"] == ["False", "False"]
    only_rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for ending in ("error", "exit"):
        done = run(str(script), "1", str(tmp_path), ending, TORCHELASTIC_RUN_ID="none", **only_rank)
        assert done.returncode != 0
        assert (tmp_path / "end 0").read_text().strip() == "True"
        (tmp_path / "end 0").unlink()


def test_a_rank_that_waits_in_vain_for_the_others_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "LOST_AFTER", timedelta(seconds=1))
    with pytest.raises(TimeoutError, match=saying("rank 1", "1 s", "2 ranks")):
        torchrun.exchange(dist.HashStore(), 1, 2, "")
