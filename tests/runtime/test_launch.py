"""launch(): what it runs, what travels, what it refuses. The reference is what plain Python would have done."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tplab
from tests import saying
from tplab.runtime.forkserver import is_rank

NOTEBOOKS = {  # what the cells of a notebook define, and what `program` returns on two ranks
    "a once-differentiable autograd function": ("""
import torch

class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        return 2 * dy

def program():
    x = torch.ones(3, requires_grad=True)
    Twice.apply(x).sum().backward()
    return x.grad.tolist()
""", [[2.0, 2.0, 2.0]] * 2),
    "an attribute with the name of a module of torch": ("""  # cloudpickle takes it for torch.distributed.config
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
class Model:
    config = 7
def program():
    return dist.get_rank(), Model.config
""", [(0, 7), (1, 7)]),
}  # fmt: skip


def test_what_a_notebook_defines_travels_with_closures_and_keyword_arguments() -> None:
    programs = {}
    for name, (source, _) in NOTEBOOKS.items():
        notebook: dict[str, Any] = {"__name__": "__main__"}
        exec(source, notebook)
        programs[name] = notebook["program"]
    factor = torch.tensor(3.0)

    def run(x: float, *, plus: float) -> tuple[float, dict[str, object]]:
        return float(x * factor + plus + dist.get_rank()), {name: program() for name, program in programs.items()}

    results = tplab.launch(run, 2, args=(2.0,), kwargs={"plus": 1.0})
    assert [scaled for scaled, _ in results] == [7.0, 8.0]
    assert {name: [found[name] for _, found in results] for name in programs} == {
        name: expected for name, (_, expected) in NOTEBOOKS.items()
    }


NOTED = torch.nn.Parameter(torch.ones(2))
NOTED.note = "split along dim 0"
TENSORS = {
    "bfloat16": torch.randn(5, 3).bfloat16(),
    "scalar": torch.tensor(7),
    "empty": torch.empty(0, 4),
    "expanded": torch.randn(1).expand(4),
    "requires_grad": torch.randn(3, requires_grad=True),
    "parameter with an attribute": NOTED,
}


def test_tensors_of_every_kind_travel_both_ways() -> None:
    results = tplab.launch(lambda x, w: ([(x,)], (w * 2).sum()), 2, args=(TENSORS, NOTED))
    for ((returned,),), computed in results:
        assert not computed.requires_grad
        for name, tensor in returned.items():
            torch.testing.assert_close(tensor, TENSORS[name])
            assert (type(tensor), tensor.requires_grad) == (type(TENSORS[name]), TENSORS[name].requires_grad), name
            assert tensor.__dict__ == TENSORS[name].__dict__


def leave_something_behind() -> tuple[bool, torch.dtype, set[object]]:
    """What an earlier launch has left, and the timeouts of groups: torch would give up after half an hour."""
    seen = hasattr(torch, "left_behind"), torch.get_default_dtype()
    torch.left_behind = True
    torch.set_default_dtype(torch.float64)
    groups = [dist.new_group([0, 1]), *init_device_mesh("cpu", (2, 1)).get_all_groups(), dist.group.WORLD]
    return *seen, {group._get_backend(torch.device("cpu")).options._timeout for group in groups}


def test_each_launch_starts_in_fresh_processes_whose_groups_have_the_timeout_of_the_default_group() -> None:
    for p in (2, numpy.int64(2)):  # the number of ranks may be any kind of whole number
        assert tplab.launch(leave_something_behind, p) == [(False, torch.float32, {timedelta(days=1)})] * 2


def test_a_rank_sees_the_parents_environment_folder_and_import_path_and_has_its_number_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tplab.launch(dist.get_rank, 1)  # the server is there before anything changes
    modules, folder = tmp_path / "modules", tmp_path / "folder"
    modules.mkdir()
    folder.mkdir()
    (modules / "only_here.py").write_text("answer = 42\n")
    monkeypatch.setenv("TPLAB_TEST_VARIABLE", "set later")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # the server and all that it forks begin with 1
    monkeypatch.delenv("MPLBACKEND")  # which tests/conftest.py has set before the server started
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(modules)

    def look() -> list[object]:
        import only_here

        variables = ("TPLAB_TEST_VARIABLE", "MPLBACKEND", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        found = [os.environ.get(name) for name in variables]
        return [os.getcwd(), only_here.answer, torch.get_num_threads(), *found]

    expected = [[str(folder), 42, 3, "set later", None, rank, rank, "2", "2"] for rank in "01"]
    assert tplab.launch(look, 2) == expected


def test_random_numbers_of_numpy_differ_between_ranks_although_the_server_has_imported_it() -> None:
    while not tplab.launch(lambda: "numpy.random" in sys.modules, 1)[0]:
        pass  # the server is still importing
    first, second = tplab.launch(lambda: float(sys.modules["numpy.random"].rand()), 2)
    assert first != second


def test_what_cannot_be_sent_is_named() -> None:
    lock = threading.Lock()
    holder = SimpleNamespace(inner=[1, lock])
    cases: list[tuple[Callable[..., object], dict[str, Any], list[str]]] = [
        (lambda x: None, {"kwargs": {"x": holder}}, ["kwargs['x']", "type SimpleNamespace"]),
        (lambda: lock, {}, ["variable", "lock", "lambda", "type lock"]),
        (lambda x=lock: None, {}, ["default", "lambda", "type lock"]),
    ]
    for function, call, says in cases:
        with pytest.raises(TypeError, match=saying(*says)):
            tplab.launch(function, 2, **call)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        ({"world_size": 0}, ValueError, ["world_size", "1", "64", "0"]),
        ({"world_size": 2.5}, TypeError, ["world_size", "2.5"]),
        ({"backend": "mpi"}, ValueError, ["backend", "auto, gloo, nccl", "'mpi'"]),
        ({"timeout": float("nan")}, ValueError, ["timeout", "nan"]),
        ({"args": (1, 2, 3)}, TypeError, ["args=(1, 2, 3)"]),
        ({"fn": 3}, TypeError, ["launch(fn)", "launch(fn())"]),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(
    call: dict, error: type, says: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tplab.runtime.launcher.fork_server", lambda: pytest.fail("a process was asked for"))
    with pytest.raises(error, match=saying(*says)):
        tplab.launch(**{"fn": lambda x: x, "args": (1,), **call})


def test_a_wrong_number_of_ranks_under_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "80"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=saying("72 ranks", "torchrun", "80")):
        tplab.launch(dist.get_rank, 72)  # more than a machine should start, which torchrun may


PLAIN_SCRIPT = """
import psutil, tplab, torch, torch.distributed as dist
print("top level runs, with", len(psutil.Process().children()), "servers")
class Mine:
    def __init__(self, rank): self.rank = rank
