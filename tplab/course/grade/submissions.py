"""Find the students and their notebooks in a folder of submissions. Nothing in the folder is changed or run.

Ann.ipynb                       a student called Ann; the notebook's cells say which chapter it is
Ben/04_parallel_linear.ipynb    a student called Ben, who may hand in more chapters. The files next to a notebook
                                are copied along with it
"""

import re
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tplab.course.notebooks import numbering

_IGNORED = ("__MACOSX", "__pycache__", "Thumbs.db", "desktop.ini")
_EXERCISE = re.compile(rb'"exercise-(S|\d{1,2})-\d{1,3}"|"exercise" *: *"(S|\d{1,2})\.\d{1,3}"')
_MOODLE = re.compile(r"_\d+_assignsubmission_\w*$")


@dataclass
class Student:
    """A student, with their notebooks by chapter.

    entry:  the name of their file or folder among the submissions
    folder: whether it's a folder, so that the files next to a notebook are theirs, too
    """

    name: str
    entry: str
    folder: bool = False
    notebooks: dict[int, Path] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def find_students(folder: Path, chapters: dict[int, str], only: int | None, out: Path) -> list[Student]:
    """Return the students of a folder, sorted by name.

    chapters: the file name of each chapter, without its suffix
    only:     the chapter asked for, or None for any
    out:      where the results go, which may be in the folder
    """
    students = []
    for path in _entries(folder):
        if path.resolve() == out.resolve():
            continue
        name = _MOODLE.sub("", path.name.removesuffix(".ipynb")).strip(" _-") or path.name
        student = Student(name, path.name, path.is_dir())
        _add(student, _notebooks_in(path) if path.is_dir() else [path], chapters, only)
        students.append(student)
    return sorted(students, key=lambda student: (student.name.casefold(), student.entry))


def copy(notebook: Path, folder: Path, *, beside: bool) -> Path:
    """Copy a notebook into a new folder, and return the copy's path. Raises OSError if a file can't be copied.

    beside: also copy the files and folders next to the notebook, except for other notebooks
    """
    if beside:
        shutil.copytree(
            notebook.parent, folder, symlinks=True, ignore=shutil.ignore_patterns("*.ipynb", ".*", *_IGNORED)
        )
    else:
        folder.mkdir()
    return Path(shutil.copy(notebook, folder / "notebook.ipynb"))


def _add(student: Student, paths: list[Path], chapters: dict[int, str], only: int | None) -> None:
    """Add notebooks to a student, and a problem for each that can't be checked. The one saved last counts."""
    for path in sorted(paths, key=lambda path: path.stat().st_mtime):
        if path.suffix != ".ipynb":
            student.problems.append(f"{path.name} isn't a notebook, so there is nothing to check.")
            continue
        found = chapter_of(path.read_bytes(), path.stem, chapters)
        number = only if found is None else found
        if number is None:
            student.problems.append(f"{path.name} doesn't say which chapter it is. If you know: --chapter N.")
        elif number not in chapters:
            student.problems.append(f"{path.name} is a notebook of {_called(number)}, which this course doesn't have.")
        elif only not in (None, number):
            student.problems.append(f"{path.name} is a notebook of {_called(number)}, not of {_called(only)}.")
        else:
            if earlier := student.notebooks.get(number):
                told = f"{earlier.name} was not checked, since {path.name} is for the same chapter and newer."
                student.problems.append(told)
            student.notebooks[number] = path
    if not student.notebooks and not student.problems:
        student.problems.append("The folder has no notebook.")


def chapter_of(data: bytes, stem: str, chapters: dict[int, str]) -> int | None:
    """Return the chapter of a notebook, or None if it isn't known.

    The ids and metadata of the notebook's exercises tell the chapter, and if there are none, its file name does. We
    search the notebook's bytes instead of parsing it, so that we also recognize a damaged notebook.
    """
    counts = Counter(numbering.chapter_of((a or b).decode()) for a, b in _EXERCISE.findall(data))
    if counts:
        return max(counts, key=lambda number: (number in chapters, counts[number]))
    return next((number for number, name in chapters.items() if name in stem), None)


def _called(chapter: int) -> str:
    return numbering.heading(chapter).lower()


def _entries(folder: Path) -> list[Path]:
    """Return the paths in a folder, without hidden files and those that archivers and systems add."""
    return sorted(path for path in folder.iterdir() if path.name[0] != "." and path.name not in _IGNORED)


def _notebooks_in(folder: Path) -> list[Path]:
    """Return the notebooks in a student's folder and in the folders below it."""
    below = [found for path in _entries(folder) if path.is_dir() for found in _notebooks_in(path)]
    return below + [path for path in _entries(folder) if path.suffix == ".ipynb" and path.is_file()]
