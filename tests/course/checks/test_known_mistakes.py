"""Tables of mistakes are tried again when they have changed, and a row that asks the wrong question is reported."""

import json
import re
import shutil
from dataclasses import replace

import pytest

from tests import ROOT
from tplab.course.checks import known_mistakes
from tplab.course.notebooks.mistakes import Table


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A course with one chapter, whose tables have been tried."""
    (tmp_path / "solutions").mkdir()
    shutil.copy(next(ROOT.glob("solutions/02_*.py")), tmp_path / "solutions")
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setattr(known_mistakes, "_problems_of_each", lambda numbers: ((number, []) for number in numbers))
        assert known_mistakes.main([]) == 0
    monkeypatch.chdir(tmp_path)
    return tmp_path


def in_this_process(numbers):
    return ((number, known_mistakes.problems(number)) for number in numbers)


def change_tables(monkeypatch, number, change):
    original = known_mistakes._sections_of
    monkeypatch.setattr(
        known_mistakes, "_sections_of",
        lambda each: {title: change(own) if each == number else own for title, own in original(each).items()},
    )  # fmt: skip


def copy_the_first_mistake(own: Table) -> Table:
    """The copy stands below the last question, and a second one among the right answers."""
    first = next(mistake for mistake in own.mistakes if not mistake.fails)
    *rows, last = own.rows
    copied = replace(first, name="a copy", where="ch02/mistakes.md:998")
    below_last = replace(last, mistakes=(*last.mistakes, copied))
    return replace(own, rows=(*rows, below_last), right=(replace(first, where="ch02/mistakes.md:999"),))


def test_a_mistake_that_gets_another_question_is_reported_with_the_lines_of_both(root, monkeypatch, capsys):
    own = known_mistakes._sections_of("2.1")["2.1"]
    first = next(row for row in own.rows if any(not mistake.fails for mistake in row.mistakes))
    change_tables(monkeypatch, "2.1", copy_the_first_mistake)
    monkeypatch.setattr(known_mistakes, "_problems_of_each", in_this_process)
    assert known_mistakes.main([]) == 1
    copied, right = [line for line in capsys.readouterr().out.splitlines() if "mistakes.md:" in line]
    assert "ch02/mistakes.md:998" in copied
    assert first.where in copied
    assert "ch02/mistakes.md:999" in right
    assert "2.1" not in json.loads((root / "solutions" / "tables.json").read_text())


@pytest.mark.usefixtures("root")
def test_a_changed_table_is_tried_once_and_a_changed_wording_not_at_all(monkeypatch, capsys):
    tried = []

    def try_them(numbers):
        tried.extend(numbers)
        return ((number, []) for number in numbers)

    def reword(own: Table) -> Table:
        return replace(own, rows=tuple(replace(row, ask=row.ask + "!") for row in own.rows))

    monkeypatch.setattr(known_mistakes, "_problems_of_each", try_them)
    change_tables(monkeypatch, "2.2", reword)
    assert known_mistakes.main(["--check"]) == 0
    change_tables(monkeypatch, "2.2", lambda own: replace(own, rows=own.rows[:-1]))
    assert known_mistakes.main(["--check"]) == 1
    assert re.findall(r"\d\.\d", capsys.readouterr().out) == ["2.2"]
    assert tried == []
    assert known_mistakes.main([]) == 0
    assert known_mistakes.main(["--check"]) == 0
    assert tried == ["2.2"]


def test_a_table_depends_on_the_code_that_its_chapter_and_its_checks_import_but_not_on_its_words():
    code = dict(known_mistakes._code_behind(next(ROOT.glob("solutions/02_*.py"))))
    assert {"tensor/sharding.py", "course/checks/cases.py", "course/exercises/ch02/checks.py"} <= code.keys()
    assert "course/grade/run.py" not in code
    assert '"""' not in code["tensor/sharding.py"]
