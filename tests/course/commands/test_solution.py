"""`tplab solution`: the explained answer, after a question, and no file is touched."""

import re
from unittest import mock

from tests import saying
from tplab.course.commands import cli, reset


def run(root, *arguments: str) -> int:
    return cli.main(["solution", "--root", str(root), *arguments])


def files(root) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_answer_and_its_hints(root, capsys):
    before = files(root)
    assert run(root, "90.2", "--yes") == 0
    out = capsys.readouterr().out
    assert re.search(saying("90.2", "Double 2"), out)
    assert 'def double_2(x):\n    """Twice x."""\n    return 2 * x\n' in out
    assert "to itself" in out
    assert "double_1" not in out
    assert files(root) == before


def test_it_asks_first_and_without_anyone_to_ask_shows_nothing(root, monkeypatch, capsys):
    monkeypatch.setattr(reset.sys.stdin, "isatty", lambda: True, raising=False)
    for answers, shown in ((["y"], True), (["ye", " Y"], True), ([""], False), (["n"], False), ([EOFError], False)):
        monkeypatch.setattr("builtins.input", mock.Mock(side_effect=answers))
        assert run(root, "90.1") == (130 if answers == [EOFError] else 0)
        out = capsys.readouterr().out
        assert "tplab hint 90.1" in " ".join(out.split())
        assert ("return 2 * x" in out) == shown
    monkeypatch.setattr(reset.sys.stdin, "isatty", lambda: False, raising=False)
    assert run(root, "90.1") == 2
    said = capsys.readouterr()
    assert "--yes" in " ".join(said.err.split())
    assert "return" not in said.out
