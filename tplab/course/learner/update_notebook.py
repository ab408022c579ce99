"""Bring a new version of a chapter into a learner's notebook, cell by cell, and keep everything that the learner wrote.

Three notebooks take part: `base`, the blank chapter that the learner's copy started from; `mine`, the learner's
notebook; and `new`, the current blank chapter. Cells are matched by id. If the course changed a cell, which changes its
id, the cell is matched by its position in the base. For each kind of cell, this is what the updated notebook contains:

    exercise, prediction   the learner's cell if they ever edited it, unless its number now belongs to a different task
    check                  always the new cell
    given cell             the new cell, unless the learner edited or deleted it and the course didn't change it. If
                           both changed it, the new cell is followed by the learner's
    the learner's own      the learner's cell, below the cell that it follows

Without a base, a given cell that differs from the new one counts as edited by the learner.
"""

import copy
import json
import re
import uuid
from collections.abc import Collection
from dataclasses import dataclass, field
from difflib import SequenceMatcher

from tplab.course.grading.merge import find_cells
from tplab.course.notebooks.cells import Cell, parse_cells

ALIKE = 0.5  # two texts count as versions of one cell if difflib's similarity ratio is at least this


@dataclass
class Changes:
    """What an update did to a notebook, as lists of cell ids and of exercise numbers."""

    added: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    beside: list[str] = field(default_factory=list)  # changed cells that are followed by the learner's version
    kept: list[str] = field(default_factory=list)  # numbers of exercises whose answer was kept
    new_task: list[str] = field(default_factory=list)  # those of them whose given lines the course changed

    def __bool__(self) -> bool:
        return bool(self.added or self.changed or self.removed or self.new_task)

    def __str__(self) -> str:
        """Return a line such as "2 cells changed, 1 added. Your answers to 4.1 and 4.2 are kept."."""
        counts = [
            f"{len(cells)} {'cell' if len(cells) == 1 else 'cells'} {what}"
            for cells, what in ((self.changed, "changed"), (self.added, "added"), (self.removed, "removed"))
            if cells
        ]
        told = [", ".join(counts) or "no given cell changed"]
        if self.kept:
            some = "answer to {} is" if len(self.kept) == 1 else "answers to {} are"
            told.append(f"Your {some.format(_listed(self.kept))} kept")
        if self.new_task:
            told.append(f"The given lines of {_listed(self.new_task)} changed: compare yours with chapters/")
        if self.beside:
            cells = "a cell" if len(self.beside) == 1 else f"{len(self.beside)} cells"
            told.append(f"You had edited {cells} that the course changed, too: yours follows the new version")
        return ". ".join(told) + "."


def _listed(items: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(items[:-1]), items[-1]]))


def update_notebook(
    base: dict | None, mine: dict, new: dict, other_task: Collection[str] = (), carried: Collection[str] = ()
) -> tuple[dict, Changes]:
    """Return an updated copy of `mine`, and what changed. All three notebooks are JSON, and none of them is modified.

    other_task: exercises whose number now belongs to a different task
    carried:    those of them whose answers move elsewhere (see moved_answers.py). All other answers to exercises in
                `other_task` stay, as cells of the learner's own
    """
    changes = Changes()
    before = {cell.id: cell for cell in parse_cells(base)} if base else {}
    after = parse_cells(new)
    successors = _successors(list(before.values()), after)
    cells = parse_cells(mine)
    raw = dict(zip(map(id, cells), mine["cells"], strict=True))
    versions, own = _sort(cells, before, after, successors, changes)
    predecessors = {later: before[earlier] for earlier, later in successors.items()}
    result: list[dict] = [copy.deepcopy(raw[id(cell)]) for cell in own.get("", [])]
    for today, raw_today in zip(after, new["cells"], strict=True):
        chosen, beside = _choose(
            predecessors.get(today.id), versions.get(today.id), today, bool(base), other_task, changes
        )
        if beside is not None and "exercise" in today.marks and today.marks["exercise"] in carried:
            beside = None
        if chosen is today:
            result.append(copy.deepcopy(raw_today))
        elif chosen is not None:
            metadata = copy.deepcopy(chosen.metadata) | copy.deepcopy(today.metadata)  # keeps what is folded
            result.append(copy.deepcopy(raw_today) | _contents(raw[id(chosen)]) | {"metadata": metadata})
        follow = [*([beside] if beside else []), *own.get(today.id, [])]
        result += [_as_own(raw[id(cell)]) if cell is beside else copy.deepcopy(raw[id(cell)]) for cell in follow]
    _give_ids(result)
    merged = copy.deepcopy(mine) | {
        key: copy.deepcopy(new[key]) for key in ("nbformat", "nbformat_minor") if key in new
    }
    return merged | {"cells": result}, changes


