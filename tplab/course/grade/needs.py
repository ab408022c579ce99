"""Select the cells of a merged chapter that must run for an exercise, and turn them into a notebook for nbval.

A merged chapter is the reference notebook with the learner's answers in it (see answers.py). Its code cells are called
pieces. A cell is needed if it binds a name that another needed cell uses. Given cells, which the course provides, are
left out if no exercise needs them, as in the case of pictures and training runs. That makes `tplab check` fast. The
course's own tests run every cell.
"""

import ast
import re
from collections.abc import Collection
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from tplab.course.grade.answers import Merged, Piece, merge, names_in
from tplab.course.notebooks.cells import Cell, read_notebook
from tplab.course.notebooks.ipython_syntax import to_python
from tplab.course.notebooks.source import bound_names, parse_code, used_names

FIRST_CELL = "hidden-start"  # the ID of the cell that `to_notebook` puts before the others
_SIDE_EFFECTS = re.compile(
    r"get_ipython\(\)\.(?!run_line_magic\('pinfo)|import \*|sys\.path|os\.environ|os\.chdir"
    r"|\b(exec|globals|setattr|delattr|vars)\(|__(dict|code)__"
)


@lru_cache(maxsize=10_000)
def binds(source: str) -> frozenset[str]:
    """Return the names that a cell binds, including those for which it only sets an attribute or an item.

    For example, `Layer.forward = mine` counts as binding Layer.
    """
    try:
        names = bound_names(source)
        for node in ast.walk(parse_code(source)):
            if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
                names |= {inner.id for inner in ast.walk(node.value) if isinstance(inner, ast.Name)}
        return frozenset(names)
    except SyntaxError:
        return frozenset(names_in(source))


def has_side_effects(source: str) -> bool:
    """Return whether a cell may change paths, modules or the environment, which the names it binds don't reveal."""
    with suppress(SyntaxError):  # then IPython can't run it either
        source = to_python(source)
    return _SIDE_EFFECTS.search(source) is not None


@lru_cache(maxsize=10_000)  # the same cells and statements are looked at for every exercise that needs them
def uses(source: str) -> frozenset[str]:
    """Return the names that a cell reads. If it can't be parsed, return every word in it."""
    try:
        return frozenset(used_names(source))
    except SyntaxError:
        return frozenset(re.findall(r"\w+", source))


def select(merged: Merged, exercises: list[str], *, whole: bool = True) -> list[Piece]:
    """Return the pieces that have to run before `exercises` can be checked, along with their checks.

    whole: if true, include every cell that the learner added above the last check, since it may do anything. If false,
           include an added cell only if it binds a name that an exercise needs, or if it may change paths, modules or
           the environment
    """
    last = max((i for i, p in enumerate(merged.pieces) if p.role == "check" and p.number in exercises), default=-1)
    pieces = merged.pieces[: last + 1]
    needed = {id(piece) for piece in pieces if piece.role == "setup"}
    for piece in pieces:
        asked = piece.role in ("check", "exercise") and piece.number in exercises
        if asked or (piece.role == "own" and (whole or has_side_effects(piece.source))):
            needed.add(id(piece))
    return with_needs(pieces, needed)


def with_needs(pieces: list[Piece], needed: set[int]) -> list[Piece]:
    """Return the pieces whose id() is in `needed`, plus all pieces that they depend on.

    A piece depends on those that bind a name that it uses, directly or indirectly. Checks are never added.
    """
    needed, names = set(needed), set()
    while True:
        names |= {name for piece in pieces if id(piece) in needed for name in uses(piece.source)}
        more = {id(p) for p in pieces if p.role != "check" and id(p) not in needed and binds(p.source) & names}
        if not more:
            return [piece for piece in pieces if id(piece) in needed]
        needed |= more


def ids_with_needs(solution: Path, wanted: Collection[str]) -> list[str]:
    """Return the ids of the wanted cells of a solution, the setup, and the cells above that these need, in order."""
    cells = read_notebook(solution)
    pieces = merge(cells, cells).pieces
    last = max((place for place, piece in enumerate(pieces) if piece.id in wanted), default=-1)
    above = pieces[: last + 1]
    needed = {id(piece) for piece in above if piece.role == "setup" or piece.id in wanted}
    return [piece.id for piece in with_needs(above, needed)]


def to_notebook(pieces: list[Piece]) -> list[Cell]:
    """Return the cells that nbval should run. The hidden first cell gives the exercises' cells their names.

    Only a check has outputs to compare. They are the reference's.
    """
    names = {piece.source: f"your cell of exercise {piece.number}" for piece in pieces if piece.role == "exercise"}
    start = f"__import__('tplab.course.grade.in_kernel', fromlist=['name_cells']).name_cells({names!r})"
    cells = [Cell("code", start, FIRST_CELL, {"tplab": {"role": "setup", "number": ""}})]
    for piece in pieces:
        given = piece.reference if piece.role == "check" and piece.reference else Cell("code", "")
        marks = {"tplab": {"role": piece.role, "number": piece.number}}
        cells.append(Cell("code", piece.source, piece.id, marks, given.outputs, given.execution_count))
    return cells
