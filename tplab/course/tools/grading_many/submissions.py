"""Find the students and their notebooks in a folder of submissions. Nothing in the folder is changed or run.

    Ann.ipynb                       a student called Ann; the notebook's cells say which chapter it is
    Ann_04_parallel_linear.ipynb    the same; Ann may hand in more chapters as more files
    Ben/04_parallel_linear.ipynb    a student called Ben; the files next to a notebook are copied along with it

Links and special files are refused, because a link may lead to a file of another student.
"""

import hashlib
import os
import re
import stat
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tplab.course.learner.course_files import ChapterFiles
from tplab.course.notebooks import numbering

MOST_BYTES = 50_000_000  # the largest file that is accepted
MOST_BESIDE = 200_000_000  # the most bytes in all files that are copied with a notebook
MOST_FILES = 1_000
DEEPEST = 4  # how many levels of folders there may be below the student's
_IGNORED = ("__MACOSX", "Thumbs.db", "desktop.ini")
_EXERCISE = re.compile(rb'"exercise-(S|\d{1,2})-\d{1,3}"|"exercise" *: *"(S|\d{1,2})\.\d{1,3}"')
_MOODLE = re.compile(r"_\d+_assignsubmission_\w*$")


@dataclass(frozen=True)
class Notebook:
    """A notebook to check. `files` has all files to copy, by their path relative to its folder, the notebook first."""

    chapter: int
    path: Path
    files: dict[str, Path]
    hash: str


@dataclass
class Student:
    """A student. `entry` is the path of their submission in the folder. It is printable, and so is `name`."""

    name: str
    entry: str
    notebooks: dict[int, Notebook] = field(default_factory=dict)
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


def find_students(folder: Path, chapters: dict[int, ChapterFiles], only: int | None, out: Path) -> list[Student]:
    """Return the students of a folder, sorted by name. `only` is the chapter asked for, or None for any."""
    students: list[Student] = []
    files: dict[str, list[Path]] = defaultdict(list)  # by the part of the file name that names the student
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in _IGNORED or path.resolve() == out.resolve():
            continue
        kind = _kind(path)
        if kind == "folder":
            student = Student(_student(path.name), printable(path.name) + "/")
            found, student.problems = _notebooks_in(path)
            _add(student, found, chapters, only, at_most=path)
            students.append(student)
        elif kind == "file" and path.suffix == ".ipynb":
            files[_before_chapter(path.stem, chapters)].append(path)
        else:
            what = "not a notebook" if kind == "file" else kind
            told = f"This is {what}, so there is nothing to check. A submission is an .ipynb file or a folder of them."
            students.append(Student(_student(path.name), printable(path.name), problems=[told]))
    for name, paths in files.items():
        students += _one_or_many(name, paths, chapters, only)
    for name, count in Counter(student.name.casefold() for student in students).items():
        for student in students if count > 1 else ():
            if student.name.casefold() == name:
                student.problems.append(f"{count} submissions have this name.")
    return sorted(students, key=lambda student: (student.name.casefold(), student.entry))


def _one_or_many(name: str, paths: list[Path], chapters: dict[int, ChapterFiles], only: int | None) -> list[Student]:
    """Return one student for files that begin with the same name, or one per file if two are of the same chapter."""
    together = Student(_student(name), ", ".join(printable(path.name) for path in paths))
    _add(together, paths, chapters, only)
    if len(paths) == 1 or len(together.notebooks) == len(paths):
        return [together]
    students = [Student(_student(name), printable(path.name)) for path in paths]
    for student, path in zip(students, paths, strict=True):
        _add(student, [path], chapters, only)
    return students


def _add(
    student: Student,
    paths: list[Path],
    chapters: dict[int, ChapterFiles],
    only: int | None,
    *,
    at_most: Path | None = None,
) -> None:
    """Add notebooks to a student, and a problem for each that can't be checked.

    If there are two for a chapter, the one saved last counts. `at_most` is the student's folder. Without it, the files
    next to a notebook are somebody else's, so they aren't copied.
    """
    for path in sorted(paths, key=lambda path: path.stat().st_mtime):
        shown = printable(str(path.relative_to(at_most) if at_most else path.name))
        try:
            data = read(path)
        except OSError as error:
            student.problems.append(f"{shown} can't be read: {error.strerror or error}.")
            continue
        found = chapter_of(data, path.stem, chapters)
        number = only if found is None else found
        if number is not None and number not in chapters:
            student.problems.append(f"{shown} is a notebook of {_called(number)}, which this course doesn't have.")
        elif number is None:
            student.problems.append(f"{shown} doesn't say which chapter it is. If you know: --chapter N.")
        elif only not in (None, number):
            student.problems.append(f"{shown} is a notebook of {_called(number)}, not of {_called(only)}.")
        else:
            if earlier := student.notebooks.get(number):
                told = printable(str(earlier.path.relative_to(at_most) if at_most else earlier.path.name))
                student.problems.append(f"{told} was not checked, since {shown} is for the same chapter and newer.")
            files, left_out = _beside(path) if at_most else ({path.name: path}, [])
            student.problems += [problem for problem in left_out if problem not in student.problems]
            student.notebooks[number] = Notebook(number, path, files, hash_of(files))
    if not student.notebooks and not student.problems:
        student.problems.append("The folder has no notebook.")


