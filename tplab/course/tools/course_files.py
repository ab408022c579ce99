"""The course's folder, its chapters, and the files of each chapter."""

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from tplab.course.notebooks.cells import Cell
from tplab.course.notebooks.kernels import PACKAGE_ROOT

NUMBER = re.compile(r"(\d+)\.\d+")


class Misuse(Exception):  # noqa: N818 (it names what the user did)
    """Raised when a command can't be run as written. The message says what to do."""


@dataclass(frozen=True)
class ChapterFiles:
    root: Path
    stem: str

    @property
    def number(self) -> int:
        return int(self.stem[:2])

    @property
    def reference(self) -> Path:
        """The executed solution notebook."""
        return self.root / "solutions" / f"{self.stem}.ipynb"

    @property
    def source(self) -> Path:
        """The source that both notebooks are built from."""
        return self.root / "solutions" / f"{self.stem}.py"

    @property
    def learner(self) -> Path:
        """The learner's notebook."""
        return self.root / "chapters" / f"{self.stem}.ipynb"

    def title(self, reference: list[Cell]) -> str:
        """Return the notebook's heading without its number, falling back to the file name."""
        heading = re.match(r"# +(?:\d+\W+)?(.+)", reference[0].source) if reference else None
        return heading[1].strip() if heading else self.stem[3:].replace("_", " ")


def add_root(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--root", type=Path, help="the course's folder, which holds solutions/ and chapters/")


def root_of(options: argparse.Namespace) -> Path:
    return options.root or find_root(Path.cwd())


def find_root(start: Path) -> Path:
    """Return the course's folder: `start`, a folder above it, or else the package's folder. Raises Misuse."""
    for folder in (start, *start.parents, PACKAGE_ROOT):
        if (folder / "chapters").is_dir() and any((folder / "solutions").glob("[0-9][0-9]_*.ipynb")):
            return folder
    raise Misuse("There is no course here. Go to the folder that holds chapters/ and solutions/, or give it as --root.")


def all_chapters(root: Path) -> dict[int, ChapterFiles]:
    """Return the chapters of the course by number, in order."""
    paths = sorted((root / "solutions").glob("[0-9][0-9]_*.ipynb"))
    return {int(path.stem[:2]): ChapterFiles(root, path.stem) for path in paths}


def chapter(root: Path, number: int) -> ChapterFiles:
    """Return the files of chapter `number`. Raises Misuse if there is none."""
    known = all_chapters(root)
    if number not in known:
        raise Misuse(f"There is no chapter {number}. There are: {', '.join(map(str, known)) or 'none'}.")
    return known[number]


def chapter_of_exercise(root: Path, exercise: str, example: str) -> ChapterFiles:
    """Return the files of an exercise's chapter. Raises Misuse, with `example` showing how to write the command."""
    found = NUMBER.fullmatch(exercise)
    if not found:
        raise Misuse(f"There is no exercise {exercise} here. Write it like this: {example}")
    return chapter(root, int(found[1]))


def no_such_exercise(exercise: str, files: ChapterFiles, there: list[str]) -> Misuse:
    return Misuse(f"There is no exercise {exercise} in chapter {files.stem}. There are: {', '.join(there)}.")
