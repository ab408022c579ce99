"""A fingerprint of what a verdict is about: the code that ran for an exercise, and what it was checked by.

Covered are the cells that `tplab check --exercise` runs for it (the answer, earlier answers and helper cells that it
uses, own cells that change modules, paths or the environment), Python files beside the notebook, and the check: its
cell, the result it has to show, the chapter's package `tplab/course/chNN/`, the version of tplab. Change any of them,
and an earlier verdict no longer speaks of this code. Experiments in cells that the exercise doesn't use change nothing.
"""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import tplab
from tplab.course.checker import exercises_of
from tplab.course.merge import Merged, merge
from tplab.course.needs import select
from tplab.course.notebook import Cell
from tplab.course.run import PACKAGE_ROOT
from tplab.course.tools.places import ChapterFiles
from tplab.course.tools.shown import results


def fingerprints(reference: list[Cell], learner: list[Cell], files: ChapterFiles) -> dict[str, str]:
    """The fingerprint of every exercise that the learner's notebook holds an answer to."""
    merged = merge(reference, learner)
    package = PACKAGE_ROOT / "tplab" / "course" / f"ch{files.number:02d}"
    surroundings = [tplab.__version__, *_texts(package), "", *_texts(files.learner.parent)]
    return {
        number: _hash([*surroundings, *_code(merged, number)])
        for number in exercises_of(reference)
        if number not in merged.missing
    }


def _code(merged: Merged, number: str) -> Iterator[str]:
    for piece in select(merged, [number], whole=False):
        yield from (piece.role, piece.number, piece.source.strip())
        if piece.role == "check" and piece.reference:
            yield from results(piece.reference.outputs)


def _texts(folder: Path) -> Iterator[str]:
    """Names and contents of the Python files of a folder."""
    for path in sorted(path for path in folder.glob("*.py") if path.is_file()):
        yield from (path.name, path.read_bytes().hex())


def _hash(parts: Iterable[str]) -> str:
    """Of the parts and where each ends."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode(errors="surrogatepass")  # JSON may hold half a character
        digest.update(f"{len(data)}:".encode() + data)
    return digest.hexdigest()
