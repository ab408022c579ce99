"""The command line as a whole: its options, its help, and how quickly its commands answer."""

import re
import shutil
import subprocess
import sys

import pytest

from tests import saying
from tplab.course.commands import cli


@pytest.mark.parametrize("arguments", [["check", "--nonsense"], ["progress", "--port=1"], ["nonsense"], []])
def test_only_lab_takes_options_that_it_does_not_know(arguments):
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 2


def test_every_command_says_what_it_is_for(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    out = capsys.readouterr().out
    for command in ("build", *(command.__name__.rpartition(".")[2] for command in cli.COMMANDS)):
        line = next(line for line in out.splitlines() if line.split()[:1] == [command])
        assert len(line.split()) > 3


MISUSES = {
    "check 17": saying("chapter 17", "90"),
    "check --exercise 90.99": saying("90.99", "90.1, 90.2, 90.3"),
    "check 4 --exercise 90.1": saying("tplab check 4", "tplab check --exercise 4.2"),
    "check 90 --notebook nowhere.ipynb": saying("file nowhere.ipynb"),
    "check --notebook mine.ipynb": saying("tplab check 4 --notebook mine.ipynb"),
    "hint 90.9": saying("90.9", "90.1, 90.2, 90.3"),
    "hint 90": saying("tplab hint 4.2"),
    "solution 90.9 --yes": saying("90.9", "90.1, 90.2, 90.3"),
    "reset --yes": saying("tplab reset 4", "tplab reset --exercise 4.2"),
    "reset 90 --exercise 90.1 --yes": saying("tplab reset 4", "tplab reset --exercise 4.2"),
    "reset --exercise 90.9 --yes": saying("90.9", "90.1, 90.2, 90.3"),
    "grade nowhere": saying("folder nowhere"),
    "grade class --out class": saying("--out"),
    "grade class --out other": saying("--out"),
    "grade class --out class/a.ipynb": saying("--out"),
    "lab 17": saying("chapter 17", "90"),  # makes the learner's folder before it looks for the chapter
}


def test_misuse_is_told_in_a_sentence_and_changes_no_file(root, monkeypatch, capsys):
    monkeypatch.chdir(root)
    for name in ("other", "class"):
        (root / name).mkdir()
    (root / "other" / "thesis.txt").touch()
    shutil.copy(root / "chapters" / "90_tiny.ipynb", root / "class" / "a.ipynb")
    before = {path: path.is_file() and path.read_bytes() for path in root.rglob("*")}
    for line, says in MISUSES.items():
        assert cli.main([*line.split(), "--root", str(root)]) == 2, line
        assert re.search(says, " ".join(capsys.readouterr().err.split())), line
        after = {path: path.is_file() and path.read_bytes() for path in root.rglob("*")}
        assert after == before or line.startswith("lab"), line


def test_quick_commands_do_not_import_torch(root):
    program = f"""
import contextlib, sys
from tplab.course.commands import cli
for line in ("progress", "solution 90.1 --yes", "hint 90.1", "reset 90 --yes"):
    assert cli.main([*line.split(), "--root", {str(root)!r}]) == 0, line
for command in ("check", "plan", "grade", "update", "doctor", "start", "lab"):
    with contextlib.suppress(SystemExit):
        cli.main([command, "--help"])
assert not {{"torch", "nbval", "pytest"}} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
