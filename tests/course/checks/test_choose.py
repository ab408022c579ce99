"""The symptoms in a table of mistakes, and the question about a run that failed."""

import pytest

from tplab.course.checks.choose import about_report, fits
from tplab.course.checks.differences import Difference, Differences
from tplab.course.notebooks.mistakes import COURSE, SHARED, Row, Table, shared, tables


def found(*named: tuple[str, int, str], p: int = 3, note: str = "") -> Differences:
    return Differences(p, [Difference(*one, f"text of {one[0]}") for one in named], note=note)


WRONG = found(("out", 0, "sum of x[1]"), ("dx", 1, "1/p"), note="x with 3 dimensions")
OUT = found(("out", 0, "value"), ("dx", 0, "not run"))


@pytest.mark.parametrize(
    ("symptom", "differences", "expected"),
    [
        ("out: sum of x[1]", WRONG, True),  # a kind of difference is given by its words or a pattern
        ("out: sum of x.*", WRONG, True),
        ("out: zeros / sum of .*", WRONG, True),
        ("dx: p times / 1/p and p = 3", WRONG, True),
        ("out and not p = 30", WRONG, True),
        ("out and case 3 dim", WRONG, True),
        ("only dx", WRONG, False),  # exactly the observations that differ
        ("only dx, out", WRONG, True),
        ("only out", OUT, True),  # what was not run is no difference
        ("dx", OUT, False),
        ("some out", WRONG, True),  # on some ranks, and not on all
        ("some out", found(*(("out", rank, "value") for rank in range(3))), False),
        ("malformed", found(("db", 1, "none")), False),  # only an output can be
        *(("malformed", found(("out", 0, kind)), True) for kind in ("none", "type", "structure", "dtype", "missing")),
    ],
)
def test_a_symptom_fits_what_differs(symptom, differences, expected):
    assert fits(symptom, differences) is expected


@pytest.mark.parametrize(
    ("last_line", "undefined"),
    [
        ("NameError: name 'dx' is not defined", True),
        ("RuntimeError: mat1 and mat2 shapes cannot be multiplied", False),
    ],
)
def test_an_undefined_name_gets_its_question_before_those_of_the_exercise(last_line, undefined):
    own = Table("1.1", (Row("Which shapes?", "", symptoms=("crash",)),))
    asked = about_report(own, f"Traceback\n{last_line}", "crash")
    assert asked == (shared("undefined") if undefined else "Which shapes?")


MISSING, DROPPED, STUCK = "Which rank is missing?", "Which call doesn't pass its group?", "Who waits for whom?"
OWN = Table(
    "1.1",
    (
        Row(STUCK, "", symptoms=("stuck",)),
        Row(MISSING, "", symptoms=("case of 2 ranks and report not part of group",)),
        Row(DROPPED, "", symptoms=("in groups", "case crashes and crash")),
    ),
)


@pytest.mark.parametrize(
    ("report", "ended", "note", "in_groups", "asked"),
    [
        ("0 is not part of group", "late", "a group of 2 ranks", True, MISSING),
        ("0 is not part of group", "crash", "a group of 4 ranks", True, DROPPED),
        ("", "late", "a group of 4 ranks", True, ""),
        ("", "crash", "what crashes", False, DROPPED),
        ("", "stuck", "what crashes", False, STUCK),
        ("", "late", "what crashes", False, ""),
    ],
)
def test_a_question_about_a_failed_run_may_depend_on_the_case_and_on_its_groups(report, ended, note, in_groups, asked):
    assert about_report(OWN, report, ended, note=note, in_groups=in_groups) == asked


TABLES = [SHARED, *sorted((COURSE / "exercises").glob("*/mistakes.md"))]


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.parent.name)
def test_every_part_of_every_symptom_is_a_valid_pattern(path):
    symptoms = [symptom for each in tables(path).values() for row in each.rows for symptom in row.symptoms]
    assert symptoms
    for term in {term for symptom in symptoms for term in symptom.split(" and ")}:
        fits(term, WRONG)  # raises re.error for half a pattern, such as one with ", " in parentheses after "only"
        about_report(Table("1.1", (Row("?", "", symptoms=(term,)),)), "Traceback", "stuck")
