"""The wheel, installed in a new environment far from the repository, holds the whole course."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import nbformat
import pytest

from tests import ROOT, saying

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("wheel")]

CHAPTER = "02_splitting_matrices"


class Environment:
    """A new environment with the wheel, which borrows the packages that the course needs, and a folder to work in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "work"
        self.folder.mkdir()
        venv.create(folder / "venv", with_pip=True)
        self.bin = folder / "venv" / "bin"
        where = "import sysconfig; print(sysconfig.get_path('purelib'))"
        packages = Path(self.run("python", "-c", where).stdout.strip())
        # Python doesn't read the .pth files of a folder that a .pth file names, so the editable tplab isn't found
        (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def run(self, program: str, *arguments: str, folder: str = ".") -> subprocess.CompletedProcess:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TPLAB"))}
        environment["PATH"] = f"{self.bin}{os.pathsep}{environment['PATH']}"
        return subprocess.run(
            [str(self.bin / program), *arguments],
            cwd=self.folder / folder,
            env=environment,
            capture_output=True,
            text=True,
        )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    folder = tmp_path_factory.mktemp("wheel")
    build = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w"]
    subprocess.run([sys.executable, *build, str(folder), str(ROOT)], check=True)
    environment = Environment(folder)
    done = environment.run("python", "-m", "pip", "install", "--quiet", "--no-deps", str(next(folder.glob("*.whl"))))
    assert done.returncode == 0, done.stderr
    return environment


def test_start_check_hint_solution_update_and_lab_work_without_the_repository(installed):
    said = installed.run("python", "-c", "import tplab; print(tplab.__file__)").stdout
    assert Path(said.strip()).is_relative_to(installed.bin.parent)
    done = installed.run("tplab", "start")
    assert (done.returncode, done.stderr) == (0, "")
    mine = installed.folder / "my_course" / f"{CHAPTER}.ipynb"
    assert mine.read_bytes() == (ROOT / "chapters" / f"{CHAPTER}.ipynb").read_bytes()
    notebook = json.loads(mine.read_text())
    solution = json.loads((ROOT / "solutions" / f"{CHAPTER}.ipynb").read_text())
    answers = {cell["id"]: cell["source"] for cell in solution["cells"]}
    for cell in notebook["cells"]:
        if cell["id"] == "exercise-2-1":
            cell["source"] = answers[cell["id"]]
    mine.write_text(json.dumps(notebook))
    done = installed.run("tplab", "check", "--exercise", "2.1", folder="my_course")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2.1" in done.stdout
    assert "def shard(" in (installed.folder / "my_course" / "my_tp" / "splitting.py").read_text()
    shipped = "from tplab.course.learn.given_code import TEMPLATES; print(*(path.name for path in TEMPLATES.glob('*')))"
    listed = installed.run("python", "-c", shipped).stdout.split()
    assert {"adapters.py", "blocks.py", "demo.py", "train.py"} <= {*listed}
    assert installed.run("tplab", "progress", folder="my_course").stdout.startswith("1 of 75 ")
    assert re.search(saying("2.2", "1 of 3"), installed.run("tplab", "hint", "2.2").stdout)
    assert "2.2" in installed.run("tplab", "solution", "2.2", "--yes").stdout
    assert re.fullmatch(r"\D+", installed.run("tplab", "update").stdout), "a sentence that names no notebook"
    assert installed.run("tplab", "reset", "2", "--yes").returncode == 0
    assert mine.read_bytes() == (ROOT / "chapters" / f"{CHAPTER}.ipynb").read_bytes()
    done = installed.run("tplab", "lab", "--version")  # JupyterLab prints its version and ends
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1][0].isdigit()


def test_the_hosted_start_page_installs_the_wheel_and_looks_for_gpus(installed):
    start = str(ROOT / "chapters" / "00_start.ipynb")
    made = installed.run("python", "-m", "tplab.course.notebooks.hosted", start, "https://a.b/c.whl", "https://d.e")
    cells = nbformat.reads(made.stdout, as_version=4).cells
    install, setup, devices = [cell.source for cell in cells if cell.cell_type == "code"][:3]
    assert install == '%pip install --quiet "tplab @ https://a.b/c.whl"'
    done = installed.run("python", "-c", setup + "\n" + devices.replace("list(", "print(*"))
    assert ("'gloo', 2.0" in done.stdout) or ("'nccl', 2.0" in done.stdout), done.stderr
