"""The command line as a whole: its options, its help, and how quickly its commands answer."""

import subprocess
import sys

import pytest

from tests.course import tiny
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


def test_quick_commands_do_not_import_torch(tmp_path):
    tiny.make_unexecuted(tmp_path, tiny.source(1))
    program = f"""
import contextlib, sys
from tplab.course.commands import cli
for line in ("progress", "solution 90.1 --yes", "hint 90.1", "reset 90 --yes"):
    assert cli.main([*line.split(), "--root", {str(tmp_path)!r}]) == 0, line
for command in ("check", "plan", "grade", "update", "doctor", "start", "lab"):
    with contextlib.suppress(SystemExit):
        cli.main([command, "--help"])
assert not {{"torch", "nbval", "pytest"}} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
