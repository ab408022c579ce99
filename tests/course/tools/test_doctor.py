"""`tplab doctor`: each fault is found, named and given a remedy; a machine without fault is told so, GPU or not."""

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from packaging.requirements import Requirement

from tests import ROOT
from tests.course import tiny
from tplab.course.learner.course_files import all_chapters, course_at
from tplab.course.tools import cli
from tplab.course.tools.doctor import chapters, gpu_report, gpus, machine, probe, software, trial
from tplab.course.tools.doctor.findings import BAD, GOOD, NOTE, Finding
from tplab.runtime import devices

TORCH = Requirement("torch>=2.12")
GIB = 2**30
WORKING = probe.Torch(version="2.13.0", gloo=True)
H100 = probe.Gpu("NVIDIA H100", 80 * GIB, 79 * GIB)


def with_gpus(number: int, reach: bool = True, nccl: bool = True) -> probe.Torch:
    peers = [[reach or a == b for b in range(number)] for a in range(number)]
    return probe.Torch(version="2.13.0", cuda="13.0", gloo=True, nccl=nccl, gpus=(H100,) * number, peers=peers)


def bad(finding: Finding, *words: str) -> None:
    """It is a fault, it says so in these words, and it names what mends it."""
    assert finding.state == BAD
    for word in words:
        assert word in finding.text + " " + finding.mend
    assert finding.mend


# Software


def test_python_too_old():
    bad(software.python((3, 10, 4), "/usr/bin/python3"), "3.10.4", "3.11 or newer", "make lab PYTHON=")
    for version in ((3, 11, 0), (3, 14, 1), (4, 0, 0)):
        assert software.python(version, "python").state == GOOD


def test_the_oldest_python_is_the_one_that_the_package_asks_for():
    text = (ROOT / "pyproject.toml").read_text()
    assert f'requires-python = ">={".".join(map(str, software.OLDEST))}"' in text


def test_torch_missing_or_broken():
    seen = probe.Torch(error="ModuleNotFoundError: No module named 'torch'")
    bad(software.torch(seen, TORCH), "can't be imported", "No module named 'torch'", "make lab")


def test_torch_out_of_range():
    bad(software.torch(probe.Torch(version="2.4.1+cu121", gloo=True), TORCH), "2.4.1+cu121", ">=2.12")
    assert software.torch(WORKING, TORCH).state == GOOD
    assert software.torch(probe.Torch(version="2.13.0a0+git1", gloo=True), TORCH).state == GOOD


def test_torch_without_gloo():
    bad(software.torch(probe.Torch(version="2.13.0", gloo=False), TORCH), "without gloo")


