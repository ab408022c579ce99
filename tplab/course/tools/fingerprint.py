"""Compute fingerprints of what a verdict depends on: the code that ran for an exercise, and the code that checked it.

answer    the cells that `tplab check --exercise` runs for it (the answer, the earlier answers and helper cells that it
          uses, and added cells that change modules, paths or the environment), and Python files next to the notebook.
          Experiments in cells that the exercise doesn't use make no difference
check     the check cell, the expected result, all tplab files that the chapter's checks need, and tplab's version
output    the output of the check cell in the notebook, used only to distinguish old outputs from new ones

If the answer or the check changes, an earlier verdict no longer applies.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import tplab
from tplab.common.imports import ImportGraph
from tplab.course.grade.answers import merge
from tplab.course.grade.check_notebook import exercises_of
from tplab.course.grade.needs import select
from tplab.course.learner.course_files import ChapterFiles
from tplab.course.notebooks.cells import Cell
from tplab.course.notebooks.kernels import PACKAGE_ROOT
from tplab.course.notebooks.numbering import package
from tplab.course.tools.saved_outputs import results, their_cell


@dataclass(frozen=True)
class Fingerprint:
    answer: str
    check: str
    output: str


def fingerprints(reference: list[Cell], learner: list[Cell], files: ChapterFiles) -> dict[str, Fingerprint]:
    """Return the fingerprint of every exercise that has an answer in the learner's notebook."""
    merged = merge(reference, learner)
    checker = list(_texts(checker_files(files.number)))
    beside = list(_texts(files.learner.parent.glob("*.py")))
    found = {}
    for number in exercises_of(reference):
        if number in merged.missing:
            continue
        pieces = select(merged, [number], whole=False)
        learners = [piece for piece in pieces if piece.role in ("exercise", "own")]
        given = [piece for piece in pieces if piece not in learners]
        expected = [text for piece in given if piece.reference for text in results(piece.reference.outputs)]
        shows = their_cell(learner, "check", number)
        found[number] = Fingerprint(
            answer=_hash([*beside, *(part for piece in learners for part in (piece.number, piece.source.strip()))]),
            check=_hash([tplab.__version__, *checker, "", *(piece.source for piece in given), "", *expected]),
            output=_hash([json.dumps([shows.execution_count, shows.outputs])] if shows else []),
        )
    return found


def checker_files(chapter: int) -> set[Path]:
    """Return the files that make up a chapter's checks: its package, and everything in tplab that it needs."""
    course = PACKAGE_ROOT / "tplab" / "course"
    folder = course / "exercises" / package(chapter)
    tables = {*folder.glob("*.md"), *(course / "checks").glob("*.md")}
    return ImportGraph(PACKAGE_ROOT, "tplab").closure(folder.glob("*.py")) | tables


def _texts(files: Iterable[Path]) -> Iterator[str]:
    """Yield the name and the contents of each file, in sorted order."""
    for path in sorted(path for path in files if path.is_file()):
        yield from (path.name, path.read_bytes().hex())


def _hash(parts: Iterable[str]) -> str:
    """Return the SHA-256 hash of the parts and their lengths, in hex."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(f"{len(data)}:".encode() + data)
    return digest.hexdigest()
