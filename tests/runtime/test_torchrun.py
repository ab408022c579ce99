"""The same script under torchrun, unchanged."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tplab.runtime.torchrun import roll_call

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


def test_a_group_without_a_timeout_gives_up_after_as_long_as_the_default_group(script: Path) -> None:
    """torch would wait for half an hour in a device mesh's group, although one of its machines is lost."""
    mesh = """
        from torch.distributed.device_mesh import init_device_mesh
        groups = [*init_device_mesh("cpu", (1, 1)).get_all_groups(), dist.group.WORLD]
        return {group._get_backend(torch.device("cpu")).options._timeout for group in groups}, 0
    """
    body = mesh.replace("\n        ", "\n    ")
    script.write_text(
        SCRIPT.replace("    x = torch.full", f"{body}\n    x = torch.full").replace("x.tolist()", "sorted(map(str, x))")
    )
    done = torchrun(script, 1, 1)
    assert done.returncode == 0, done.stderr
    assert (script.parent / "out0").read_text().startswith("[(['0:03:00'], 0)]")


def test_a_program_that_a_rank_starts_launches_ranks_of_its_own(script: Path) -> None:
    """It inherits torchrun's variables, but the rank is taken."""
    starts = f"subprocess.run([sys.executable, {str(script)!r}, '3', sys.argv[2]], check=True)"
    script.write_text(f"{SCRIPT}\nimport subprocess\nif rank != 'none':\n    {starts}\n")
    done = torchrun(script, 1, 1)
    assert done.returncode == 0, done.stderr
    assert (script.parent / "out0").read_text().startswith("[([1.0, 1.0], 0)]")
    assert (script.parent / "outnone").read_text().startswith("[([6.0, 6.0], 0), ([6.0, 6.0], 1), ([6.0, 6.0], 2)]")


ENDINGS = {  # the script's last line, whether the process group is still there then
    "the end of the script": ("", "False"),
    "an error": ("raise ValueError", "True"),
    "an exit in the next launch": ("tplab.launch(lambda: sys.exit(3), 1)", "True"),
}


@pytest.mark.parametrize(("last_line", "still_there"), ENDINGS.values(), ids=ENDINGS)
def test_the_process_group_ends_before_python_does_unless_an_error_ends_both(
    script: Path, last_line: str, still_there: str
) -> None:
    at_the_end = (
        f"atexit.register(lambda: print(dist.is_initialized(), file=open({str(script.parent / 'end')!r}, 'w')))"
    )
    script.write_text(f"import atexit\n{SCRIPT.replace('import tplab', f'import tplab; {at_the_end}')}{last_line}\n")
    done = torchrun(script, 1, 1)
    assert (done.returncode == 0) == (not last_line), done.stderr
    assert (script.parent / "end").read_text().strip() == still_there


def test_restarted_ranks_find_each_other_and_not_what_the_ranks_before_them_wrote() -> None:
    store = dist.HashStore()  # torchrun keeps its store from one attempt to the next
    names = []
    for attempt, (world_size, late) in enumerate([(4, 3), (4, 0), (4, 2), (2, 0), (3, 1)]):

        def rank(
            r: int, attempt: int = attempt, world_size: int = world_size, late: int = late
        ) -> tuple[str, list[str]]:
            time.sleep(0.2 if r == late else 0)
            return roll_call(store, r, world_size, f"rank {r} of attempt {attempt}")

        with ThreadPoolExecutor(world_size) as pool:
            answers = list(pool.map(rank, range(world_size)))
        assert [texts for _, texts in answers] == [
            [f"rank {r} of attempt {attempt}" for r in range(world_size)] for _ in range(world_size)
        ]
        names += {name for name, _ in answers}
    assert len(set(names)) == len(names) == 5


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_waits_in_vain_for_the_others_says_so(rank: int) -> None:
    store = dist.HashStore()
    roll_call(store, 0, 1, "of an earlier attempt")
    with pytest.raises(TimeoutError, match=rf"rank {rank} waited 1 s for all 2 ranks to start\. Look for an error"):
        roll_call(store, rank, 2, "", patience=timedelta(seconds=1))
