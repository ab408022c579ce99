"""Find the course's material, the learner's folder, and the files of each chapter.

material    the folder with solutions/ and the blank chapters/, which is the repository or came with the wheel
folder      the folder with the learner's notebooks, made by `tplab start`. The commands store their data in its
            subfolder `.tplab/`
"""

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from tplab.course.notebooks.cells import Cell, Unreadable, read_notebook
from tplab.course.notebooks.numbering import START, START_PAGE, argument, chapter_files, is_chapter, number_of, prefix
from tplab.course.notebooks.reference import MATERIAL

MEMORY = ".tplab"  # the folder inside the learner's folder where commands store their data
MARKER = "course.json"  # the file inside .tplab/ that marks the folder as a learner's
OWN = "my_course"  # the learner's folder in the repository, unless `tplab start` was given another name


class Misuse(Exception):  # noqa: N818 (it names what the user did)
    """Raised when a command can't be run as written. The message says what to do."""


@dataclass(frozen=True)
class Course:
    material: Path
    folder: Path

    @property
    def memory(self) -> Path:
        return self.folder / MEMORY

    @property
    def bases(self) -> Path:
        """The folder with the files that the learner's own started from, or were last updated to."""
        return self.memory / "base"

    @property
    def started(self) -> bool:
        return is_started(self.folder)


@dataclass(frozen=True)
class ChapterFiles:
    course: Course
    stem: str

    @property
    def number(self) -> int:
        return number_of(self.stem)

    @property
    def reference(self) -> Path:
        """The executed solution notebook."""
        return self.course.material / "solutions" / f"{self.stem}.ipynb"

    @property
    def source(self) -> Path:
        """The source that both notebooks are built from."""
        return self.course.material / "solutions" / f"{self.stem}.py"

    @property
    def blank(self) -> Path:
        """The blank chapter, as the learner first sees it."""
        return self.course.material / "chapters" / f"{self.stem}.ipynb"

    @property
    def learner(self) -> Path:
        """The learner's notebook, even if they, or the course, have renamed it."""
        path = self.course.folder / f"{self.stem}.ipynb"
        return path if path.exists() else _renamed(self) or path

    @property
    def base(self) -> Path:
        """The blank chapter that the learner's notebook started from, or was last updated to."""
        short = START if self.stem == START_PAGE else re.sub(r"^(\d\d)_.*", r"\1", self.stem)
        return self.course.bases / f"{short}.ipynb"

    def title(self, reference: list[Cell]) -> str:
        """Return the notebook's heading without its number, falling back to the file name."""
        heading = re.match(r"# +(?:\d+\W+)?(.+)", reference[0].source) if reference else None
        return heading[1].strip() if heading else re.sub(r"^\d\d_", "", self.stem).replace("_", " ")


def _renamed(files: ChapterFiles) -> Path | None:
    """Return the notebook in the learner's folder that has this chapter's exercises but isn't named like a chapter."""
    if not is_chapter(files.stem):
        return None  # the page with the table of contents has no exercises to recognize it by
    known = {path.name for path in (files.course.material / "solutions").glob("*.ipynb")}
    others = (path for path in sorted(files.course.folder.glob("*.ipynb")) if path.name not in known)
    return next((path for path in others if has_exercises_of(files, path)), None)


def has_exercises_of(files: ChapterFiles, path: Path) -> bool:
    """Return whether a notebook's first exercise is one of this chapter's. If the notebook can't be read, it isn't."""
    try:
        cells = read_notebook(path)
    except Unreadable:
        return False
    first = next((str(cell.marks["exercise"]) for cell in cells if "exercise" in cell.marks), "")
    return first.partition(".")[0] == prefix(files.number)


def is_started(folder: Path) -> bool:
    """Return whether this is a learner's folder."""
    return (folder / MEMORY / MARKER).is_file()


def add_root(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--root", type=Path, help="your folder, or the one with solutions/ and chapters/")


def course_of(options: argparse.Namespace) -> Course:
    """Return the course that a command works on. Raises Misuse if there is none."""
    root = (options.root or Path.cwd()).resolve()
    if not root.is_dir():
        raise Misuse(f"There is no folder {options.root}.")
    return find_course(root)


def course_or_material(options: argparse.Namespace) -> Course:
    """Return the course for a command that also works where there is no learner's folder."""
    try:
        return course_of(options)
    except Misuse:
        if options.root:
            raise
        return Course(MATERIAL, MATERIAL / "chapters")


def find_course(start: Path) -> Course:
    """Return the course that belongs to `start`, or else to the nearest folder above it. Raises Misuse if none does.

    A course belongs to a folder if it's the learner's folder, contains it as my_course/, or has the course's material.
    """
    for folder in (start, *start.parents):
        if is_started(folder):
            return Course(folder.parent if has_material(folder.parent) else MATERIAL, folder)
        if is_started(folder / OWN):
            return Course(folder if has_material(folder) else MATERIAL, folder / OWN)
        if has_material(folder):
            return Course(folder, folder / "chapters")
    raise Misuse("You have no copies of the chapters here. To make them, in a new folder my_course: tplab start")


def own_course(start: Path) -> Course | None:
    """Return the course if `start` is the learner's folder or inside it, and None otherwise."""
    for folder in (start, *start.parents):
        if is_started(folder):
            return find_course(folder)
    return None


def has_material(folder: Path) -> bool:
    return (folder / "chapters").is_dir() and bool(chapter_files(folder / "solutions", ".ipynb"))


def all_chapters(course: Course) -> dict[int, ChapterFiles]:
    """Return the chapters of the course by number, in order."""
    paths = chapter_files(course.material / "solutions", ".ipynb")
    return {number_of(path.stem): ChapterFiles(course, path.stem) for path in paths}


def chapter(course: Course, number: int) -> ChapterFiles:
    """Return the files of chapter `number`. Raises Misuse if there is none."""
    known = all_chapters(course)
    if number not in known:
        raise Misuse(f"There is no chapter {argument(number)}. There are: {', '.join(map(argument, known)) or 'none'}.")
    return known[number]
