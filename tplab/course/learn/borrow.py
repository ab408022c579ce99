"""Lend the learner's library the course's solution to an exercise whose answer isn't written yet."""

from functools import cache
from typing import Any

from tplab.course.grade.answers import Piece, role_of
from tplab.course.learn.passages import Passage, extract
from tplab.course.notebooks.reference import find_reference


def borrow(exercise: str, name: str) -> Any:
    """Return a function or class from the course's solution to an exercise. Raises ImportError if it isn't there."""
    namespace = _namespace(exercise)
    if name not in namespace:
        raise ImportError(f"exercise {exercise} has no {name} to borrow: pass one of its exercises again")
    return namespace[name]


@cache
def _namespace(exercise: str) -> dict[str, Any]:
    """Run the solutions to an exercise and to all earlier ones in its chapter, and return the names they define."""
    pieces, earlier = [], []
    for cell in find_reference(exercise):
        if cell.kind == "code":
            role, number = role_of(cell)
            pieces.append(Piece(role, cell.id, cell.source, number, cell))
            earlier += [number] if role == "exercise" else []
            if (role, number) == ("exercise", exercise):
                break
    namespace: dict[str, Any] = {"__name__": f"borrowed_{exercise.replace('.', '_')}"}
    for number in earlier:
        passage: Passage = extract(number, pieces)
        exec("\n".join([*passage.imports, *passage.helpers, *passage.code]), namespace)
    return namespace
