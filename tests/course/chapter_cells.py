"""Which cells of a chapter a test has to run: some of them, and all that these stand on."""

from collections.abc import Callable
from functools import cache

from tests import ROOT
from tplab.course.grade.answers import Piece, merge
from tplab.course.grade.needs import with_needs
from tplab.course.notebooks.cells import read_notebook


@cache
def _pieces(stem: str) -> list[Piece]:
    solution = read_notebook(ROOT / "solutions" / f"{stem}.ipynb")
    return merge(solution, solution).pieces


def with_what_they_need(stem: str, wanted: Callable[[Piece], bool]) -> list[str]:
    """Ids of the cells that are wanted, of the set-up, and of the cells above whose names these use, in order."""
    pieces = _pieces(stem)
    last = max((place for place, piece in enumerate(pieces) if wanted(piece)), default=-1)
    above = pieces[: last + 1]
    needed = {id(piece) for piece in above if piece.role == "setup" or wanted(piece)}
    return [piece.id for piece in with_needs(above, needed)]
