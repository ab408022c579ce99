"""The symptoms in a table of mistakes, and the question about a run that failed."""

import pytest

from tplab.course.checks.choose import about_report, fits
from tplab.course.checks.differences import Difference, Differences
from tplab.course.notebooks.mistakes import COURSE, SHARED, Row, Table, shared, tables

WRONG = Differences(3, [Difference("out", 0, "sum of x[1]", "it's a sum"), Difference("dx", 1, "1/p", "too small")])


@pytest.mark.parametrize(
    ("symptom", "expected"),
    [
        ("out: sum of x[1]", True),
        ("out: sum of x.*", True),
        ("out: sum of", False),
        ("out: zeros / sum of .*", True),
        ("dx: 1/p", True),
        ("dx: p times / 1/p and p = 3", True),
        ("p = 3", True),
        ("p = 1", False),
        ("out and not p = 30", True),
    ],
)
def test_a_kind_of_difference_is_given_by_its_words_or_a_pattern(symptom, expected):
    assert fits(symptom, WRONG) is expected


@pytest.mark.parametrize(
    ("last_line", "undefined"),
    [
        ("NameError: name 'dx' is not defined", True),
        ("UnboundLocalError: cannot access local variable 'dx'", True),
        ("ModuleNotFoundError: No module named 'tlpab'", True),
        ("RuntimeError: mat1 and mat2 shapes cannot be multiplied", False),
    ],
)
def test_an_undefined_name_gets_its_question_before_those_of_the_exercise(last_line, undefined):
    own = Table("1.1", (Row("Which shapes?", "", symptoms=("crash",)),))
    asked = about_report(own, f"Traceback\n{last_line}", stuck=False)
    assert asked == (shared("undefined") if undefined else "Which shapes?")


TABLES = [SHARED, *sorted((COURSE / "exercises").glob("*/mistakes.md"))]


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.parent.name)
def test_every_part_of_every_symptom_is_a_valid_pattern(path):
    symptoms = [symptom for each in tables(path).values() for row in each.rows for symptom in row.symptoms]
    assert symptoms
    for term in {term for symptom in symptoms for term in symptom.split(" and ")}:
        fits(term, WRONG)  # raises re.error for half a pattern, such as one with ", " in parentheses after "only"
        about_report(Table("1.1", (Row("?", "", symptoms=(term,)),)), "Traceback", stuck=True)
