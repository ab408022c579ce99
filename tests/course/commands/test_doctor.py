"""`tplab doctor`: each fault is found, named and given a remedy; a machine without fault is told so, GPU or not."""

import copy
import json
import signal
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from packaging.specifiers import SpecifierSet

from tests import ROOT
from tplab.course.commands import cli, doctor
from tplab.course.learn.course_files import find_course

GOOD = SimpleNamespace(
    python="3.13.1", executable="python", torch="2.13.0", wanted=SpecifierSet(">=2.12"), fits=True, torch_error="",
    gloo=True, nccl=False, gpus=[], unseen=[], complaint="", visible=None, kernel="", cores=1, memory=2.0,
    shared=float("inf"), disk=2.0, folder=Path("here"), loopback="", ranks="", newer="",
)  # fmt: skip
BAD, NOTE, FINE = "to mend", "!", ""


@pytest.mark.parametrize(
    ("what", "change", "state", "words"),
    [
        ("PyTorch", {"torch_error": "No module named 'torch'", "gloo": False}, BAD, ("No module named", "make lab")),
        ("PyTorch", {"torch": "2.4.1", "fits": False}, BAD, ("2.4.1", ">=2.12")),
        ("PyTorch", {"gloo": False}, BAD, ("without gloo",)),
        ("GPUs", {"gpus": ["H100"], "nccl": True}, FINE, ("H100",)),
        ("GPUs", {"unseen": ["L4"], "complaint": "The driver is too old"}, NOTE, ("L4", "The driver is too old")),
        ("memory", {"memory": 0.3}, BAD, ("0.3 GB", "Shut Down All Kernels")),
        ("loopback", {"loopback": "Network is unreachable"}, BAD, ("Network is unreachable", "ip link set lo up")),
        ("ranks", {"ranks": "rank 1 died\nfor a reason"}, BAD, ("rank 1 died", "for a reason")),
        ("chapters", {"newer": "04_linear"}, NOTE, ("04_linear", "tplab update")),
        ("cores", {}, FINE, ("1 for this process",)),
    ],
)
def test_a_fault_is_named_with_its_remedy_and_what_is_bad_decides_the_exit_code(
    what, change, state, words, monkeypatch, capsys
):
    machine = copy.copy(GOOD)
    vars(machine).update(change)
    monkeypatch.setattr(doctor, "look", lambda course: machine)
    assert cli.main(["doctor", "--root", str(ROOT)]) == (state == BAD)
    out = capsys.readouterr().out
    said = " ".join(out.split())
    assert [word for word in words if word not in said] == []
    assert (f"1 to mend: {what}." in said) == (state == BAD)
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
        (f"import os; os.kill(os.getpid(), {int(signal.SIGSEGV)})", "status -11"),
        ("raise OSError('libcudart.so: cannot open')", "libcudart.so"),
    ):
        with pytest.raises(RuntimeError, match=says):
            doctor.ask(code)
    monkeypatch.setattr(doctor, "PATIENCE", 1)
    with pytest.raises(RuntimeError, match="no answer after 1 seconds"):
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
    machine = doctor.look(find_course(ROOT))
    assert doctor.first_of_each(doctor.FAULTS, machine) == {}


@pytest.mark.gpu
def test_gpus_of_this_machine():
    import torch

    assert doctor.ask(doctor._TORCH)["gpus"][0] == torch.cuda.get_device_name(0)
