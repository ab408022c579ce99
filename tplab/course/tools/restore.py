"""Restore one exercise of a learner's notebook to its original state, and leave every other cell alone."""

import copy
from typing import Any

from tplab.course.grade.answers import find_cells
from tplab.course.notebooks.cells import Cell


def restore(raw: dict, learner: list[Cell], first: dict, reference: list[Cell], number: str) -> None:
    """Replace the exercise cell and its check cell in `raw`, the notebook's JSON, with those of `first`, in place.

    learner:    the same notebook, parsed into cells
    first:      the JSON of the blank chapter
    reference:  the cells of the solution, used to find the learner's cells

    Cells are found even if they have lost their ids, or were turned into text, split or duplicated. The first match is
    replaced, and the others are removed. A missing cell is inserted after the cells that precede it in the chapter.
    """
    owners = find_cells(reference, learner)  # for each of the learner's cells, the id of its reference cell
    cells: list[tuple[str, Any]] = list(zip(owners, raw["cells"], strict=True))
    order = [cell["id"] for cell in first["cells"]]
    for part in ("exercise", "check"):
        id = f"{part}-{number.replace('.', '-')}"
        pristine = copy.deepcopy(first["cells"][order.index(id)])
        if isinstance(raw.get("nbformat_minor"), int) and raw["nbformat_minor"] < 5:
            del pristine["id"]  # the notebook's format predates cell ids
        places = [place for place, (owner, _) in enumerate(cells) if owner == id]
        if places:
            cells[places[0]] = (id, pristine)
            cells = [cell for place, cell in enumerate(cells) if place not in places[1:]]
        else:
            above = set(order[: order.index(id)])
            last = max((place for place, (owner, _) in enumerate(cells) if owner in above), default=-1)
            cells.insert(last + 1, (id, pristine))
    raw["cells"] = [cell for _, cell in cells]
