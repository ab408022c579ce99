"""What README, packaging and Makefile promise is so."""

import ast
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from datetime import date
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import tplab
from benchmarks.launch import NAMES
from tests import ROOT
from tplab.course.notebooks.numbering import chapter_files

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
CHAPTERS = [path.name for path in chapter_files(ROOT / "chapters", ".ipynb")]
CONDA_NAMES = {"torch": "pytorch"}  # where conda-forge calls a package otherwise
BLOCK = re.compile(r"^```(?:bash|sh)?\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


def files() -> list[Path]:
    """The files of the project: what git tracks, or would if it were added."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    return [ROOT / name for name in listed.stdout.decode().splitlines() if (ROOT / name).is_file()]


def pins() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    parts = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in parts}


def declared() -> list[Requirement]:
    """What pyproject.toml asks for, with the extra for tests."""
    return [Requirement(text) for text in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["test"]]


def make(*arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    if shutil.which("make") is None:
        pytest.skip("needs make")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    environment["PATH"] = path or environment["PATH"]
    return subprocess.run(
        [shutil.which("make") or "make", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


# Packages


def test_conda_gets_the_same_packages():
    lines = [line.split("#")[0].strip() for line in (ROOT / "environment.yml").read_text().splitlines()]
    entries = [line.removeprefix("- ") for line in lines[lines.index("dependencies:") + 1 :] if line.startswith("- ")]
    conda = {entry for entry in entries if not entry.startswith(("python>", "pip", "--"))}
    expected = set()
    for requirement in map(Requirement, PROJECT["dependencies"]):
        specifiers = sorted(map(str, requirement.specifier), key=lambda text: text.startswith("<"))
        expected.add(CONDA_NAMES.get(requirement.name, requirement.name) + ",".join(specifiers))
    assert conda == expected
    assert f"python{PROJECT['requires-python']}" in entries
    assert "--editable .[test]" in entries


@pytest.mark.pinned
def test_constraints_name_every_package_and_fit_the_ranges():
    pinned = pins()
    waiting, seen = declared(), set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in ("setuptools", "pip") or (name, *sorted(requirement.extras)) in seen:
            continue
        seen.add((name, *sorted(requirement.extras)))
        assert name in pinned, f"constraints.txt doesn't name {name}"
        assert requirement.specifier.contains(pinned[name], prereleases=True), f"{requirement} excludes the pinned one"
        for text in importlib.metadata.requires(name) or []:
            needed = Requirement(text)
            extras = [{"extra": extra} for extra in ("", *requirement.extras)]
            if needed.marker is None or any(needed.marker.evaluate(extra) for extra in extras):
                waiting.append(needed)
    assert len(seen) > 50


def test_torch_is_pinned_without_its_build():
    assert pins()["torch"].local is None
    assert not any(name.startswith(("nvidia", "triton", "cuda")) for name in pins())


@pytest.mark.pinned
def test_what_is_installed_is_what_is_pinned():
    if not os.environ.get("CI"):
        pytest.skip("needs an environment that make has just installed, which only CI promises")
    different = {}
    for requirement in declared():
        name = canonicalize_name(requirement.name)
        installed = Version(importlib.metadata.version(name)).public
        if installed != str(pins()[name]):
            different[name] = installed
    assert different == {}, "constraints.txt is not what these tests ran with"


def test_one_version_with_its_date():
    headings = re.findall(r"^## (.*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    releases = [heading.split(" - ") for heading in headings[1:]]
    dates = [date.fromisoformat(day) for _, day in releases]
    assert dates == sorted(dates, reverse=True)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert PROJECT["version"] == tplab.__version__ == releases[0][0] == citation["version"]
    assert citation["date-released"] == dates[0]


def test_pre_commit_runs_the_pinned_ruff():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [hook["rev"] for hook in hooks if "ruff" in hook["repo"]] == [f"v{pins()['ruff']}"]


def test_github_runs_ci_and_everything_at_night():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert workflow[True]["schedule"]  # YAML reads the key `on` as a boolean
    steps = workflow["jobs"]["test"]["steps"]
    assert [step["run"] for step in steps if ".ci/run" in step.get("run", "")] == [
        ".ci/run ${{ github.event_name == 'schedule' && '--all' || '' }}"
    ]


def test_github_tries_the_newest_versions_every_week():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "newest.yml").read_text())
    *_, day_of_week = workflow[True]["schedule"][0]["cron"].split()
    assert day_of_week.isdigit()
    runs = [step["run"] for step in workflow["jobs"]["test"]["steps"] if "run" in step]
    assert runs[-1] == ".ci/run --newest"


def test_the_newest_versions_are_installed_beside_the_pinned_ones():
    """This asks make only for its plan, because an installation takes minutes and needs a network."""
    plan = make("--dry-run", "newest").stdout
    installs = re.findall(r"^(\S+)/bin/python -m pip install (.*) --editable", plan, re.MULTILINE)
    assert set(installs) == {(".venv-newest", "--upgrade --upgrade-strategy eager")}
    assert re.search(
        r'\.venv-newest/bin/python -m pytest .* -m "not pinned" tests --ignore tests/browser ', plan, re.MULTILINE
    )


def test_devcontainer_and_issue_form_can_be_read():
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    assert container["postCreateCommand"] == "make .venv/.installed"
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "problem.yml").read_text())
    assert "tplab doctor" in str(form["body"])


def test_the_command_is_there():
    module, _, function = PROJECT["scripts"]["tplab"].partition(":")
    assert callable(getattr(__import__(module, fromlist=[function]), function))
    run = subprocess.run([sys.executable, "-m", "tplab", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0
    assert "check" in run.stdout


def test_licence():
    text = (ROOT / "LICENSE").read_text()
    assert PROJECT["license"] == "Apache-2.0"
    assert text.split()[:4] == ["Apache", "License", "Version", "2.0,"]
    assert "END OF TERMS AND CONDITIONS" in text


# README and Makefile


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))


def test_readme_names_exactly_two_commands():
    commands = [line.split("#")[0].strip() for line in BLOCK.findall(README)[0].splitlines()]
    assert [command for command in commands if command] == ["make lab", "make test"]


def test_readme_names_every_chapter_and_no_other():
    linked = {Path(target).name for target in LINK.findall(README) if target.startswith("chapters/")}
    assert linked == set(CHAPTERS)
    assert re.search(r"^\| start \|", README, re.MULTILINE)
    for number in range(16):
        assert re.search(rf"^\| {number:02d} \|", README, re.MULTILINE), f"chapter {number:02d} is not in the table"


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "ARCHITECTURE.md", "GPU.md", "SECURITY.md"]
)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    local = [target for target in LINK.findall(text) if not target.startswith("http")]
    assert [target for target in local if not (ROOT / target).exists()] == []


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "GPU.md", ".ci/run"])
def test_make_targets_that_are_named_exist(page):
    text = (ROOT / page).read_text()
    named = set(re.findall(r"(?:`|^|step )make ([a-z-]+)", text, re.MULTILINE))
    assert named
    assert named <= targets()


def test_every_target_is_in_the_help():
    assert {"lab", "test", "notebooks", "lint", "bench", "clean", "help"} <= targets()
    said = make("help").stdout
    assert set(re.findall(r"make ([a-z-]+) ", said)) == targets()
    phony = re.search(r"^\.PHONY: (.*)", MAKEFILE, re.MULTILINE)
    assert phony
    assert set(phony[1].split()) == targets()


def test_ci_runs_the_tests():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text()
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0


# What a machine may lack


def python_that(folder: Path, *cases: str) -> Path:
    """A stand-in for Python that does what the cases of a shell script say, and else succeeds."""
    stand_in = folder / "python-stand-in"
    stand_in.write_text('#!/bin/sh\ncase "$*" in\n' + "\n".join(cases) + "\nesac\nexit 0\n")
    stand_in.chmod(0o755)
    return stand_in


@pytest.mark.parametrize("target", ["lab", "test"])
def test_an_old_python_is_told_so(target, tmp_path):
    python = python_that(tmp_path, "*version_info*) exit 1;;")
    run = make(target, f"VENV={tmp_path}/venv", f"PYTHON={python}")
    assert run.returncode != 0
    assert "needs Python 3.11 or newer" in run.stdout


@pytest.mark.parametrize("target", ["lab", "test"])
def test_a_python_without_venv_is_told_what_to_install(target, tmp_path):
    python = python_that(tmp_path, "*ensurepip*) exit 1;;", "--version) echo Python 3.12.1;;")
    run = make(target, f"VENV={tmp_path}/venv", f"PYTHON={python}")
    assert run.returncode != 0
    assert "apt install python3-venv" in run.stdout


@pytest.mark.parametrize("target", ["lab", "test"])
def test_no_network_is_told_so(target, tmp_path):
    pip = "mkdir -p {0}/venv/bin; printf '#!/bin/sh\\nexit 1\\n' > {0}/venv/bin/python; chmod +x {0}/venv/bin/python"
    python = python_that(tmp_path, f"*'-m venv'*) {pip.format(tmp_path)};;")
    run = make(target, f"VENV={tmp_path}/venv", f"PYTHON={python}")
    assert run.returncode != 0
    assert "can't reach the package index" in run.stdout


SKIPS = """
import pytest

def test_skips():
    pytest.skip("needs a tool")

@pytest.mark.gpu
def test_skips_without_a_gpu():
    pytest.skip("needs a GPU")
"""


def without_plugins() -> dict[str, str]:
    """The environment of a pytest that imports no plugin which it isn't told of: they take longer than these tests."""
    rest = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    return rest | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize(("ci", "outcome"), [("true", "1 failed, 1 skipped"), ("", "2 skipped")])
@pytest.mark.slow
def test_a_missing_tool_fails_ci_and_skips_elsewhere(ci, outcome, tmp_path):
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_skips.py").write_text(SKIPS)
    (tmp_path / "test_module.py").write_text("import pytest\npytest.importorskip('no_such_tool')\n")
    arguments = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={tmp_path}", "test_skips.py"]
    environment = without_plugins() | {"CI": ci}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert outcome in run.stdout
    arguments[-1] = "test_module.py"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ("1 error" if ci else "1 skipped") in run.stdout


@pytest.mark.parametrize(
    ("test", "machine", "status"),
    [("test_skips_without_a_gpu", "1", 1), ("test_skips", "1", 0), ("test_skips_without_a_gpu", None, 0)],
)
@pytest.mark.slow
def test_gpu_tests_that_are_all_skipped_fail_on_a_machine_with_a_gpu(test, machine, status, tmp_path):
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_skips.py").write_text(SKIPS)
    arguments = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={tmp_path}", f"test_skips.py::{test}"]
    environment = without_plugins() | {"CI": ""} | ({} if machine is None else {"EMULATED_GPUS": machine})
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert run.returncode == status
    assert ("all 1 GPU tests were skipped" in run.stdout) == bool(status)


TELLS = """
import os
import pytest

@pytest.mark.parametrize("number", range(8))
def test_tells_its_process(number):
    print(f"in {os.getpid()}")
"""


def test_what_belongs_together_runs_in_one_process(tmp_path):
    """By its group or its file. (pytest 9.2 with pytest-xdist 3.8 forgets the groups, without a word.)"""
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_one.py").write_text(TELLS)
    (tmp_path / "test_other.py").write_text(TELLS + "\npytestmark = pytest.mark.xdist_group('test_one.py')\n")
    arguments = ["-p", "xdist", "-n", "2", "--dist", "loadgroup", "--no-loadscope-reorder", "-rP"]
    command = [sys.executable, "-m", "pytest", *arguments, "-p", "no:cacheprovider"]
    run = subprocess.run(command, cwd=tmp_path, env=without_plugins(), capture_output=True, text=True)
    processes = re.findall(r"^in (\d+)$", run.stdout, re.MULTILINE)
    assert len(processes) == 16, run.stdout
    assert len(set(processes)) == 1


# What must not be in any file

MACHINE_PATH = re.compile(r"(?<![\w.~/-])/(?:root|work|home|Users|tmp)/\w+")
EXAMPLE_PATHS = ("/home/me",)  # somebody's, in a test or a text


def test_no_file_names_a_path_of_one_machine():
    found = []
    for path in files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            hits = [hit[0] for hit in MACHINE_PATH.finditer(line) if not hit[0].startswith(EXAMPLE_PATHS)]
            found += [f"{path.relative_to(ROOT)}:{number}: {hit}" for hit in hits]
    assert found == []


def calls(tree: ast.AST) -> list[tuple[str, ast.Call]]:
    return [(ast.unparse(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def test_nothing_is_unpickled_from_a_file():
    """Checkpoints go through torch.distributed.checkpoint. Only the runtime unpickles, from its own processes."""
    found = []
    for path in sorted((ROOT / "tplab").rglob("*.py")):
        for name, call in calls(ast.parse(path.read_text())):
            safe = any(
                keyword.arg == "weights_only" and ast.unparse(keyword.value) == "True" for keyword in call.keywords
            )
            unpickles = name in (
                "pickle.load",
                "cloudpickle.load",
                "pickle.loads",
                "cloudpickle.loads",
                "pickle.Unpickler",
            )
            in_runtime = path.parent.name == "runtime" and name == "pickle.loads"
            if (name == "torch.load" and not safe) or (unpickles and not in_runtime):
                found.append(f"{path.relative_to(ROOT)}:{call.lineno}: {name}")
    assert found == []


def test_the_benchmark_knows_the_ways_that_it_names():
    tree = ast.parse((ROOT / "benchmarks" / "launchers.py").read_text())
    ways = next(
        node.value for node in ast.walk(tree) if isinstance(node, ast.AnnAssign) and "WAYS" in ast.unparse(node)
    )
    assert isinstance(ways, ast.Dict)
    assert tuple(ast.literal_eval(key) for key in ways.keys if key) == NAMES
