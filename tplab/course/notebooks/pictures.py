"""Find the moving pictures that a chapter's text shows, and copy them to the notebooks.

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

from tplab.course.notebooks.source import Chapter, SourceError

FOLDER = "pictures"  # the folder of pictures beside the notebooks
MADE = Path("pictures", "moving")  # the folder in the repository that the generators write to

_LINK = re.compile(rf"!\[(?P<alt>[^\]]*)\]\({FOLDER}/(?P<name>[^)]*)\)")


def copies(chapter: Chapter) -> dict[Path, bytes]:
    """Return the path and the content of each copy of a picture that the chapter shows, in both notebook folders.

    Raises SourceError if a picture has no description, or if there's no such file.
    """
    root, found = chapter.path.parents[1], {}
    for link in _LINK.finditer("\n".join(cell.text for cell in chapter.cells if not cell.code)):
        made = root / MADE / link["name"]
        if not link["alt"].strip() or not made.is_file():
            raise SourceError(f"{link[0]} needs a description and a file {link['name']} in {MADE.as_posix()}/")
        for folder in ("solutions", "chapters"):
            found[root / folder / FOLDER / link["name"]] = made.read_bytes()
    return found