def version_of(**versions):
    def look_up(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    return look_up


def test_packages_missing_and_out_of_range():
    needed = [Requirement(text) for text in ("nbval>=0.11,<0.12", "rich>=13", "torch>=2.12", "old; python_version<'3'")]
    bad(software.packages(needed, version_of(nbval="0.12.1")), "nbval is 0.12.1, not", "rich is missing", "make lab")
    found = software.packages(needed, version_of(nbval="0.11.0", rich="15.0"))
    assert (found.state, found.text.split()[0]) == (GOOD, "2")


def test_requirements_are_those_of_the_project():
    names = {requirement.name for requirement in software.requirements()}
    assert {"torch", "jupyterlab", "nbval"} <= names
    assert "pytest-xdist" not in names


def test_kernel_of_another_python():
    mine = "/home/me/course/.venv/bin/python"
    bad(
        software.kernel(["/home/me/other/bin/python", "-m"], mine),
        "another Python: /home/me/other",
        "ipykernel install",
    )
    bad(software.kernel(None, mine), "no kernel called python3", "ipykernel install --sys-prefix")
    bad(software.kernel([], mine), "another Python")
    for own in (mine, mine + "3.11", "python", "python3"):
        assert software.kernel([own, "-m", "ipykernel_launcher"], mine).state == GOOD


def test_two_environments_of_one_python_are_told_apart(tmp_path):
    """In each environment `python` is a link to the same file."""
    paths = []
    for name in ("one", "two"):
        (tmp_path / name / "bin").mkdir(parents=True)
        paths.append(str(tmp_path / name / "bin" / "python"))
        os.symlink(sys.executable, paths[-1])
    bad(software.kernel([paths[0]], paths[1]), paths[0])
    assert software.kernel([paths[0]], paths[0]).state == GOOD


def test_the_kernel_is_looked_up_as_jupyterlab_does(tmp_path, monkeypatch):
    spec = tmp_path / "share" / "jupyter" / "kernels" / "python3" / "kernel.json"
    spec.parent.mkdir(parents=True)
    spec.write_text(json.dumps({"argv": ["/somewhere/python", "-m", "x"], "display_name": "P", "language": "python"}))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert software.kernel_argv() == ["/somewhere/python", "-m", "x"]


def test_jupyterlab_missing():
    bad(software.jupyterlab(None), "not installed")
    assert software.jupyterlab("4.4.0").state == GOOD


# What PyTorch is asked


def test_probe_sees_the_torch_of_this_python():
    import torch

    seen = probe.ask_torch()
    assert (seen.error, seen.version, seen.gloo) == ("", torch.__version__, True)
    assert len(seen.gpus) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import no_such_package", "No module named 'no_such_package'"),
        ("raise OSError('libcudart.so: cannot open')", "libcudart.so"),
        (f"import os; os.kill(os.getpid(), {int(signal.SIGSEGV)})", "ended by signal 11"),
        ("import sys; sys.exit(3)", "status 3"),
        ("print('hello')", "nobody understands"),
        ("", "nobody understands"),
    ],
)
def test_an_import_that_crashes_does_not_end_the_doctor(code, says):
    assert says in probe.ask_torch(code).error


def test_an_import_that_hangs_ends():
    start = time.monotonic()
    assert "no answer after 1 seconds" in probe.ask_torch("import time; time.sleep(600)", timeout=1).error
    assert time.monotonic() - start < 60


# GPUs


def test_without_a_gpu_all_is_well_and_little_is_said():
    found = gpus.devices(WORKING, [], None)
    assert (found.state, found.mend) == (GOOD, "")
    assert gpus.links([], "") is None
    assert gpus.backend(WORKING).text == "gloo, on the CPU, for any number of ranks"
    assert gpus.backend(WORKING).state == GOOD


def test_gpus_with_their_memory():
    found = gpus.devices(with_gpus(2), ["NVIDIA H100"] * 2, None)
    assert found.state == GOOD
    assert found.text == "0: NVIDIA H100, 85.9 GB, 84.8 GB free; 1: NVIDIA H100, 85.9 GB, 84.8 GB free"
    assert gpus.backend(with_gpus(1)).text.startswith("gloo, on the CPU, because the course launches up to 8 ranks")
    assert "The capstone uses NCCL for up to 1 rank. " in gpus.backend(with_gpus(1)).text
    assert gpus.backend(with_gpus(8)).text == "NCCL, one GPU per rank, for up to 8 ranks"


@pytest.mark.parametrize(
    ("seen", "visible", "says", "mend"),
    [
        (WORKING, None, "2.13.0 was built without CUDA", "pytorch.org"),
        (
            probe.Torch(version="2", cuda="13.0", complaint="The NVIDIA driver is too old"),
            None,
            "too old",
            "pytorch.org",
        ),
        (probe.Torch(version="2", cuda="13.0"), None, "can't start CUDA", "pytorch.org"),
        (WORKING, "", 'CUDA_VISIBLE_DEVICES is ""', "unset CUDA_VISIBLE_DEVICES"),
    ],
)
def test_a_gpu_that_torch_does_not_see_is_worth_a_note(seen, visible, says, mend):
    found = gpus.devices(seen, ["NVIDIA L4"], visible)
    assert found.state == NOTE
    assert says in found.text
    assert "1 NVIDIA GPU (NVIDIA L4)" in found.text
    assert mend in found.mend


def test_gpus_without_nccl_are_worth_a_note():
    assert gpus.backend(with_gpus(2, nccl=False)).state == NOTE


