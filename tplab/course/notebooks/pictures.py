"""Find and validate the moving pictures that a chapter's text shows.

A markdown cell shows a picture from pictures/moving/, where the generators write them, by a link with a description:

    ![Rank 0 and rank 1 each get a copy of x from f, ...](pictures/fg.svg)

The build copies the file to pictures/ beside both notebooks. `tplab start` and `tplab update` copy it into the
learner's folder, and the book gets a copy, too. So the same link works everywhere.

Why not attach the file to the cell? JupyterLab (4.6) only shows attachments that are bmp, png, jpeg, gif or webp. For
an attached SVG it shows the alt text, because it doesn't consider the type safe. If the SVG is a file of its own, it
moves even in a notebook that isn't trusted.
"""

import re
from pathlib import Path

from tplab.course.notebooks.source import Cell, Chapter

FOLDER = "pictures"  # the folder of pictures beside the notebooks
MADE = Path("pictures", "moving")  # the folder in the repository that the generators write to

_LINK = re.compile(r"!\[(?P<alt>[^\]]*)\]\(\s*(?P<target>[^)]*?)\s*\)")
_CODE = re.compile(r"^(```|~~~).*?^\1|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def shown_in(chapter: Chapter) -> list[str]:
    """Return the file names of the pictures that the chapter shows, each once, in order."""
    targets = (target for cell in chapter.cells for _, target in _links(cell))
    return list(dict.fromkeys(target.removeprefix(f"{FOLDER}/") for target in targets))


def validate_pictures(chapter: Chapter) -> None:
    """Raise SourceError for the first picture that can't be shown, or that has no description."""
    made = _root(chapter) / MADE
    for cell in chapter.cells:
        if not cell.code and "<img" in _CODE.sub("", cell.text):
            raise cell.refuse(f"an <img> tag; write ![what it shows]({FOLDER}/name.svg), which the build copies along")
        for alt, target in _links(cell):
            name = target.removeprefix(f"{FOLDER}/")
            if target == name or not (made / name).is_file():
                there = ", ".join(sorted(path.name for path in made.glob("*.svg"))) or "no pictures yet"
                raise cell.refuse(
                    f"there is no picture {target!r}; a chapter shows {FOLDER}/NAME of a file in {MADE.as_posix()}/, "
                    f"which has {there}"
                )
            if not alt.strip():
                raise cell.refuse(f"the picture {target} has no description; say what it shows between the brackets")


def copies(chapter: Chapter) -> dict[Path, bytes]:
    """Return the path and the content of each copy of a picture that the chapter shows, in both notebook folders."""
    root = _root(chapter)
    return {
        root / folder / FOLDER / name: (root / MADE / name).read_bytes()
        for name in shown_in(chapter)
        for folder in ("solutions", "chapters")
    }


def _links(cell: Cell) -> list[tuple[str, str]]:
    """Return the (alt text, target) of each picture in a markdown cell, ignoring those inside code."""
    if cell.code:
        return []
    return [(found["alt"], found["target"]) for found in _LINK.finditer(_CODE.sub("", cell.text))]


def _root(chapter: Chapter) -> Path:
    return chapter.path.parents[1]
