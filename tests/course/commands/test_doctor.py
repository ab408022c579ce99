"""`tplab doctor`: each fault is found, named and given a remedy; a machine without fault is told so, GPU or not."""

import json
import re
import signal
from types import SimpleNamespace
from unittest import mock

import pytest

from tests import saying
from tplab.common import cores
from tplab.course.commands import cli, doctor

GOOD = {
    "torch": {"version": "2.13.0", "gpus": [], "complaint": "", "nccl": True},
    "ranks": "", "free": 2.0, "shared": 2.0, "unseen": [],
}  # fmt: skip
BAD, NOTE, FINE = "to mend", "!", ""


def torch(**facts) -> dict:
    return {"torch": GOOD["torch"] | facts}


@pytest.mark.parametrize(
    ("what", "change", "state", "words"),
    [
        ("PyTorch", {"torch": RuntimeError("No module named 'torch'")}, BAD, ("No module named", "make lab")),
        ("PyTorch", torch(version="2.4.1"), BAD, ("2.4.1", ">=2.12")),
        ("GPUs", torch(gpus=["H100"]), FINE, ("H100",)),
        ("GPUs", torch(gpus=["RTX 4090"], nccl=False), NOTE, ("RTX 4090", "NCCL", "pytorch.org")),
        ("GPUs", torch(gpus=["H100"]) | {"shared": 0.067}, FINE, ("H100",)),
        ("shared", torch(gpus=["H100"] * 2) | {"shared": 0.067}, NOTE, ("0.07 GB", "--shm-size=1g")),
        ("GPUs", {"unseen": ["L4"], **torch(complaint="The driver is too old")}, NOTE, ("L4", "driver is too old")),
        ("memory", {"free": 0.3}, BAD, ("0.3 GB", "Shut Down All Kernels")),
        ("ranks", {"ranks": "rank 1 died\nfor a reason"}, BAD, ("rank 1 died", "for a reason")),
        ("ranks", {"ranks": RuntimeError("no answer")}, BAD, ("no answer",)),
        ("cores", {}, FINE, (f"cores {cores.cores()} ",)),
    ],
)
def test_a_fault_is_named_with_its_remedy_and_what_is_bad_decides_the_exit_code(
    what, change, state, words, tmp_path, monkeypatch, capsys
):
    machine = GOOD | change

    def ask(code: str):
        answer = machine["torch" if code == doctor._TORCH else "ranks"]
        if isinstance(answer, Exception):
            raise answer
        facts = machine["torch"]
        assert code == doctor._TORCH or ("nccl" in code) == bool(facts["gpus"] and facts["nccl"])
        return answer

    monkeypatch.setattr(doctor, "ask", ask)
    monkeypatch.setattr(doctor, "gpus_on_machine", lambda: machine["unseen"])
    monkeypatch.setattr(doctor, "free_memory", lambda: machine["free"] * doctor.GB)
    monkeypatch.setattr(doctor, "SHARED", tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=machine["shared"] * doctor.GB))
    assert cli.main(["doctor"]) == (state == BAD)
    out = capsys.readouterr().out
    said = " ".join(out.split())
    assert [word for word in words if word not in said] == []
    assert bool(re.match(saying("1 ", what), out.splitlines()[-1])) == (state == BAD)
    assert [line.split()[1] for line in out.splitlines() if line[:1] in ("✗", "!")] == [what] * bool(state)
    assert ("→" in said) == bool(state)


def test_a_containers_limit_is_the_memory_there_is(tmp_path):
    gib = 2**30
    for name, text in (("max", 2 * gib), ("current", gib), ("stat", f"anon 5\ninactive_file {gib // 2}")):
        (tmp_path / f"memory.{name}").write_text(f"{text}\n")
    assert doctor.free_memory(tmp_path) == 1.5 * gib
    (tmp_path / "memory.max").write_text("max\n")
    assert doctor.free_memory(tmp_path) > 0.5 * doctor.free_memory(tmp_path / "none")


def test_an_import_that_crashes_or_hangs_does_not_end_the_doctor(monkeypatch):
    for code, says in (
        (f"import os; os.kill(os.getpid(), {int(signal.SIGSEGV)})", "-11"),
        ("raise OSError('libcudart.so: cannot open')", "libcudart.so"),
    ):
        with pytest.raises(RuntimeError, match=says):
            doctor.ask(code)
    monkeypatch.setattr(doctor, "PATIENCE", 1)
    with pytest.raises(RuntimeError, match=saying("1 second")):
        doctor.ask("import time; time.sleep(600)")


def test_a_launch_that_fails_or_adds_up_wrong_is_told(monkeypatch, capsys):
    for launched, told in (
        ({"side_effect": ValueError("rank 1 died")}, "rank 1 died"),
        ({"return_value": [3, 2]}, "[3, 2]"),
        ({"return_value": [2, 2]}, ""),
    ):
        monkeypatch.setattr("tplab.launch", mock.Mock(**launched))
        exec(f"LAUNCHES = [(2, 'gloo')]\n{doctor._RANKS}", {})
        answer = json.loads(capsys.readouterr().out)
        assert told in answer
        assert bool(answer) == bool(told)


def test_all_is_well_here():
    """The real thing: also the proof that this machine can run the tests of the course."""
    assert [finding for finding in doctor.look() if finding.is_fault] == []


@pytest.mark.gpu
def test_gpus_of_this_machine():
    import torch

    assert doctor.ask(doctor._TORCH)["gpus"][0] == torch.cuda.get_device_name(0)
