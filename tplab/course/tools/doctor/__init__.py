"""`tplab doctor`: will the course run here, and if not, what fixes it?

    findings    what the doctor examines, and what it says about each thing

With `--gpu`, it runs the GPU check of a clone (benchmarks/gpu_check) for five minutes, with a report to send us, which
doesn't contain this machine's host name, user name or paths. The exit code is 0 if nothing is wrong, and 1 if
something is.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tplab.course.learner.course_files import add_root, course_or_material
from tplab.course.notebooks.reference import MATERIAL
from tplab.course.tools.doctor import findings
from tplab.course.tools.doctor.findings import BAD, GOOD, NOTE, Finding, Torch

LOOK = {GOOD: ("✓", "green"), NOTE: ("!", "yellow"), BAD: ("✗", "red")}
REPORT = "tplab-gpu-report.md"
SECONDS = 285  # so that the report is ready within five minutes
_NAME = 13  # width of the name column, in characters


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "doctor",
        help="will the course run here, and what mends it",
        description="Examine this machine: what is wrong, and the command that mends it.",
    )
    parser.add_argument("--json", action="store_true", help="for another program")
    parser.add_argument("--gpu", action="store_true", help="check the GPUs (five minutes), and write a report")
    add_root(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    if options.gpu:
        with console.status("checking the GPUs, for five minutes at most"):
            finding = check_gpus(options.root or MATERIAL, findings.ask_torch(), Path.cwd())
        show(console, finding)
        return int(finding.state != GOOD)
    found: list[Finding] = []
    with console.status("looking at this machine"):
        for finding in findings.examine(course_or_material(options)):
            found.append(finding)
            if not options.json:
                show(console, finding)
    bad = [finding.what for finding in found if finding.state == BAD]
    if options.json:
        print(json.dumps([asdict(finding) for finding in found], indent=1, ensure_ascii=False))
    else:
        last = f"{len(bad)} to mend: {', '.join(bad)}." if bad else "Nothing is wrong: every chapter will run here."
        console.print(Text(f"\n{last}", style="bold"))
    return int(bool(bad))


def show(console: Console, finding: Finding) -> None:
    mark, color = LOOK[finding.state]
    line = Table.grid(expand=True, padding=(0, 1))
    line.add_column(width=1)
    line.add_column(width=_NAME)
    line.add_column(ratio=1)
    text = Text(finding.text, style="" if finding.state == GOOD else color)
    line.add_row(Text(mark, style=color), finding.what, text)
    console.print(line)
    if finding.mend:
        console.print(Padding(Text(f"→ {finding.mend}", style="bold"), (0, 0, 0, _NAME + 3)))


def check_gpus(root: Path, seen: Torch, folder: Path) -> Finding:
    """Run the GPU check, which writes the report to `folder`, and return the finding about it."""
    if not seen.gpus:
        return Finding("GPU check", BAD, seen.error or "PyTorch sees no GPU here", "tplab doctor says why")
    if not (root / "benchmarks" / "gpu_check").is_dir():
        text = f"the tests and benchmarks aren't in {root}"
        return Finding("GPU check", BAD, text, "run this in a clone of the course, or add --root FOLDER")
    if not all(importlib.util.find_spec(name) for name in ("pytest", "pytest_timeout")):
        return Finding("GPU check", BAD, "pytest isn't installed", "pip install pytest pytest-timeout")
    command = ["-m", "benchmarks.gpu_check", "--seconds", str(SECONDS), "--report", str(folder / REPORT)]
    done = subprocess.run(
        [sys.executable, *command], cwd=root, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace",
    )  # fmt: skip
    last = (done.stdout.strip().splitlines() or [f"it ended with status {done.returncode} and printed nothing"])[-1]
    if done.returncode == 0:
        return Finding("GPU check", GOOD, last)
    return Finding("GPU check", BAD, last, "open an issue and attach the report, so that we can fix it")
