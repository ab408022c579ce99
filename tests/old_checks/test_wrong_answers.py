"""Wrong answers to the exercises whose checks aren't tables yet (tests/wrong_answers): each gets the words it must get.

`make test-old-checks` runs them. A chapter whose check is a table has its wrong answers there, and `make test` runs
those.
"""

import importlib
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path

import pytest

import tests.wrong_answers
from tests.course.test_chapters import EXERCISES, IN_TABLES, NUMBERS, spread
from tests.wrong_answers import has_table, plain, run_wrong_answer, wrong_answers
from tplab.course.checks import Question
from tplab.course.notebooks.numbering import package, prefix

WRONG = [wrong for number in NUMBERS for wrong in wrong_answers(number)]
IN_THE_OLD_FORM = [exercise for exercise in EXERCISES if exercise not in IN_TABLES]


@pytest.mark.parametrize("wrong", spread(WRONG, lambda wrong: f"{wrong.exercise} {wrong.name}"))
def test_wrong_answer_is_caught(wrong):
    run_wrong_answer(wrong)


@pytest.mark.parametrize("exercise", IN_THE_OLD_FORM)
def test_five_wrong_answers_for_each_exercise(exercise):
    names = Counter(wrong.name for wrong in WRONG if wrong.exercise == exercise)
    assert len(names) >= 5
    assert max(names.values()) == 1
    assert all(len(wrong.says) >= 10 for wrong in WRONG if wrong.exercise == exercise), "say more of the message"


def questions_in(value: object, depth: int = 0) -> Iterator[Question]:
    """The questions in a value of a module: itself, or in a tuple, a mapping or a dataclass, however deep."""
    if isinstance(value, Question):
        yield value
    elif depth < 4 and isinstance(value, tuple | list):
        for item in value:
            yield from questions_in(item, depth + 1)
    elif depth < 4 and isinstance(value, dict):
        yield from questions_in(list(value.values()), depth)
    elif depth < 4 and is_dataclass(value) and not isinstance(value, type):
        yield from questions_in(list(vars(value).values()), depth)


@pytest.mark.parametrize("number", [number for number in NUMBERS if not has_table(number)])
def test_every_question_is_what_some_wrong_answer_must_be_asked(number):
    """By the words that the wrong answers of the chapter must get; `test_wrong_answer_is_caught` sees that they do."""
    chapters = importlib.import_module(f"tplab.course.exercises.{package(number)}")
    modules = [module for name, module in sys.modules.items() if f"{name}.".startswith(f"{chapters.__name__}.")]
    asked = {question.ask for module in modules for value in vars(module).values() for question in questions_in(value)}
    expected = [plain(wrong.says) for wrong in WRONG if wrong.exercise.startswith(f"{prefix(number)}.")]
    assert [ask for ask in asked if not any(words in plain(ask) for words in expected)] == []


def test_every_wrong_answer_belongs_to_an_exercise():
    assert {wrong.exercise for wrong in WRONG} == set(IN_THE_OLD_FORM)
    files = {path.stem for path in Path(tests.wrong_answers.__file__).parent.glob("*.py")}
    assert files - {"__init__", "accepted"} == {package(number) for number in NUMBERS if not has_table(number)}
