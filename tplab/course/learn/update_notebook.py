"""Bring a new version of a chapter into a learner's notebook, cell by cell, and keep everything that the learner wrote.

Three notebooks take part: `base`, the blank chapter that the learner's copy started from; `mine`, the learner's
notebook; and `new`, the current blank chapter. Cells are matched by id, or by their text if they have lost their ids. A
given cell has a new id if the course changed it, so it's matched by its place in the base. Cells that the learner never
edited are replaced by the new ones. This is what becomes of a cell that they edited:

    exercise               it stays, unless its number now belongs to a different task
    prediction             it stays, unless the course asks for different values now
    check                  the new cell takes its place
    given cell             it stays, unless the course changed it, too
    the learner's own      it stays below the cell that it follows

In all other cases, the learner's cell follows the new one, as a cell of their own. Without a base, a cell that differs
from the new one counts as edited by the learner.
"""

import copy
import json
import uuid
from collections.abc import Collection
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

from tplab.common.units import count
from tplab.course.feedback.verdict import names
from tplab.course.grade.answers import find_cells
from tplab.course.notebooks.cells import Cell, parse_cells
from tplab.course.notebooks.source import predictions_in


@dataclass
class Changes:
    """What an update did to the cells that the learner had edited, as lists of exercise numbers and of cell ids."""

    kept: list[str] = field(default_factory=list)  # numbers of exercises whose answer was kept
    new_task: list[str] = field(default_factory=list)  # those of them whose given lines the course changed
    beside: list[str] = field(default_factory=list)  # new cells that are followed by the learner's version

    def __str__(self) -> str:
        """Return a line such as "up to date. Answers kept: 4.1 and 4.2."."""
        told = ["up to date"]
        if self.kept:
            told.append(f"Answers kept: {names(self.kept)}")
        if self.new_task:
            told.append(f"The given lines of {names(self.new_task)} changed: compare yours with chapters/")
        if self.beside:
            told.append(f"Your edited version is below the course's cell in {count(len(self.beside), 'place')}")
        return ". ".join(told) + "."


def update_notebook(
    base: dict | None, mine: dict, new: dict, other_task: Collection[str] = (), carried: Collection[str] = ()
) -> tuple[dict, Changes]:
    """Return an updated copy of `mine`, and what changed. All three notebooks are JSON, and none of them is modified.

    other_task: exercises whose number now belongs to a different task
    carried:    the sources of those cells of theirs that move elsewhere in full (see moved_answers.py). All other
                answers to exercises in `other_task` stay, as cells of the learner's own
    """
    changes = Changes()
    before = {cell.id: cell for cell in parse_cells(base)} if base else {}
    after = parse_cells(new)
    cells = parse_cells(mine)
    raw = dict(zip(map(id, cells), mine["cells"], strict=True))
    successors = _successors(list(before.values()), after)
    versions, own = _sort(cells, before, after, successors)
    the_courses = {cell.id for cell in after}
    moved = {id(cell) for cell in cells if "exercise" in cell.marks and cell.source in carried}
    result: list[dict] = []

    def add_own(follows: str) -> None:
        for cell in own.get(follows, []):
            if id(cell) in moved:
                continue
            if cell.id in before and cell.id not in the_courses:
                if successors.get(cell.id) == follows:
                    changes.beside.append(follows)
                result.append(_as_own(raw[id(cell)]))
            else:
                result.append(copy.deepcopy(raw[id(cell)]) | ({"id": ""} if cell.id in the_courses else {}))

    add_own("")
    for today, raw_today in zip(after, new["cells"], strict=True):
        version = versions.get(today.id)
        chosen, beside = _choose(before.get(today.id), version, today, other_task, changes)
        if chosen is not None:
            contents = {} if chosen is today else _contents(raw[id(chosen)])
            metadata = _look(version) | today.metadata if version else today.metadata
            result.append(copy.deepcopy(raw_today | contents | {"metadata": metadata}))
        if beside is not None and id(beside) not in moved and beside.source.strip():
            changes.beside.append(today.id)
            result.append(_as_own(raw[id(beside)]))
        add_own(today.id)
    _give_ids(result)
    merged = copy.deepcopy(mine) | {
        key: copy.deepcopy(new[key]) for key in ("nbformat", "nbformat_minor") if key in new
    }
    return merged | {"cells": result}, changes


def _as_own(cell: dict) -> dict:
    """Return a copy of a chapter's cell that belongs to no exercise, so that it counts as one of the learner's own.

    It may use what the chapter no longer has. With the tag, it can fail without stopping the cells below it.
    """
    tags = {"tags": ["raises-exception"]} if cell["cell_type"] == "code" else {}
    return copy.deepcopy(cell) | {"metadata": tags, "id": ""}


def _look(cell: Cell) -> dict[str, Any]:
    """Return the metadata that isn't the course's, such as whether a learner has folded the cell."""
    return {key: value for key, value in cell.metadata.items() if key not in ("tplab", "tags")}


def _contents(cell: dict) -> dict:
    """Return what a learner may have changed in a cell of the chapter, apart from its metadata."""
    return {key: cell[key] for key in ("source", "outputs", "execution_count", "attachments") if key in cell}


