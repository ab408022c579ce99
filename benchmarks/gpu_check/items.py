"""What is run, in order of worth: first what has never run on a real GPU (the table in GPU.md), then measurements."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]
Where = Literal["gpu", "emulated", "cpu"]  # the last two are rehearsals

SHARED = {"TPLAB_BACKEND": "nccl", "TPLAB_SHARE_GPUS": "1"}
WORDS_OF_NCCL = {"NCCL_DEBUG": "WARN"}  # NCCL says why it fails, and a failed test shows what it printed
EACH = 60  # seconds that a single test may take, so that one that hangs leaves time for the others
MODULES_OF_PROGRAMS = ("cloudpickle", "psutil", "yaml", "tokenizers")
MODULES_OF_TESTS = ("pytest", "pytest_timeout", *MODULES_OF_PROGRAMS)
MODULES_OF_CHAPTERS = ("pytest", "nbval", "nbformat", "nbclient", "ipykernel", "jupytext", "rich")


@dataclass(frozen=True)
class Item:
    """A program that runs in a process of its own.

    command    what follows `python`
    limit      how many seconds it may take
    modules    what it imports, apart from tplab and PyTorch
    says       what a successful run prints; if every test is skipped, nothing has " passed"
    """

    name: str
    command: tuple[str, ...]
    limit: float
    environment: dict[str, str] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    says: str = ""


def items(where: Where, gpus: int) -> list[Item]:
    """Return the items for a machine with so many GPUs, in order of worth. A rehearsal runs them on small sizes."""
    is_real = where == "gpu"
    patience = 1 if is_real else 5  # a rehearsal looks for mistakes, also on a busy laptop

    def tests(name: str, limit: float, *selected: str) -> Item:
        how = ("-v", "-rs", "-m", "gpu", "-p", "no:cacheprovider", "--tb=short", f"--timeout={patience * EACH}")
        command = ("-m", "pytest", *how, *selected)
        says = "" if where == "cpu" else " passed"
        return Item(name, command, patience * limit, WORDS_OF_NCCL, MODULES_OF_TESTS, says)

    def program(name: str, limit: float, *command: str) -> Item:
        small = () if is_real else ("--small",)
        return Item(name, ("-m", *command, *small), patience * limit, modules=MODULES_OF_PROGRAMS)

    def chapter(stem: str, limit: float) -> Item:
        number = int(stem[:2])
        which = () if is_real else ("--exercise", f"{number}.1")
        command = ("-m", "tplab", "check", str(number), "--notebook", f"solutions/{stem}.ipynb", "--root", ".", *which)
        environment = {} if where == "cpu" else SHARED
        name = f"reference answers of chapter {number:02d}"
        return Item(name, command, patience * limit, environment, modules=MODULES_OF_CHAPTERS)

    profile = () if where == "emulated" else ("--profile",)  # emulated GPUs have neither a profiler nor Triton
    found = [
        tests("a ring exchange with a skipped send", 90, "tests/gpu/test_failures.py", "-k", "ring"),
        tests("pipelines on 2, 3, 4 and 8 ranks", 150, "tests/gpu/test_pipelines.py"),
        tests("grids of 8 ranks", 120, "tests/gpu/test_grids.py"),
        chapter("03_conjugate_operators", 75),
        chapter("05_parallel_mlp", 75),
        program("a step beside plain PyTorch", 120, "benchmarks.gpu", *profile),
        *([program("a compiled step", 150, "benchmarks.gpu", "--compile")] if where != "emulated" else ()),
        program("constants of the cost model", 90, "benchmarks.gpu_constants"),
        chapter("08_vocab_parallel_loss", 75),
        chapter("12_sequence_parallel", 75),
        tests("runs that continue with another grid", 120, "tests/gpu/test_capstone.py", "-k", "another_grid"),
        tests("ranks that wait forever", 120, "tests/gpu/test_failures.py", "-k", "not ring"),
        tests("all layers", 180, "tests/gpu/test_layers.py"),
        tests("kernel traces, waiting ranks, compiled layers", 120, "tests/gpu/test_tools.py"),
        tests("the capstone", 180, "tests/gpu/test_capstone.py", "-k", "not another_grid"),
        tests("other tests", 90, "tests/gpu/test_updates.py", "tests/runtime", "tests/tensor", "tests/cost",
              "tests/course/commands/test_doctor.py"),
    ]  # fmt: skip
    if gpus > 1:  # NCCL between GPUs has never been tried either
        between = ("tests/gpu/test_layers.py", "tests/gpu/test_tools.py", "tests/gpu/test_capstone.py")
        found.insert(0, tests("several GPUs", 120, *between, "-k", "GPUs and NCCL and not share"))
    return found