def chapter_of(data: bytes, stem: str, chapters: dict[int, ChapterFiles]) -> int | None:
    """Return the chapter of a notebook, or None if it isn't known.

    The ids and metadata of the notebook's exercises tell the chapter, and if there are none, its file name does. We
    search the notebook's bytes instead of parsing it, so that we also recognize a damaged notebook.
    """
    counts = Counter(numbering.chapter_of((a or b).decode()) for a, b in _EXERCISE.findall(data))
    if counts:
        return max(counts, key=lambda number: (number in chapters, counts[number]))
    return next((number for number, files in chapters.items() if files.stem in stem), None)


def _called(chapter: int) -> str:
    return numbering.heading(chapter).lower()


def read(path: Path) -> bytes:
    """Return the bytes of a regular file. Raises OSError for anything else, and if it's too large."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is not a regular file")
        if status.st_size > MOST_BYTES:
            size, most = status.st_size / 1e6, MOST_BYTES / 1e6
            raise OSError(f"it has {size:.0f} MB, and {most:.0f} MB is the limit. Have its outputs cleared")
        return file.read(MOST_BYTES)


def hash_of(files: dict[str, Path]) -> str:
    """Return a hash of the files that get copied. The notebook's own name makes no difference."""
    digest = hashlib.sha256()
    for place, (name, path) in enumerate(files.items()):
        for data in (os.fsencode(name) if place else b"", read(path)):
            digest.update(f"{len(data)}:".encode() + data)
    return digest.hexdigest()


def copy(notebook: Notebook, folder: Path) -> Path | None:
    """Copy a notebook and the files next to it, and return the copy's path, or None if they have changed since."""
    try:
        if hash_of(notebook.files) != notebook.hash:
            return None
        contents = {name: read(path) for name, path in notebook.files.items()}
    except OSError:
        return None
    for place, (name, data) in enumerate(contents.items()):
        target = folder / (name if place else "notebook.ipynb")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    return folder / "notebook.ipynb"


def _kind(path: Path) -> str:
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        return "a link, which may lead anywhere"
    if stat.S_ISDIR(mode):
        return "folder"
    return "file" if stat.S_ISREG(mode) else "not an ordinary file"


def _student(name: str) -> str:
    """Return the student's name, without what Moodle adds to it."""
    return printable(_MOODLE.sub("", name.removesuffix(".ipynb")).strip(" _-") or name)


def _before_chapter(stem: str, chapters: dict[int, ChapterFiles]) -> str:
    """Return the part of a notebook's file name that names the student: "Ann" of "Ann_04_parallel_linear"."""
    found = [stem.find(files.stem) for files in chapters.values() if files.stem in stem]
    return (stem[: found[0]].strip(" _-") if found else "") or stem


def _walk(folder: Path, depth: int = 0) -> Iterator[tuple[Path, str]]:
    """Yield every path in a folder that isn't hidden, with its kind, in sorted order. Links aren't followed."""
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        yield folder, f"unreadable ({error.strerror})"
        return
    for path in entries:
        if path.name.startswith(".") or path.name in _IGNORED or path.name == "__pycache__":
            continue
        kind = _kind(path)
        if kind == "folder" and depth < DEEPEST:
            yield from _walk(path, depth + 1)
        else:
            yield path, "too many folders deep" if kind == "folder" else kind


def _notebooks_in(folder: Path) -> tuple[list[Path], list[str]]:
    found, problems = [], []
    for count, (path, kind) in enumerate(_walk(folder)):
        shown = printable(str(path.relative_to(folder)))
        if count >= MOST_FILES:
            problems.append(f"The folder has more than {MOST_FILES} files; the rest was not looked at.")
            break
        if kind == "file" and path.suffix == ".ipynb":
            found.append(path)
        elif kind != "file":
            problems.append(f"{shown} was left out: it is {kind}.")
    return found, problems


def _beside(notebook: Path) -> tuple[dict[str, Path], list[str]]:
    """Return the files to copy: the notebook, and the other files of its folder that aren't notebooks."""
    files, total = {notebook.name: notebook}, 0
    for path, kind in _walk(notebook.parent):
        if kind != "file" or path.suffix == ".ipynb":
            continue
        size = path.stat().st_size
        total += size
        if size > MOST_BYTES or total > MOST_BESIDE or len(files) >= MOST_FILES or not os.access(path, os.R_OK):
            return files, [f"{printable(path.name)} and what follows it were left out: too large, or unreadable."]
        files[str(path.relative_to(notebook.parent))] = path
    return files, []
