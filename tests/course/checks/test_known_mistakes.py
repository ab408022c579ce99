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


def copy_the_first_mistake_to_the_last_question(own: Table) -> Table:
    first = next(mistake for mistake in own.mistakes if not mistake.fails)
    *rows, last = own.rows
    copied = replace(first, name="a copy", where="ch02/mistakes.md:999")
    return replace(own, rows=(*rows, replace(last, mistakes=(*last.mistakes, copied))))


def call_the_first_mistake_right(own: Table) -> Table:
    wrong = next(mistake for mistake in own.mistakes if not mistake.fails)
    return replace(own, rows=(), right=(replace(wrong, where="ch02/mistakes.md:999"),))


@pytest.mark.parametrize("change", [copy_the_first_mistake_to_the_last_question, call_the_first_mistake_right])
def test_a_mistake_that_gets_another_question_is_reported_with_the_lines_of_both(change, root, monkeypatch, capsys):
    own = known_mistakes._sections_of("2.1")["2.1"]
    first = next(row for row in own.rows if any(not mistake.fails for mistake in row.mistakes))
    change_tables(monkeypatch, "2.1", change)
    monkeypatch.setattr(known_mistakes, "_problems_of_each", in_this_process)
    assert known_mistakes.main([]) == 1
    (refused,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("refused")]
    assert "ch02/mistakes.md:999" in refused
    assert first.where in refused or change is call_the_first_mistake_right  # it has no questions
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


CHECKS = "import tplab.course.checks.trials\nfrom tplab.tensor.sharding import shard\n"
FILES = {
    "tplab/course/exercises/ch02/checks.py": CHECKS,
    "tplab/course/checks/trials.py": "CASES = 1\n",
    "tplab/course/grade/run.py": "LIMIT = 1\n",
    "tplab/tensor/sharding.py": "from tplab.course.grade import run\n\n\ndef shard():\n    return 1\n",
    "solutions/02_cuts.py": "from tplab.common.units import GB\n",
    "tplab/common/units.py": "GB = 10**9\n",
    "tplab/data/zero.py": "STAGE = 1\n",
}


@pytest.mark.parametrize(
    ("path", "text", "counts"),
    [
        ("tplab/course/exercises/ch02/checks.py", CHECKS + "MORE = 1\n", True),
        ("tplab/tensor/sharding.py", "def shard():\n    return 2\n", True),
        ("tplab/course/checks/trials.py", "CASES = 2\n", True),
        ("tplab/common/units.py", "GB = 2**30\n", True),
        (
            "tplab/tensor/sharding.py",
            '"""Cut."""\n# a comment\nfrom tplab.course.grade import run\ndef shard():\n    """Cut\n    it."""\n'
            "    return 1\n",
            False,
        ),
        ("tplab/course/grade/run.py", "LIMIT = 2\n", False),
        ("tplab/data/zero.py", "STAGE = 2\n", False),
    ],
)
def test_code_that_a_chapter_or_its_checks_import_counts_but_not_its_words(tmp_path, monkeypatch, path, text, counts):
    for name, source in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    monkeypatch.setattr(known_mistakes, "COURSE", tmp_path / "tplab" / "course")
    monkeypatch.setattr(known_mistakes, "TPLAB", tmp_path / "tplab")
    for name in ("_imports", "_code", "_code_behind"):  # without their caches
        monkeypatch.setattr(known_mistakes, name, getattr(known_mistakes, name).__wrapped__)
    before = known_mistakes._code_behind(tmp_path / "solutions" / "02_cuts.py")
    (tmp_path / path).write_text(text)
    after = known_mistakes._code_behind(tmp_path / "solutions" / "02_cuts.py")
    checks = {"course/checks/trials.py", "course/exercises/ch02/checks.py"}
    assert {name for name, _ in before} == checks | {"common/units.py", "tensor/sharding.py"}
    assert (before != after) == counts
