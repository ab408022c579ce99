"""The command line as a whole: its options, its help, and how quickly its commands answer."""

import shutil
import subprocess
import sys

import pytest

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
    "check 17": "There is no chapter 17. There are: 90.",
    "check --exercise 90.99": "There is no exercise 90.99 in chapter",
    "check 4 --exercise 90.1": "Give either chapters or one exercise",
    "check 90 --notebook nowhere.ipynb": "There is no file nowhere.ipynb.",
    "check --notebook mine.ipynb": "Say which chapter mine.ipynb is",
    "hint 90.9": "There are: 90.1, 90.2, 90.3.",
    "hint 90": "tplab hint 4.2",
    "solution 90.9 --yes": "There are: 90.1, 90.2, 90.3.",
    "reset --yes": "tplab reset 4, or tplab reset --exercise 4.2",
    "reset 90 --exercise 90.1 --yes": "Say what to begin anew",
    "reset --exercise 90.9 --yes": "no exercise 90.9",
    "grade nowhere": "no folder nowhere",
    "grade class --out class": "--out",
    "grade class --out other": "--out",
    "grade class --out class/a.ipynb": "--out",
    "lab 17": "no chapter 17",  # makes the learner's folder before it looks for the chapter
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
        assert says in " ".join(capsys.readouterr().err.split()), line
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
