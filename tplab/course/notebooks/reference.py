"""Find a chapter's executed solution notebook, from wherever a cell or a command runs."""

from contextlib import suppress
from pathlib import Path

from tplab.course.notebooks.cells import Cell, Unreadable, read_notebook
from tplab.course.notebooks.kernels import PACKAGE_ROOT
from tplab.course.notebooks.numbering import chapter_files, chapter_of, number_of

SHIPPED = PACKAGE_ROOT / "tplab" / "course" / "material"  # where a wheel puts chapters/ and solutions/
MATERIAL = SHIPPED if SHIPPED.is_dir() else PACKAGE_ROOT


def find_reference(number: str) -> list[Cell]:
    """Return the cells of the solution notebook that exercise `number` is in, or [] if there is none that can be read.

    It looks for the course in the current folder, then in the folders above, and then where the package is installed.
    """
    chapter = chapter_of(number)
    here = Path.cwd()
    for root in (here, *here.parents, MATERIAL):
        for path in chapter_files(root / "solutions", ".ipynb"):
            if number_of(path.stem) == chapter:
                with suppress(Unreadable, OSError):
                    return read_notebook(path)
    return []
