"""`tplab doctor`: will the course run here, and if not, what fixes it?

    probe      what PyTorch reports about the machine, from a separate process
    software   Python, packages, PyTorch, JupyterLab, the kernel
    gpus       GPUs, their links, the backend
    machine    cores, memory, shared memory, loopback
    trial      a real launch of two ranks with an all-reduce
    chapters   whether each chapter will run, and how
    gpu_report `tplab doctor --gpu`: tests and measurements on this machine's GPUs

The exit code is 0 if nothing is wrong, and 1 if something is.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tplab.course.learner.course_files import Course, add_root, course_or_material
from tplab.course.notebooks.reference import MATERIAL
from tplab.course.tools.doctor import chapters, gpu_report, gpus, machine, probe, software, trial
from tplab.course.tools.doctor.findings import BAD, GOOD, NOTE, Finding

LOOK = {GOOD: ("✓", "green"), NOTE: ("!", "yellow"), BAD: ("✗", "red")}
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
            finding = gpu_report.look(options.root or MATERIAL, probe.ask_torch(), Path.cwd())
        show(console, finding)
        return int(finding.state != GOOD)
    course = course_or_material(options)
    found: list[Finding] = []
    if options.json:
        found.extend(examine(course))
        print(json.dumps([asdict(finding) for finding in found], indent=1, ensure_ascii=False))
    else:
        with console.status("looking at this machine"):
            for finding in examine(course):
                show(console, finding)
                found.append(finding)
        console.print(Text("\n" + summary(found), style="bold"))
    return int(any(finding.state == BAD for finding in found))


def examine(course: Course) -> Iterator[Finding]:
    """Yield each finding as soon as it is available."""
    seen = probe.ask_torch()
    found = [*software.look(seen), *gpus.look(seen), *machine.look(len(seen.gpus))]
    yield from found
    if not seen.error:
        found.append(trial.judge(trial.attempt(trial.tries(len(seen.gpus) if seen.nccl else 0))))
        yield found[-1]
    yield from chapters.look(course, seen, found)


def show(console: Console, finding: Finding) -> None:
    mark, colour = LOOK[finding.state]
    line = Table.grid(expand=True, padding=(0, 1))
    line.add_column(width=1)
    line.add_column(width=_NAME)
    line.add_column(ratio=1)
    line.add_row(
        Text(mark, style=colour), finding.what, Text(finding.text, style="" if finding.state == GOOD else colour)
    )
    console.print(line)
    if finding.mend:
        console.print(Padding(Text(f"→ {finding.mend}", style="bold"), (0, 0, 0, _NAME + 3)))


def summary(found: list[Finding]) -> str:
    """Return the last line, which sums up the findings."""
    bad = [finding.what for finding in found if finding.state == BAD and not finding.what.startswith("chapter")]
    notebooks = [finding.what for finding in found if finding.state == BAD and finding.what.startswith("chapter")]
    if bad:
        return f"{len(bad)} to mend: {', '.join(bad)}."
    if notebooks:
        return f"This machine is all right; to mend: {', '.join(notebooks)}."
    return "Nothing is wrong: every chapter will run here."
