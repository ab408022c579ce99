"""`tplab lab`: one place for the options of JupyterLab, on loopback, with this Python's kernel."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.course import tiny
from tests.test_house import make
from tplab.course.commands import cli, lab


@pytest.fixture
def started(monkeypatch, tmp_path_factory):
    """What would have been started: the program, its arguments, its environment, its folder."""
    calls = []
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))  # and back afterwards
    monkeypatch.setattr(os, "execve", lambda *call: calls.append((*call, os.getcwd())) or sys.exit(0))
    return calls


def run(*arguments: str) -> None:
    with pytest.raises(SystemExit):
        cli.main(["lab", *arguments])


def test_it_starts_jupyterlab_on_loopback_with_the_course_and_the_options_of_the_learner(root, started, monkeypatch):
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", "/their/own")
    more = ["--no-browser", "--port=9000", "--ServerApp.port_retries=0", "--collaborative"]
    run("90", more[0], "--root", str(root), *more[1:])
    program, arguments, environment, folder = started[0]
    assert program == arguments[0] == sys.executable
    assert arguments[1:3] == ["-m", "jupyterlab"]
    assert [option for option in arguments if ".ip=" in option] == ["--ServerApp.ip=127.0.0.1"]
    assert arguments[-4:] == more
    assert "--LabApp.default_url=/lab/tree/90_tiny.ipynb" in arguments
    assert os.path.samefile(folder, root / "my_course")
    theirs, ours = environment["JUPYTER_CONFIG_PATH"].split(os.pathsep)
    assert theirs == "/their/own"
    page = json.loads(Path(ours, "labconfig", "page_config.json").read_text())
    assert page["disabledExtensions"] == {"@jupyterlab/apputils-extension:announcements": True}
    json.loads(Path(ours, "labconfig", "default_setting_overrides.json").read_text())


@pytest.mark.parametrize(("terminal", "answer"), [(True, "y"), (True, "n"), (False, "")])
def test_a_newer_chapter_is_offered(terminal, answer, root, started, monkeypatch, capsys):
    run("--root", str(root))
    shutil.rmtree(root / "chapters")
    tiny.make_unexecuted(root, tiny.source(4))
    monkeypatch.setattr("sys.stdin.isatty", lambda: terminal, raising=False)
    monkeypatch.setattr("builtins.input", lambda: answer)
    run("--root", str(root))
    assert ("tplab update" in capsys.readouterr().out) == (not terminal)
    assert ("double_4" in (root / "my_course" / "90_tiny.ipynb").read_text()) == (answer == "y")


def test_this_pythons_commands_and_kernel_come_first():
    found = lab.environment({"PATH": "/usr/bin", "JUPYTER_PATH": "mine", "HOME": "here"})
    assert found["PATH"] == os.pathsep.join([os.path.dirname(sys.executable), "/usr/bin"])
    shared = os.path.join(sys.prefix, "share", "jupyter")
    assert found["JUPYTER_PATH"] == os.pathsep.join([shared, "mine", str(lab.SETTINGS)])
    assert found["HOME"] == "here"


def test_make_lab_is_this_command(tmp_path):
    said = make("-n", "-o", f"{tmp_path}/.installed", "lab", f"VENV={tmp_path}", "LAB_ARGS=4 --port=9000").stdout
    assert said.strip() == f"exec {tmp_path}/bin/python -m tplab lab 4 --port=9000"


def test_the_index_is_what_opens_where_there_is_one(root, started):
    (root / "chapters" / "index.ipynb").write_text("{}")
    run("--root", str(root))
    assert "--LabApp.default_url=/lab/tree/index.ipynb" in started[0][1]
    run("90", "--root", str(root))
    assert "--LabApp.default_url=/lab/tree/90_tiny.ipynb" in started[1][1]