# As nvidia-smi prints it on four GPUs in two pairs; the heading is underlined on a terminal
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV12\tSYS\tSYS\tPXB\t0-31\t0\t\tN/A
GPU1\tNV12\t X \tSYS\tSYS\tSYS\t0-31\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tNV12\tSYS\t32-63\t1\t\tN/A
GPU3\tSYS\tSYS\tNV12\t X \tSYS\t32-63\t1\t\tN/A
NIC0\tPXB\tSYS\tSYS\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def test_links_are_read_from_the_topology():
    assert gpus.parse_topology(TOPOLOGY)[0] == ["X", "NV12", "SYS", "SYS"]
    found = gpus.links(with_gpus(4).peers, TOPOLOGY)
    assert found
    assert found.text == "0-1, 2-3: NVLink, 12 links; 0-2, 0-3, 1-2, 1-3: across two CPUs"
    pair = "\tGPU0\tGPU1\nGPU0\t X \tNV1\nGPU1\tNV1\t X \n"
    found = gpus.links(with_gpus(2).peers, pair)
    assert found
    assert found.text == "every pair: NVLink, 1 link"


@pytest.mark.parametrize("text", ["", "Failed to initialize NVML", "\tGPU0\nGPU0\t X \n", TOPOLOGY[:150], "GPU0 GPU1"])
def test_without_a_topology_torch_says_which_gpus_reach_each_other(text):
    assert gpus.parse_topology(text) == []
    found = gpus.links(with_gpus(2).peers, text)
    assert found
    assert found.text == "every pair: memory reached directly"
    apart = gpus.links(with_gpus(2, reach=False).peers, text)
    assert apart
    assert apart.text.startswith("every pair: through the main memory. ")
    assert "NCCL sends through the main memory" in apart.text


