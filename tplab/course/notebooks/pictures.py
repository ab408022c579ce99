"""The moving pictures in a chapter's text: what a source writes to show one, and where its file must be.

A markdown cell shows a picture from pictures/moving/ (see the generators there) by its file, with a description:

    ![Rank 0 and rank 1 each get a copy of x from f, ...](pictures/fg.svg)

The build copies the file to pictures/ beside both notebooks, `tplab start` and `tplab update` copy it on to the
learner's folder, and the book gets a copy, too. So the same link works everywhere.

Why not attach the file to the cell? JupyterLab (4.6) only shows attachments that are bmp, png, jpeg, gif or webp. For
an attached SVG it shows the alt text, because it doesn't consider the type safe. As a file, an SVG moves even in a
notebook that isn't trusted.
"""

import re
from pathlib import Path

from tplab.course.notebooks.source import Cell, Chapter

FOLDER = "pictures"  # beside the notebooks
MADE = Path("pictures", "moving")  # in the repository, where the generators write

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
            if target.startswith("attachment:"):
                name = target.removeprefix("attachment:")
                raise cell.refuse(f"JupyterLab doesn't show an attached SVG; write ({FOLDER}/{name}) instead")
            if target == name or not (made / name).is_file():
                there = ", ".join(sorted(path.name for path in made.glob("*.svg"))) or "no pictures yet"
                raise cell.refuse(
                    f"there is no picture {target!r}; a chapter shows {FOLDER}/NAME of a file in {MADE.as_posix()}/, "
                    f"which has {there}"
                )
            if not alt.strip():
                raise cell.refuse(f"the picture {target} has no description; say what it shows between the brackets")


def stale_pictures(chapter: Chapter) -> list[str]:
    """Return the first copy of one of the chapter's pictures that is missing or out of date, as a list, or []."""
    return [_told(target) for source, target in _copies(chapter) if not _same(source, target)][:1]


def copy_pictures(chapter: Chapter) -> list[str]:
    """Copy the chapter's pictures to both folders of notebooks, and return the names of the files written."""
    written = []
    for source, target in _copies(chapter):
        if not _same(source, target):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
            written.append(_told(target))
    return written


def _links(cell: Cell) -> list[tuple[str, str]]:
    """Return (alt text, target) of each picture in a markdown cell, leaving out what stands in code."""
    if cell.code:
        return []
    return [(found["alt"], found["target"]) for found in _LINK.finditer(_CODE.sub("", cell.text))]


def _root(chapter: Chapter) -> Path:
    return chapter.path.parents[1]


def _copies(chapter: Chapter) -> list[tuple[Path, Path]]:
    """Return each file that has to be copied, with the copy's path."""
    root = _root(chapter)
    return [
        (root / MADE / name, root / folder / FOLDER / name)
        for name in shown_in(chapter)
        for folder in ("solutions", "chapters")
    ]


def _same(source: Path, target: Path) -> bool:
    return target.is_file() and target.read_bytes() == source.read_bytes()


def _told(target: Path) -> str:
    return "/".join(target.parts[-3:])
