"""Lend the learner's library the course's solution to an exercise whose answer isn't written yet."""

from functools import cache
from typing import Any

from tplab.course.grade.answers import merge
from tplab.course.learn.passages import extract_from
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
    reference = find_reference(exercise)
    merged = merge(reference, reference)
    namespace: dict[str, Any] = {"__name__": f"borrowed_{exercise.replace('.', '_')}"}
    for number in dict.fromkeys(piece.number for piece in merged.pieces if piece.role == "exercise"):
        passage = extract_from(merged, number)
        exec("\n".join([*passage.imports, *passage.helpers, *passage.code]), namespace)
        if number == exercise:
            break
    return namespace
