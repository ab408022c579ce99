"""Findings about each chapter: whether it will run here, on how many ranks, and over which backend."""

import re

from tplab.course.learner.course_files import ChapterFiles, Course, all_chapters
from tplab.course.notebooks.cells import Unreadable, read_notebook
from tplab.course.notebooks.kernels import PACKAGE_ROOT
from tplab.course.notebooks.numbering import START_NUMBER, argument, package
from tplab.course.tools.doctor.findings import BAD, GOOD, Finding
from tplab.course.tools.doctor.probe import Torch

# Findings that must not be bad if a chapter is to run, for chapters that start ranks and for those that don't
EVERYTHING = ("Python", "PyTorch", "packages", "kernel", "memory", "shared memory", "loopback", "ranks")
WITHOUT_RANKS = ("Python", "PyTorch", "packages", "kernel")
_STARTS = re.compile(r"\b(launch|run_ranks|check_cases)\(|^%%ranks\b", re.MULTILINE)
_NUMBERS = re.compile(r"\blaunch\(\w+, *(\d+)|^%%ranks +(\d+)", re.MULTILINE)
COURSE_RANKS = 8  # the most ranks that a chapter launches; with at least this many GPUs, the course uses NCCL
CHECKED = {1, 2, 4}  # the world sizes that every check uses


def ranks_of(texts: list[str]) -> set[int]:
    """Return the world sizes that a chapter launches, according to its code. The set is empty if it starts no ranks."""
    if not any(_STARTS.search(text) for text in texts):
        return set()
    return CHECKED | {int(a or b) for text in texts for a, b in _NUMBERS.findall(text)}


def how(ranks: set[int], gpus: int) -> str:
    """Describe how a chapter runs, as in "runs; 1, 2, 4 ranks over gloo"."""
    if not ranks:
        return "runs in the notebook itself, without ranks"
    return f"runs; {', '.join(map(str, sorted(ranks)))} ranks over {'NCCL' if gpus >= COURSE_RANKS else 'gloo'}"


def judge(name: str, ranks: set[int], gpus: int, bad: list[str], unreadable: str, number: int) -> Finding:
    """Return the finding about a chapter.

    bad:        what is wrong with the machine
    unreadable: why the learner's notebook can't be read, or ""
    """
    needed = EVERYTHING if ranks else WITHOUT_RANKS
    if blocked := [what for what in bad if what in needed]:
        return Finding(name, BAD, f"will not run: first mend {', '.join(blocked)}")
    if unreadable:
        return Finding(name, BAD, unreadable, f"tplab reset {argument(number)} (it keeps a copy of what is there)")
    return Finding(name, GOOD, how(ranks, gpus))


def look(course: Course, seen: Torch, findings: list[Finding]) -> list[Finding]:
    """Return a finding for every chapter of the course."""
    bad = [finding.what for finding in findings if finding.state == BAD]
    gpus = len(seen.gpus) if seen.nccl else 0
    return [
        judge(_name(files), _ranks(files), gpus, bad, _unreadable(files), files.number)
        for files in all_chapters(course).values()
    ]


def _name(files: ChapterFiles) -> str:
    return "start page" if files.number == START_NUMBER else f"chapter {files.number:02d}"


def _ranks(files: ChapterFiles) -> set[int]:
    folder = PACKAGE_ROOT / "tplab" / "course" / "exercises" / package(files.number)
    cells = [cell.source for cell in read_notebook(files.reference) if cell.kind == "code"]
    return ranks_of([*cells, *(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py")))])


def _unreadable(files: ChapterFiles) -> str:
    try:
        read_notebook(files.learner)
    except Unreadable as error:
        return str(error)
    return ""
