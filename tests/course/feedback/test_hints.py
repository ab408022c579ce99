"""Hints: one at a time in the shell, whatever has become of the state's file."""

import json
import os
import re
from unittest import mock

import pytest

from tests import saying
from tplab.course.checks import exercises as checking
from tplab.course.checks import trials
from tplab.course.commands import cli
from tplab.course.feedback import hints
from tplab.course.feedback.verdict import CheckFailed
from tplab.course.notebooks.rewrite import fold_hints


def test_unfolding_is_the_inverse_of_folding():
    written = ["One $x_1$.", "Two\n\n```python\nif x:\n    y\n```", "Three `a`\nand more."]
    listed = "\n".join(
        f"{place}. " + text.replace("\n", "\n   ").replace("\n   \n", "\n\n") for place, text in enumerate(written, 1)
    )
    assert hints.unfold(fold_hints(listed)) == written


@pytest.fixture
def show(root):
    """Show the next hint of an exercise, as `tplab hint` does."""
    return lambda number="90.1": cli.main(["hint", number, "--root", str(root)])


def test_every_call_shows_the_next_one_and_the_last_one_stays(root, show, capsys):
    shown = []
    for _ in range(4):
        assert show() == 0
        shown.append(capsys.readouterr().out)
    assert [re.findall(r"(\d) of 3", text) for text in shown] == [["1"], ["2"], ["3"], ["3"]]
    assert "Add." in shown[0]
    assert "to itself" not in shown[0]
    show("90.2")
    assert json.loads(next(root.rglob(hints.STATE)).read_text()) == {"90.1": 3, "90.2": 1}


def test_without_a_number_it_is_the_next_exercise_to_do(root, capsys):
    assert cli.main(["hint", "--root", str(root)]) == 0
    assert re.search(saying("90.1", "1 of 3"), capsys.readouterr().out)


def test_a_hint_is_shown_even_if_that_cannot_be_remembered(show, monkeypatch, capsys):
    """tests/common/test_files.py says that a file is replaced as a whole."""
    monkeypatch.setattr(os, "replace", mock.Mock(side_effect=OSError("no space left on device")))
    assert show() == 0
    assert "1 of 3" in capsys.readouterr().out


def test_a_damaged_solution_is_told_and_no_hint_is_remembered(root, show, capsys):
    (root / "solutions" / "90_tiny.ipynb").write_text('{"cells": [')
    assert show() == 2
    assert re.search(saying("90_tiny.ipynb", "JSON"), "".join(capsys.readouterr().err.split()))
    assert not list(root.rglob(hints.STATE))


def test_a_damaged_state_counts_as_empty(root, show, capsys):
    show()
    capsys.readouterr()
    (path,) = root.rglob(hints.STATE)
    for content in (b"", b"[]", b"\xff\xfe", b'{"90.1": "two"}', b'{"90.1": -4}', b"[" * 9999):
        path.write_bytes(content)
        assert show() == 0
        assert "1 of 3" in capsys.readouterr().out
        assert json.loads(path.read_text()) == {"90.1": 1}


class Fails(trials.Trial):
    def check(self, number, answers):
        raise CheckFailed(f"Exercise {number}: it is 5.", question="Why?")


def test_a_failed_check_says_where_its_hints_are(root, monkeypatch, chapter):
    trials.exercise("90.1", "Double", takes=["answer"], trials=[Fails()], passed="")
    monkeypatch.chdir(root / "chapters")
    with pytest.raises(CheckFailed) as caught:
        checking.check("90.1", None)
    assert caught.value.exercise == "90.1"
    assert str(caught.value).endswith("tplab hint 90.1")
    assert "tplab hint 90.1" in caught.value.html()
