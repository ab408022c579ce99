"""Where things are: the course's folder, its chapters, the files of each."""

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from tplab.course.notebooks.cells import Cell
from tplab.course.notebooks.kernels import PACKAGE_ROOT

NUMBER = re.compile(r"(\d+)\.\d+")


class Misuse(Exception):  # noqa: N818 (it names what the user did)
    """The command can't be carried out; the message says what to do."""


@dataclass(frozen=True)
class ChapterFiles:
    """The files of one chapter."""

    root: Path
    stem: str

    @property
    def number(self) -> int:
        return int(self.stem[:2])

    @property
    def reference(self) -> Path:
        """The executed solution."""
        return self.root / "solutions" / f"{self.stem}.ipynb"

    @property
    def source(self) -> Path:
        """What both notebooks are built from."""
        return self.root / "solutions" / f"{self.stem}.py"

    @property
    def learner(self) -> Path:
        """The learner's own notebook."""
        return self.root / "chapters" / f"{self.stem}.ipynb"

    def title(self, reference: list[Cell]) -> str:
        """The heading of the notebook without its number, else the name of the file."""
        heading = re.match(r"# +(?:\d+\W+)?(.+)", reference[0].source) if reference else None
        return heading[1].strip() if heading else self.stem[3:].replace("_", " ")


def add_root(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--root", type=Path, help="the course's folder, which holds solutions/ and chapters/")


def root_of(options: argparse.Namespace) -> Path:
    return options.root or find_root(Path.cwd())


def find_root(start: Path) -> Path:
    """The course's folder: here, above here, or where the package lies."""
    for folder in (start, *start.parents, PACKAGE_ROOT):
        if (folder / "chapters").is_dir() and any((folder / "solutions").glob("[0-9][0-9]_*.ipynb")):
            return folder
    raise Misuse("There is no course here. Go to the folder that holds chapters/ and solutions/, or give it as --root.")


def all_chapters(root: Path) -> dict[int, ChapterFiles]:
    """The chapters that the course has, by number, in order."""
    paths = sorted((root / "solutions").glob("[0-9][0-9]_*.ipynb"))
    return {int(path.stem[:2]): ChapterFiles(root, path.stem) for path in paths}


def chapter(root: Path, number: int) -> ChapterFiles:
    """The files of chapter `number`. Raises Misuse."""
    known = all_chapters(root)
    if number not in known:
        raise Misuse(f"There is no chapter {number}. There are: {', '.join(map(str, known)) or 'none'}.")
    return known[number]


def chapter_of_exercise(root: Path, exercise: str, example: str) -> ChapterFiles:
    """The chapter that an exercise's number starts with. Raises Misuse, with `example` of how to write the command."""
    found = NUMBER.fullmatch(exercise)
    if not found:
        raise Misuse(f"There is no exercise {exercise} here. Write it like this: {example}")
    return chapter(root, int(found[1]))


def no_such_exercise(exercise: str, files: ChapterFiles, there: list[str]) -> Misuse:
    return Misuse(f"There is no exercise {exercise} in chapter {files.stem}. There are: {', '.join(there)}.")