def _successors(before: list[Cell], after: list[Cell]) -> dict[str, str]:
    """Map the id of each given cell that the course changed to the id of the new cell that stands in its place.

    If several do, it's the one with the most similar text.
    """
    found = {}
    old, new = [cell.id for cell in before], [cell.id for cell in after]
    for _, start, stop, new_start, new_stop in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        added = [cell for cell in after[new_start:new_stop] if cell.id not in old and not cell.marks]
        for cell in before[start:stop]:
            likely = [other for other in added if other.kind == cell.kind]
            if likely and cell.id not in new and not cell.marks:
                found[cell.id] = max(likely, key=lambda other: _likeness(cell, other)).id
    return found


def _likeness(a: Cell, b: Cell) -> float:
    return SequenceMatcher(None, a.source, b.source, autojunk=False).ratio()


def _sort(
    cells: list[Cell], before: dict[str, Cell], after: list[Cell], successors: dict[str, str]
) -> tuple[dict[str, Cell], dict[str, list[Cell]]]:
    """Return, by the id of each new cell, the learner's version of it and the learner's own cells that follow it."""
    kinds = {cell.id: cell.kind for cell in after}
    present = {cell.id for cell in cells}
    lost: dict[tuple[str, str], list[str]] = {}  # kind and text -> the ids of such cells that are no longer there
    for cell in before.values():
        if cell.id not in present:
            lost.setdefault((cell.kind, _plain(cell)), []).append(cell.id)
    ids = []
    for cell in cells:
        same = lost.get((cell.kind, _plain(cell))) if cell.id not in before else None
        ids.append(same.pop(0) if same else cell.id)
    found = zip(ids, find_cells(after, cells), strict=True)
    owners = [owner or (id if id in kinds and id in before else "") for id, owner in found]
    versions: dict[str, Cell] = {}
    for cell, owner in zip(cells, owners, strict=True):
        better = owner and cell.kind == kinds[owner]
        if better and (owner not in versions or (cell.id == owner and versions[owner].id != owner)):
            versions[owner] = cell
    own: dict[str, list[Cell]] = {}
    last = ""
    for cell, id, owner in zip(cells, ids, owners, strict=True):
        if owner and versions.get(owner) is cell:
            last = owner
            continue
        last = successors.get(id, last)
        unedited = id in before and id not in kinds and _plain(cell) == _plain(before[id])  # the course changed it
        if cell.source.strip() and not unedited:
            own.setdefault(last, []).append(cell)
    return versions, own


def _choose(
    old: Cell | None, mine: Cell | None, today: Cell, other_task: Collection[str], changes: Changes
) -> tuple[Cell | None, Cell | None]:
    """Return the cell to put in place of `today` (the new cell), and one to put below it. Either may be None."""
    untouched = old is not None and _plain(old) == _plain(today)  # the course didn't change it
    if mine is None:
        return (None if untouched and not today.marks else today), None  # a given cell that the learner deleted
    if _plain(mine) == _plain(today):
        return mine, None
    edited = old is None or _plain(mine) != _plain(old)
    if edited and _stays(old, mine, today, untouched, other_task):
        if "exercise" in today.marks:
            changes.kept.append(today.marks["exercise"])
            changes.new_task += [] if old is None or untouched else [today.marks["exercise"]]
        return mine, None
    return today, mine if edited else None


def _stays(old: Cell | None, mine: Cell, today: Cell, untouched: bool, other_task: Collection[str]) -> bool:
    """Return whether the learner's edited version of a cell takes the place of the new cell."""
    if "exercise" in today.marks:
        return today.marks["exercise"] not in other_task
    if "predict" in today.marks:
        return _asks(old or mine) == _asks(today)
    return untouched and "check" not in today.marks


def _asks(prediction: Cell) -> dict[str, set[str]] | None:
    """Return which values a prediction asks for, or None if the cell can't be parsed."""
    try:
        return predictions_in(prediction.source)
    except SyntaxError:
        return None


def _plain(cell: Cell) -> str:
    return "\n".join(line.rstrip() for line in cell.source.strip().split("\n"))


def _give_ids(cells: list[dict]) -> None:
    """Give each cell a unique id, which nbformat 4.5 requires."""
    used: set[str] = set()
    for cell in cells:
        if not isinstance(cell.get("id"), str) or not cell["id"] or cell["id"] in used:
            cell["id"] = uuid.uuid4().hex[:8]
        used.add(cell["id"])


def put_answer(notebook: dict, number: str, answer: str, stub: str) -> bool:
    """Put an answer into an exercise's cell, or above it if the learner has written something there.

    stub: the text of the cell as the course made it. Returns False if the notebook doesn't have the exercise.
    """
    cells = parse_cells(notebook)
    places = [place for place, cell in enumerate(cells) if cell.marks.get("exercise") == number]
    blank = next((place for place in places if cells[place].source.strip() == stub.strip()), None)
    if blank is not None:
        notebook["cells"][blank]["source"] = answer
    elif places and all(cell.source != answer for cell in cells):
        own: dict = {"cell_type": "code", "metadata": {}, "source": answer, "outputs": [], "execution_count": None}
        notebook["cells"].insert(places[0], own)
        if notebook.get("nbformat_minor", 0) >= 5:
            _give_ids(notebook["cells"])
    return bool(places)


def as_text(notebook: dict) -> str:
    """Return the text of a notebook in the form in which JupyterLab saves it."""
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
