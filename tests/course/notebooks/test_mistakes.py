"""Tables of mistakes: how they're read, and errors in those that contradict their reference answer."""

from pathlib import Path

import pytest

from tests import saying
from tplab.course.notebooks.mistakes import Mistake, TableError, shared, tables

REFERENCE = '''
class Double(Function):
    def forward(ctx, x):
        """Return 2 x."""
        y = x + x
        return y


def half(x):
    return x / 2
'''
TABLE = """# Chapter 90

## 90.1

### Is it twice x?
- three times: `x + x` → `x + x + x`
- nothing at all: `def Double.forward` →

  ```python
  y = 0 * x
  if y.any():
      y += 1
  return y
  ```
  and `x / 2` → nothing
- when out: zeros
- when only out and not dx

### [never waited]
- doesn't wait (fails): `*` → `raise SystemExit`

### (passes)
- multiplies: `x + x` → `2 * x`
"""


@pytest.fixture
def written(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "ch90" / "mistakes.md"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        tables.cache_clear()
        return path

    yield write
    tables.cache_clear()


def test_a_table_has_questions_with_mistakes_and_symptoms(written):
    own = tables(written(TABLE))["90.1"]
    first, second = own.rows
    assert first.ask == "Is it twice x?"
    assert first.symptoms == ("out: zeros", "only out and not dx")
    assert [(each.name, each.fails) for each in own.mistakes] == [
        ("three times", False),
        ("nothing at all", False),
        ("doesn't wait", True),
    ]
    assert (second.key, second.ask) == ("never waited", shared("never waited"))
    assert [each.of("x + x") for each in own.right] == ["2 * x"]
    assert first.mistakes[0].where == "ch90/mistakes.md:6"


def test_a_mistake_changes_the_reference_answer(written):
    three, nothing, everything = tables(written(TABLE))["90.1"].mistakes
    assert three.of(REFERENCE) == REFERENCE.replace("x + x", "x + x + x")
    body = "        y = 0 * x\n        if y.any():\n            y += 1\n        return y\n"
    changed = REFERENCE.replace("        y = x + x\n        return y\n", body).replace("x / 2", "")
    assert nothing.of(REFERENCE) == changed
    assert everything.of(REFERENCE) == "raise SystemExit"


def test_a_text_that_occurs_twice_can_be_limited_to_one_function():
    twice = REFERENCE + "\n\ndef double(x):\n    return x + x\n"
    with pytest.raises(TableError, match=saying("'x + x'", "2 times")):
        Mistake("three times", (("x + x", "3 * x"),), fails=False, where="").of(twice)
    for function, line in (("Double.forward", "y = x + x"), ("double", "return x + x")):
        mistake = Mistake("three times", ((f"def {function}: x + x", "3 * x"),), fails=False, where="")
        assert mistake.of(twice) == twice.replace(line, line.replace("x + x", "3 * x"))


def test_a_space_after_a_colon_stands_for_a_line_break_too():
    reference = "def sign(x):\n    if x > 0:\n        return 1  # plus\n    if x < 0:\n        return -1\n"
    mistake = Mistake("zero is positive", (("if x > 0: return 1", "if x >= 0: return 1"),), fails=False, where="")
    first = "    if x > 0:\n        return 1  # plus\n"
    assert mistake.of(reference) == reference.replace(first, "    if x >= 0: return 1  # plus\n")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("`x + x` →", "`x - x` →"), ("'x - x'", "0 times")),
        (("`def Double.forward`", "`def Double.backward`"), ("0 definitions", "backward")),
        (("`x + x` → `x + x + x`", "`x + x` `x + x + x`"), ("`old text` → `new text`",)),
        (("[never waited]", "[no such key]"), ("[no such key]", "checks/mistakes.md")),
    ],
)
def test_a_table_that_contradicts_itself_or_its_reference_answer_is_an_error(written, change, says):
    old, new = change
    assert old in TABLE
    with pytest.raises(TableError, match=saying("ch90/mistakes.md:", *says)):
        _ = [one.of(REFERENCE) for one in tables(written(TABLE.replace(old, new, 1)))["90.1"].mistakes]
