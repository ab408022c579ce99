"""`tplab doctor`: each fault is found, named and given a remedy; a machine without fault is told so, GPU or not."""

import importlib.metadata
import json
import os
import re
import signal
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests import ROOT
from tests.course import tiny
from tplab.course.tools import cli, doctor
from tplab.course.tools.doctor import findings
from tplab.course.tools.doctor.findings import BAD, GOOD, NOTE, Finding, Torch
from tplab.runtime import devices

GIB = 2**30
WANTED = Requirement("torch>=2.12")
WORKING = Torch(version="2.13.0", gloo=True)
FOLDER = Path("somewhere")


def with_gpus(number: int, nccl: bool = True) -> Torch:
    return Torch(version="2.13.0", cuda="13.0", gloo=True, nccl=nccl, gpus=("NVIDIA H100",) * number)


def version_of(**versions: str):
    def look_up(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    return look_up


def refuses() -> None:
    raise OSError(101, "Network is unreachable")


PACKAGES = [Requirement(text) for text in ("nbval>=0.11,<0.12", "rich>=13", "torch>=2.12", "old; python_version<'3'")]


@pytest.mark.parametrize(
    ("finding", "state", "words"),
    [
        (findings.python((3, 10, 4), "python3"), BAD, ("3.10.4", "3.11 or newer", "make lab PYTHON=")),
        (findings.torch(Torch(error="No module named 'torch'"), WANTED), BAD, ("No module named", "make lab")),
        (findings.torch(Torch(version="2.4.1+cu121", gloo=True), WANTED), BAD, ("2.4.1+cu121", ">=2.12")),
        (findings.packages(PACKAGES, version_of(nbval="0.12.1")), BAD, ("nbval is 0.12.1, not", "rich is missing")),
        (findings.gpus(WORKING, ["NVIDIA L4"], None), NOTE, ("1 NVIDIA GPU (NVIDIA L4)", "2.13.0 was built without")),
        (findings.gpus(Torch(cuda="13.0", complaint="The driver is too old"), ["L4"], None), NOTE, ("driver is too",)),
        (findings.gpus(WORKING, ["L4"], ""), NOTE, ('CUDA_VISIBLE_DEVICES is ""', "unset CUDA_VISIBLE_DEVICES")),
        (findings.gpus(with_gpus(2, nccl=False), [], None), NOTE, ("2 GPUs", "without NCCL")),
        (findings.cores(1), NOTE, ("1 core",)),
        (findings.memory(0.3 * GIB, 2 * GIB), BAD, ("322 MB free of 2.15 GB", "Shut Down All Kernels")),
        (findings.shared_memory(64 * 2**20, 2), BAD, ("67.1 MB", "too little for NCCL", "--shm-size=1g")),
        (findings.disk(0.5 * GIB, FOLDER), NOTE, ("537 MB", "somewhere")),
        (findings.loopback(refuses), BAD, ("Network is unreachable", "ip link set lo up")),
    ],
    ids=lambda value: f"{value.what}-{value.state}" if isinstance(value, Finding) else "",
)
def test_a_fault_is_named_with_its_remedy(finding: Finding, state: str, words: tuple[str, ...]) -> None:
    assert finding.state == state
    assert [word for word in words if word not in f"{finding.text} {finding.mend}"] == []
    assert finding.mend or finding.what == "cores"


@pytest.mark.parametrize(
    "finding",
    [
        *(findings.python(version, "python") for version in ((3, 11, 0), (3, 14, 1), (4, 0, 0))),
        findings.torch(WORKING, WANTED),
        findings.torch(Torch(version="2.13.0a0+git1", gloo=True), WANTED),
        findings.packages(PACKAGES, version_of(nbval="0.11.0", rich="15.0")),
        *(findings.gpus(seen, [], None) for seen in (WORKING, with_gpus(1), with_gpus(8))),
        findings.cores(2),
        findings.memory(4 * GIB, 8 * GIB),
        findings.shared_memory(GIB, 8),
        findings.shared_memory(None, 0),
        findings.disk(GIB, FOLDER),
        findings.loopback(findings.talk_to_itself),
    ],
    ids=lambda finding: finding.what,
)
def test_what_is_all_right_needs_no_remedy(finding: Finding) -> None:
    assert (finding.state, finding.mend) == (GOOD, "")


def test_no_chapter_launches_more_ranks_than_the_choice_of_the_device_assumes() -> None:
    paths = [*(ROOT / "solutions").glob("*.py"), *(ROOT / "tplab" / "course" / "exercises").rglob("*.py")]
    launches = r"\blaunch\(\w+, *(\d+)|^# %%ranks +(\d+)|^%%ranks +(\d+)"
    found = [re.findall(launches, path.read_text(encoding="utf-8"), re.MULTILINE) for path in paths]
    assert max(int("".join(numbers)) for each in found for numbers in each) == findings.COURSE_RANKS
    assert findings.COURSE_RANKS == devices.COURSE_RANKS
    assert f'requires-python = ">={".".join(map(str, findings.OLDEST))}"' in (ROOT / "pyproject.toml").read_text()
    assert {"torch", "jupyterlab", "nbval"} <= {requirement.name for requirement in findings.requirements()}


def test_a_containers_limit_is_the_memory_there_is(tmp_path: Path) -> None:
    for name, text in (("max", 2 * GIB), ("current", GIB), ("stat", f"anon 5\ninactive_file {GIB // 2}")):
        (tmp_path / f"memory.{name}").write_text(f"{text}\n")
    assert findings.memory_of(tmp_path) == (1.5 * GIB, 2 * GIB)
    (tmp_path / "memory.max").write_text("max\n")
    assert findings.memory_of(tmp_path)[1] == findings.memory_of(tmp_path / "none")[1] > 2 * GIB


def test_an_import_that_crashes_or_hangs_does_not_end_the_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    for code, says in (
        (f"import os; os.kill(os.getpid(), {int(signal.SIGSEGV)})", "signal 11"),
        ("import sys; sys.exit(3)", "status 3"),
        ("print('hello')", "hello"),
    ):
        with pytest.raises(RuntimeError, match=says):
            findings.ask(code, 60)
    with pytest.raises(RuntimeError, match="no answer after 1 seconds"):
        findings.ask("import time; time.sleep(600)", 1)
    monkeypatch.setattr(findings, "_TORCH", "raise OSError('libcudart.so: cannot open')")
    assert "libcudart.so" in findings.ask_torch().error


def test_nvidia_smi_that_fails_is_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    program = tmp_path / "nvidia-smi"
    for script, found in (("echo broken; exit 1", []), ("kill -9 $$", []), ('echo "NVIDIA L4"', ["NVIDIA L4"])):
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        assert findings.gpus_on_machine() == found


@pytest.mark.gpu
def test_gpus_of_this_machine() -> None:
    import torch

    seen = findings.ask_torch()
    assert len(seen.gpus) == torch.cuda.device_count()
    assert torch.cuda.get_device_name(0) in findings.gpus(seen, [], None).text


def test_a_launch_that_fails_or_adds_up_wrong_is_told(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    import tplab

    told = {"trials": [(1, "nccl", ""), (2, "gloo", "rank 1 died\nfor a reason")]}
    monkeypatch.setattr(findings, "ask", lambda code, timeout: told)
    failed = findings.ranks([(2, "auto")])
    assert (failed.state, "2 ranks can't be run" in failed.text, "rank 1 died" in failed.text) == (BAD, True, True)
    monkeypatch.setattr(tplab, "launch", lambda *_, **__: [(3.0, "gloo"), (2.0, "gloo")], raising=False)
    findings.main([(2, "auto")])
    told.update(json.loads(capsys.readouterr().out))
    assert "[3.0, 2.0]" in findings.ranks([(2, "auto")]).text
    monkeypatch.undo()
    monkeypatch.setattr(findings, "_TRIAL", "import sys; sys.exit(3) # {}")
    assert "status 3" in findings.ranks([(2, "auto")]).text


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor without its slow examinations."""
    monkeypatch.setattr(findings, "ask_torch", lambda: WORKING)
    monkeypatch.setattr(findings, "ranks", lambda tries: Finding("ranks", GOOD, "an all-reduce works"))


def test_what_is_bad_decides_the_exit_code(quick, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    path = tiny.make_unexecuted(tmp_path, tiny.source(1))
    assert cli.main(["doctor", "--root", str(tmp_path)]) == 0
    path.write_text("{")
    assert cli.main(["doctor", "--root", str(tmp_path)]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert f"1 to mend: {path.name}." in said
    assert "→ tplab reset 90" in said
    monkeypatch.setattr(findings, "ask_torch", lambda: Torch(error="No module named 'torch'"))
    assert cli.main(["doctor", "--root", str(tmp_path), "--json"]) == 1
    found = {one["what"]: one["state"] for one in json.loads(capsys.readouterr().out)}
    assert (found["PyTorch"], "ranks" in found) == (BAD, False)


def test_all_is_well_here(capsys) -> None:
    """The real thing: also the proof that this machine can run the tests of the course."""
    code = cli.main(["doctor", "--root", str(ROOT)])
    out = capsys.readouterr().out
    assert (code, "an all-reduce works: 2 ranks over" in " ".join(out.split())) == (0, True), out


@pytest.mark.parametrize(("status", "state"), [(0, GOOD), (1, BAD)])
def test_the_gpu_check_says_in_its_last_line_what_it_found(status: int, state: str, tmp_path: Path) -> None:
    assert "sees no GPU" in doctor.check_gpus(tmp_path, WORKING, tmp_path).text
    assert "--root FOLDER" in doctor.check_gpus(tmp_path, with_gpus(1), tmp_path).mend
    folder = tmp_path / "benchmarks" / "gpu_check"
    folder.mkdir(parents=True)
    program = f"import os, sys; print('first'); print('last', *map(os.path.basename, sys.argv)); sys.exit({status})"
    (folder / "__main__.py").write_text(program)
    for package in (folder, folder.parent):
        (package / "__init__.py").touch()
    found = doctor.check_gpus(tmp_path, with_gpus(2), tmp_path)
    assert (found.state, found.text) == (
        state, f"last __main__.py --seconds {doctor.SECONDS} --report {doctor.REPORT}"
    )  # fmt: skip