def make(): return Mine(dist.get_rank())
for _ in range(2):
    results = tplab.launch(make, 2)
    print([isinstance(r, Mine) and r.rank for r in results])
"""


def test_a_plain_script_needs_no_main_guard_its_classes_come_back_and_it_is_told_the_backend_once(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(PLAIN_SCRIPT)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "top level runs, with 0 servers\n[0, 1]\n[0, 1]\n"
    assert done.stderr.count("2 processes") == 1


def test_only_a_rank_itself_is_inside_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that a rank starts inherits the rank's variables, and a process that it forks even its memory."""
    launches = "import tplab, torch.distributed as dist; print(tplab.launch(dist.get_rank, 2))"

    def program() -> tuple[str, str, int]:
        with pytest.raises(RuntimeError) as caught:
            tplab.launch(dist.get_rank, 2)
        started = subprocess.run([sys.executable, "-c", launches], capture_output=True, text=True, check=True)
        forked = os.fork()
        if not forked:
            os._exit(int(is_rank()))
        return str(caught.value), started.stdout, os.waitpid(forked, 0)[1]

    for name in ("TPLAB_RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE"):  # as in tutorials; 0.2 took the first for proof
        monkeypatch.setenv(name, "0")
    ((refused, started, forked),) = tplab.launch(program, 1)
    assert re.search(saying("launch()", "inside"), refused)
    assert started == "[0, 1]\n"
    assert forked == 0


@pytest.mark.gpu
def test_one_rank_runs_on_the_gpu_with_cuda_initialised_in_the_parent_and_gloo_ranks_on_the_cpu() -> None:
    x = torch.ones(3, device="cuda")

    def double(t: torch.Tensor) -> tuple[str, torch.Tensor]:
        y = t * 2
        dist.all_reduce(y)
        return str(t.device), y

    ((device, result),) = tplab.launch(double, 1, args=(x,), backend="nccl")
    assert (device, result.device.type) == ("cuda:0", "cpu")
    torch.testing.assert_close(result, torch.full((3,), 2.0))
    for device, result in tplab.launch(double, 2, args=(x,), backend="gloo"):
        assert device == "cpu"
        torch.testing.assert_close(result, torch.full((3,), 4.0))