def _as_own(cell: dict) -> dict:
    """Return a copy of a chapter's cell that belongs to no exercise, so that it counts as one of the learner's own."""
    metadata = {key: value for key, value in cell.get("metadata", {}).items() if key not in ("tplab", "tags")}
    return copy.deepcopy(cell) | {"metadata": copy.deepcopy(metadata), "id": ""}


def _contents(cell: dict) -> dict:
    """Return what a learner may have changed in a cell of the chapter, apart from its metadata."""
    return {
        key: copy.deepcopy(cell[key]) for key in ("source", "outputs", "execution_count", "attachments") if key in cell
    }


def _successors(before: list[Cell], after: list[Cell]) -> dict[str, str]:
    """Map the id of each cell in the base to the id of the new cell that corresponds to it, if there is one."""
    same = {cell.id for cell in before} & {cell.id for cell in after}
    found = {id: id for id in same}
    old, new = [cell.id for cell in before], [cell.id for cell in after]
    for _, start, stop, new_start, new_stop in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        left = [cell for cell in after[new_start:new_stop] if cell.id not in same]
        for cell in before[start:stop]:
            if cell.id in same:
                continue
            match = next((other for other in left if _versions_of_one(cell, other)), None)
            if match:
                found[cell.id] = match.id
                left = left[left.index(match) + 1 :]
    return found


def _versions_of_one(a: Cell, b: Cell) -> bool:
    return a.kind == b.kind and SequenceMatcher(None, a.source, b.source, autojunk=False).ratio() >= ALIKE


def _sort(
    cells: list[Cell], before: dict[str, Cell], after: list[Cell], successors: dict[str, str], changes: Changes
) -> tuple[dict[str, Cell], dict[str, list[Cell]]]:
    """Return, by the id of each new cell, the learner's version of it and the learner's own cells that follow it."""
    kinds = {cell.id: cell.kind for cell in after}
    owners = [owner or successors.get(cell.id, "") for cell, owner in zip(cells, find_cells(after, cells), strict=True)]
    versions: dict[str, Cell] = {}
    for cell, owner in zip(cells, owners, strict=True):
        better = owner and cell.kind == kinds[owner]
        if better and (owner not in versions or (cell.id == owner and versions[owner].id != owner)):
            versions[owner] = cell
    own: dict[str, list[Cell]] = {}
    last = ""
    for cell, owner in zip(cells, owners, strict=True):
        if owner and versions.get(owner) is cell:
            last = owner
        elif cell.id in before and cell.id not in successors and _plain(cell) == _plain(before[cell.id]):
            changes.removed.append(cell.id)
        elif cell.source.strip():
            own.setdefault(last, []).append(cell)
    return versions, own


def _choose(
    old: Cell | None, mine: Cell | None, today: Cell, has_base: bool, other_task: Collection[str], changes: Changes
) -> tuple[Cell | None, Cell | None]:
    """Return the cell to put in place of `today` (the new cell), and one to put below it. Either may be None."""
    untouched = old is not None and _plain(old) == _plain(today)  # the course didn't change it
    if mine is None:
        if untouched and not today.marks:
            return None, None  # the learner deleted it
        changes.added.append(today.id)
        return today, None
    if _plain(mine) == _plain(today):
        return mine, None
    if "check" not in today.marks and not (old is not None and _plain(mine) == _plain(old)):  # the learner edited it
        if "exercise" in today.marks or "predict" in today.marks:
            number = today.marks.get("exercise")
            if number in other_task or (number is None and _fields(mine) != _fields(today)):
                changes.changed.append(today.id)
                return today, mine if number else None
            if number:
                changes.kept.append(number)
            if number and old is not None and not untouched:
                changes.new_task.append(number)
            return mine, None
        if untouched:
            return mine, None
        changes.changed.append(today.id)
        changes.beside.append(today.id)
        return today, mine
    changes.changed.append(today.id)
    return today, None


def _fields(prediction: Cell) -> set[str]:
    """Return what a predict cell asks for: {"calls", "bytes"} for predict("4.a", calls=..., bytes=...)."""
    return set(re.findall(r"(\w+) *=", prediction.source))


def _plain(cell: Cell) -> str:
    return "\n".join(line.rstrip() for line in cell.source.strip().split("\n"))


def _give_ids(cells: list[dict]) -> None:
    """Give each cell a unique id, which nbformat 4.5 requires."""
    used: set[str] = set()
    for cell in cells:
        if not isinstance(cell.get("id"), str) or not cell["id"] or cell["id"] in used:
            cell["id"] = uuid.uuid4().hex[:8]
        used.add(cell["id"])


def as_text(notebook: dict) -> str:
    """Return the text of a notebook in the form in which JupyterLab saves it."""
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
