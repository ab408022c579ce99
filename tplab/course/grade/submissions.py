"""Find the students and their notebooks in a folder of submissions. Nothing in the folder is changed or run.

    Ann.ipynb                       a student called Ann; the notebook's cells say which chapter it is
    Ben/04_parallel_linear.ipynb    a student called Ben, who may hand in more chapters. The files next to a notebook
                                    are copied along with it

Links and special files are left out, because a link may lead to a file of another student.
"""

import hashlib
import os
import re
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tplab.course.notebooks import numbering

MOST_BYTES = 50_000_000  # the largest notebook that is accepted
_IGNORED = ("__MACOSX", "__pycache__", "Thumbs.db", "desktop.ini")
_EXERCISE = re.compile(rb'"exercise-(S|\d{1,2})-\d{1,3}"|"exercise" *: *"(S|\d{1,2})\.\d{1,3}"')
_MOODLE = re.compile(r"_\d+_assignsubmission_\w*$")


@dataclass
class Student:
    """A student, with their notebooks by chapter.

    entry:  the path of their submission in the folder. It is printable, and so is `name`
    folder: whether the submission is a folder, so that the files next to a notebook are theirs, too
    """

    name: str
    entry: str
    folder: bool = False
    notebooks: dict[int, Path] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def page(self) -> str:
        """The file name of the student's page. It's unique, even on file systems that ignore upper and lower case."""
        plain = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")[:40]
        return f"{plain or 'student'}-{hashlib.sha256(self.entry.encode()).hexdigest()[:8]}.html"


def printable(name: str) -> str:
    r"""Return a file name as text that can be shown anywhere, with escapes like `\xff` for what isn't printable."""
    text = os.fsencode(name).replace(b"\\", b"\\\\").decode(errors="backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


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
        student = Student(printable(name), printable(path.name))
        kind = _kind(path)
        if kind == "a folder":
            student.folder = True
            _add(student, _notebooks_in(path, student), chapters, only)
        elif kind == "a file" and path.suffix == ".ipynb":
            _add(student, [path], chapters, only)
        else:
            told = "not a notebook" if kind == "a file" else kind
            student.problems.append(f"This is {told}, so there is nothing to check.")
        students.append(student)
    return sorted(students, key=lambda student: (student.name.casefold(), student.entry))


def copy(notebook: Path, folder: Path, *, beside: bool) -> Path:
    """Copy a notebook into a new folder, and return the copy's path. Raises OSError if a file can't be copied.

    beside: also copy the files and folders next to the notebook, except for links and other notebooks
    """

    def left_out(parent: str, names: list[str]) -> set[str]:
        kept = {path.name for path in _entries(Path(parent)) if _kind(path) in ("a file", "a folder")}
        return {name for name in names if name not in kept or name.endswith(".ipynb")}

    if beside:
        shutil.copytree(notebook.parent, folder, ignore=left_out)
    else:
        folder.mkdir()
    return Path(shutil.copy(notebook, folder / "notebook.ipynb"))


def _add(student: Student, paths: list[Path], chapters: dict[int, str], only: int | None) -> None:
    """Add notebooks to a student, and a problem for each that can't be checked. The one saved last counts."""
    for path in sorted(paths, key=lambda path: path.stat().st_mtime):
        shown, size = printable(path.name), path.stat().st_size
        try:
            found = chapter_of(path.read_bytes() if size <= MOST_BYTES else b"", path.stem, chapters)
        except OSError as error:
            student.problems.append(f"{shown} can't be read: {error.strerror or error}.")
            continue
        number = only if found is None else found
        if size > MOST_BYTES:
            most = f"{MOST_BYTES / 1e6:.0f} MB is the limit. Have its outputs cleared."
            student.problems.append(f"{shown} has {size / 1e6:.0f} MB, and {most}")
        elif number is None:
            student.problems.append(f"{shown} doesn't say which chapter it is. If you know: --chapter N.")
        elif number not in chapters:
            student.problems.append(f"{shown} is a notebook of {_called(number)}, which this course doesn't have.")
        elif only not in (None, number):
            student.problems.append(f"{shown} is a notebook of {_called(number)}, not of {_called(only)}.")
        else:
            if earlier := student.notebooks.get(number):
                told = f"{printable(earlier.name)} was not checked, since {shown} is for the same chapter and newer."
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


def _kind(path: Path) -> str:
    if path.is_symlink():
        return "a link, which may lead anywhere"
    return "a folder" if path.is_dir() else "a file" if path.is_file() else "not an ordinary file"


def _notebooks_in(folder: Path, student: Student) -> list[Path]:
    """Return the notebooks in a student's folder and in the folders below it."""
    found = []
    for path in _entries(folder):
        kind = _kind(path)
        if kind == "a folder":
            found += _notebooks_in(path, student)
        elif kind != "a file":
            student.problems.append(f"{printable(path.name)} was left out: it is {kind}.")
        elif path.suffix == ".ipynb":
            found.append(path)
    return found