@pytest.mark.parametrize("script", ["exit 9", "echo broken; exit 1", "kill -9 $$"])
def test_nvidia_smi_that_fails_is_as_none(script, tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert gpus.nvidia_smi("topo", "-m") == ""
    program.write_text('#!/bin/sh\necho "NVIDIA L4"\n')
    assert gpus.nvidia_smi("-L") == "NVIDIA L4\n"


@pytest.mark.gpu
def test_gpus_of_this_machine():
    import torch

    found = {finding.what: finding for finding in gpus.look(probe.ask_torch())}
    for number in range(torch.cuda.device_count()):
        assert torch.cuda.get_device_name(number) in found["GPUs"].text
    assert "NCCL" in found["backend"].text
    assert ("links" in found) == (torch.cuda.device_count() > 1)


@pytest.fixture
def clone(tmp_path):
    """clone(status) writes a clone of the course whose GPU check prints two lines and ends with this status."""

    def write(status):
        folder = tmp_path / "course" / "benchmarks" / "gpu_check"
        folder.mkdir(parents=True)
        program = f"import os, sys; print('first'); print('last', *map(os.path.basename, sys.argv)); sys.exit({status})"
        (folder / "__main__.py").write_text(program)
        for package in (folder, folder.parent):
            (package / "__init__.py").touch()
        return tmp_path / "course"

    return write


@pytest.mark.parametrize(("status", "state"), [(0, GOOD), (1, BAD)])
def test_the_gpu_check_says_in_its_last_line_what_it_found(status, state, clone, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(probe, "ask_torch", lambda: with_gpus(2))
    assert cli.main(["doctor", "--gpu", "--root", str(clone(status))]) == int(state != GOOD)
    said = " ".join(capsys.readouterr().out.split())
    assert f"last __main__.py --seconds {gpu_report.SECONDS} --report {gpu_report.REPORT}" in said
    assert "first" not in said


def test_without_gpus_or_a_clone_there_is_no_gpu_report(clone, tmp_path):
    bad(gpu_report.look(clone(0), WORKING, tmp_path), "sees no GPU", "tplab doctor says why")
    bad(gpu_report.look(tmp_path, with_gpus(1), tmp_path), "aren't in", "--root FOLDER")


# The machine


def test_tiny_shared_memory():
    assert machine.shared_memory(64 * 2**20, gpus=0).state == NOTE
    bad(machine.shared_memory(64 * 2**20, gpus=2), "67.1 MB", "too little for NCCL", "--shm-size=1g")
    assert machine.shared_memory(GIB, gpus=8).state == GOOD
    assert machine.shared_memory(None, gpus=0).state == GOOD


def test_too_little_memory():
    bad(machine.memory(0.3 * GIB, 2 * GIB), "322 MB free of 2.15 GB", "Shut Down All Kernels")
    assert machine.memory(4 * GIB, 8 * GIB).state == GOOD


def test_a_containers_limit_is_the_memory_there_is(tmp_path):
    for name, text in (("max", 2 * GIB), ("current", GIB), ("stat", f"anon 5\ninactive_file {GIB // 2}")):
        (tmp_path / f"memory.{name}").write_text(f"{text}\n")
    assert machine.memory_of(tmp_path) == (1.5 * GIB, 2 * GIB)
    whole = machine.memory_of(tmp_path / "none")
    assert whole[1] > 2 * GIB
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.memory_of(tmp_path)[1] == whole[1]


def test_no_loopback():
    def refuses():
        raise OSError(101, "Network is unreachable")

    bad(machine.loopback(["eth0"], lambda: None), "no interface lo", "eth0", "ip link set lo up")
    bad(machine.loopback(["lo", "eth0"], refuses), "Network is unreachable", "ip link set lo up")
    assert machine.loopback(["eth0", "lo0"], lambda: None).state == GOOD
    machine.talk_to_itself()


def test_one_core_is_worth_a_note():
    assert machine.cores(1).state == NOTE
    assert machine.cores(2).state == GOOD


# Ranks


def test_launch_that_fails():
    failed = trial.judge([trial.Trial(1, "nccl", 1.0, True), trial.Trial(2, error="rank 1 died\nfor a reason")])
    bad(failed, "2 ranks can't be run", "rank 1 died", "doctor.trial")
    bad(trial.judge([trial.Trial(2, "gloo", 1.0, right=False)]), "wrong numbers over gloo")
    assert trial.judge([trial.Trial(2, "gloo", 1.0, right=True)]).state == GOOD


def test_what_is_tried_covers_both_backends():
    course, one, two = (2, "auto"), (1, "nccl"), (2, "nccl")
    expected = {0: [course], 1: [course, one], 2: [course, two], 7: [course, two], 8: [course]}
    assert {number: trial.tries(number) for number in expected} == expected


def test_no_chapter_launches_more_ranks_than_the_choice_of_the_device_assumes():
    most = {files.number: max(chapters._ranks(files), default=0) for files in all_chapters(course_at(ROOT)).values()}
    assert max(most.values()) == chapters.COURSE_RANKS == devices.COURSE_RANKS, most


def test_two_real_ranks_add_up():
    tried = trial.attempt([(2, "auto")])
    assert [(one.ranks, one.right, one.error) for one in tried] == [(2, True, "")]
    assert tried[0].backend in ("gloo", "nccl")


def test_a_launch_that_really_fails_is_told(monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    bad(trial.judge(trial.attempt([(2, "auto")])), "2 ranks can't be run", "torchrun started 3")


def test_a_trial_that_crashes_is_told(monkeypatch):
    monkeypatch.setattr(trial, "_TRY", "import sys; sys.exit(3) # {}")
    bad(trial.judge(trial.attempt([(2, "auto")])), "2 ranks can't be run", "status 3")


def test_a_launch_that_gives_wrong_sums_is_told(monkeypatch, capsys):
    import tplab.runtime

    monkeypatch.setattr(tplab.runtime, "launch", lambda *_, **__: [(3.0, "gloo"), (2.0, "gloo")])
    trial.main([(2, "auto")])
    told = json.loads(capsys.readouterr().out)["trials"]
    assert trial.judge([trial.Trial(**one) for one in told]).state == BAD


# Chapters


def test_the_ranks_of_a_chapter_are_read_from_its_code():
    assert chapters.ranks_of(["x = 1", "def launched(): ..."]) == set()
    assert chapters.ranks_of(["launch(f, 8)\n", "x"]) == {1, 2, 4, 8}
    assert chapters.ranks_of(["%%ranks 3\nx"]) == {1, 2, 3, 4}
    assert chapters.ranks_of(["run_ranks(f, p)"]) == {1, 2, 4}
    assert chapters.ranks_of(["check_cases(number, answer, CASES)"]) == {1, 2, 4}


def test_how_a_chapter_runs():
    assert chapters.how({1, 2, 4}, 0) == chapters.how({1, 2, 4}, 7) == "runs; 1, 2, 4 ranks over gloo"
    assert chapters.how({1, 2, 4}, 8) == "runs; 1, 2, 4 ranks over NCCL"
    assert "without ranks" in chapters.how(set(), 8)


def test_a_chapter_is_held_up_by_what_it_needs():
    assert chapters.judge("chapter 02", {1, 2}, 0, ["loopback"], "", 2).text == "will not run: first mend loopback"
    assert chapters.judge("chapter 00", set(), 0, ["loopback"], "", 0).state == GOOD
    assert chapters.judge("chapter 00", set(), 0, ["PyTorch"], "", 0).state == BAD
    bad(chapters.judge("chapter 02", {1, 2}, 0, [], "it is cut short", 2), "cut short", "tplab reset 2")


def test_every_name_that_holds_up_a_chapter_is_one_that_is_found():
    names = {finding.what for finding in (*software.look(WORKING), *gpus.look(WORKING), *machine.look(0))}
    assert set(chapters.EVERYTHING) - {"ranks"} <= names
    assert trial.judge([]).what == "ranks"


# The command


def test_all_is_well_here(capsys):
    """The real thing: also the proof that this machine can run the tests of the course."""
    code = cli.main(["doctor", "--root", str(ROOT)])
    out = capsys.readouterr().out
    assert (code, "Nothing is wrong" in out) == (0, True), out
    assert "chapter 02" in out
    assert "an all-reduce works: " in out


@pytest.fixture
def quick(monkeypatch):
    """The doctor without its slow examinations."""
    monkeypatch.setattr(probe, "ask_torch", lambda: WORKING)
    monkeypatch.setattr(trial, "attempt", lambda sizes: [trial.Trial(2, "gloo", 1.0, True)])
    monkeypatch.setattr(software, "kernel_argv", lambda: ["python"])


def test_faults_decide_the_exit_code_and_stand_with_their_remedy(quick, tmp_path, monkeypatch, capsys):
    path = tiny.make_unexecuted(tmp_path, tiny.source(1))
    assert cli.main(["doctor", "--root", str(tmp_path)]) == 0
    assert "Nothing is wrong" in capsys.readouterr().out

    path.write_text("{")
    assert cli.main(["doctor", "--root", str(tmp_path)]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "This machine is all right; to mend: chapter 90." in out
    assert "→ tplab reset 90" in out

    monkeypatch.setattr(trial, "attempt", lambda sizes: [trial.Trial(2, error="no route")])
    monkeypatch.setattr(chapters, "_ranks", lambda files: {1, 2})
    assert cli.main(["doctor", "--root", str(tmp_path)]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "2 ranks can't be run: no route" in out
    assert "will not run: first mend ranks" in out
    assert "1 to mend: ranks." in out


def test_without_torch_no_ranks_are_tried_and_no_chapter_runs(quick, tmp_path, monkeypatch, capsys):
    tiny.make_unexecuted(tmp_path, tiny.source(1))
    monkeypatch.setattr(probe, "ask_torch", lambda: probe.Torch(error="No module named 'torch'"))
    monkeypatch.setattr(trial, "attempt", None)
    assert cli.main(["doctor", "--root", str(tmp_path), "--json"]) == 1
    found = {one["what"]: one for one in json.loads(capsys.readouterr().out)}
    assert found["PyTorch"]["state"] == BAD
    assert found["chapter 90"]["text"] == "will not run: first mend PyTorch"
    assert "ranks" not in found


def test_doctor_itself_imports_no_torch():
    program = "import sys; import tplab.course.tools.doctor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
