"""Tables of mistakes are tried again when they have changed, and a row that asks the wrong question is reported."""

import json
import shutil
from dataclasses import replace

import pytest

from tests import ROOT
from tplab.course.checks import known_mistakes
from tplab.course.notebooks.mistakes import Mistake, Table


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A course with one chapter, whose tables have been tried."""
    (tmp_path / "solutions").mkdir()
    shutil.copy(next(ROOT.glob("solutions/02_*.py")), tmp_path / "solutions")
    monkeypatch.setattr(known_mistakes, "problems", lambda number: iter(()))
    assert known_mistakes.main(["--root", str(tmp_path)]) == 0
    monkeypatch.undo()
    return tmp_path


def with_a_copy(own: Table) -> tuple[Table, Mistake]:
    """The table with a copy of its first mistake under its last question, and the copied mistake."""
    first = next(mistake for mistake in own.mistakes if not mistake.fails)
    last = own.rows[-1]
    copied = replace(last, mistakes=(*last.mistakes, replace(first, name="a copy", where="ch02/mistakes.md:999")))
    return replace(own, rows=(*own.rows[:-1], copied)), first


def test_two_rows_that_behave_identically_under_different_questions_are_reported_with_both_lines(
    root, monkeypatch, capsys
):
    original = known_mistakes._sections_of
    own = original("2.1")["2.1"]
    changed, first = with_a_copy(own)
    monkeypatch.setattr(
        known_mistakes, "_sections_of", lambda number: {"2.1": changed} if number == "2.1" else original(number)
    )
    for arguments in (["--check"], []):
        assert known_mistakes.main(["--root", str(root), *arguments]) == 1
        refused = [line for line in capsys.readouterr().out.splitlines() if line.startswith("refused")]
        stands_at = next(row.where for row in own.rows if first in row.mistakes)
        assert len(refused) == 1
        assert "ch02/mistakes.md:999" in refused[0]
        assert stands_at in refused[0]
    assert "2.1" not in json.loads((root / "solutions" / "tables.json").read_text())


def test_a_changed_table_is_tried_once_and_a_changed_wording_not_at_all(root, monkeypatch, capsys):
    original, tried = known_mistakes._sections_of, []

    def try_it(number):
        tried.append(number)
        return iter(())

    def changed(change):
        def sections(number):
            found = original(number)
            return {title: change(own) for title, own in found.items()} if number == "2.2" else found

        return sections

    monkeypatch.setattr(known_mistakes, "problems", try_it)
    reworded = changed(lambda own: replace(own, rows=tuple(replace(row, ask=row.ask + "!") for row in own.rows)))
    monkeypatch.setattr(known_mistakes, "_sections_of", reworded)
    assert known_mistakes.main(["--root", str(root), "--check"]) == 0
    assert tried == []
    monkeypatch.setattr(known_mistakes, "_sections_of", changed(lambda own: replace(own, rows=own.rows[:-1])))
    assert known_mistakes.main(["--root", str(root), "--check"]) == 1
    assert "2.2 has changed" in capsys.readouterr().out
    assert known_mistakes.main(["--root", str(root)]) == 0
    assert known_mistakes.main(["--root", str(root), "--check"]) == 0
    assert tried == ["2.2", "2.2"]
