"""What README, packaging and Makefile promise is so."""

import ast
import importlib.metadata
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
from tests import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
CONDA_NAMES = {"torch": "pytorch", "jupyter-client": "jupyter_client"}  # where conda-forge calls a package otherwise
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


def test_every_package_that_tplab_imports_is_declared():
    imported: set[str] = set()
    for path in (ROOT / "tplab").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            imported |= {name.partition(".")[0] for name in names}
    known = importlib.metadata.packages_distributions()
    needed = {canonicalize_name(known[name][0]) for name in imported & known.keys() - {"tplab"}}
    texts = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["hugging-face"]
    assert needed <= {canonicalize_name(Requirement(text).name) for text in texts}
    assert {"torch", "pyyaml"} <= needed


@pytest.mark.pinned
def test_constraints_name_every_package_and_fit_the_ranges():
    pinned = pins()
    assert pinned["torch"].local is None, "the build is the machine's choice"
    assert not any(name.startswith(("nvidia", "triton", "cuda")) for name in pinned)
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


# README and Makefile


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))


PAGES = [
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "ARCHITECTURE.md", "GPU.md", "SECURITY.md", "AGENTS.md"),
    *("docs/teaching.md", "chapters/how_close.md", "chapters/AGENTS.md"),
]


@pytest.mark.parametrize("page", [*PAGES, ".ci/run"])
def test_links_lead_somewhere_and_make_targets_that_are_named_exist(page):
    text = (ROOT / page).read_text()
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    local = [target for target in LINK.findall(prose) if not target.startswith("http")]
    assert [target for target in local if not (ROOT / page).parent.joinpath(target).exists()] == []
    if page not in ("CHANGELOG.md", "SECURITY.md") and not page.startswith("chapters/"):
        named = set(re.findall(r"(?:`|^|step )make ([a-z-]+)", text, re.MULTILINE))
        assert named
        assert named <= targets()


def test_every_target_is_in_the_help():
    assert set(re.findall(r"make ([a-z-]+) ", make("help").stdout)) == targets()


# What a machine may lack


def python_that(folder: Path, *cases: str) -> Path:
    """A stand-in for Python that does what the cases of a shell script say, and else succeeds."""
    stand_in = folder / "python-stand-in"
    stand_in.write_text('#!/bin/sh\ncase "$*" in\n' + "\n".join(cases) + "\nesac\nexit 0\n")
    stand_in.chmod(0o755)
    return stand_in


@pytest.mark.parametrize("target", ["lab", "test"])
def test_what_the_machine_lacks_is_told(target, tmp_path):
    failing = tmp_path / "venv" / "bin" / "python"
    no_network = f"mkdir -p {failing.parent}; printf '#!/bin/sh\\nexit 1\\n' > {failing}; chmod +x {failing}"
    for says, *cases in (
        ("Python 3.11", "*version_info*) exit 1;;"),
        ("apt install python3-venv", "*ensurepip*) exit 1;;", "--version) echo Python 3.12.1;;"),
        ("proxy", f"*'-m venv'*) {no_network};;"),
    ):
        run = make(target, f"VENV={tmp_path}/venv", f"PYTHON={python_that(tmp_path, *cases)}")
        assert run.returncode != 0
        assert says in run.stdout


SKIPS = """
import pytest

def test_skips():
    pytest.skip("needs a tool")

@pytest.mark.gpu
def test_skips_without_a_gpu():
    pytest.skip("needs a GPU")
"""


def pytest_in(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A run of pytest with our conftest.py, in a folder of its own. Plugins would take longer than the tests."""
    shutil.copy(ROOT / "tests" / "conftest.py", folder)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={folder}"]
    rest = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment = rest | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT), "CI": ""} | environment
    return subprocess.run([*command, *arguments], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_a_missing_tool_fails_ci_and_skips_elsewhere(tmp_path):
    (tmp_path / "test_skips.py").write_text(SKIPS)
    (tmp_path / "test_module.py").write_text("import pytest\npytest.importorskip('no_such_tool')\n")
    told = pytest_in(tmp_path, "--continue-on-collection-errors", CI="true").stdout
    assert ("1 failed, 1 skipped" in told, "1 error" in told) == (True, True), told
    assert "3 skipped" in pytest_in(tmp_path).stdout


@pytest.mark.slow
def test_gpu_tests_that_are_all_skipped_fail_on_a_machine_with_a_gpu(tmp_path):
    (tmp_path / "test_skips.py").write_text(SKIPS)
    run = pytest_in(tmp_path, "test_skips.py::test_skips_without_a_gpu", EMULATED_GPUS="1")
    assert run.returncode == 1
    assert "1 GPU test" in run.stdout
    run = pytest_in(tmp_path, EMULATED_GPUS="1")
    assert (run.returncode, "GPU test" in run.stdout) == (0, False), "another test was skipped, too"


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


def test_nothing_is_unpickled_from_a_file():
    """Checkpoints go through torch.distributed.checkpoint. Only the runtime unpickles, from its own processes."""
    found = []
    for path in sorted((ROOT / "tplab").rglob("*.py")):
        text = path.read_text()
        if not re.search(r"torch\.load|pickle\.", text):
            continue
        for call in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)):
            name = ast.unparse(call.func)
            unpickles = re.fullmatch(r"(cloud)?pickle\.(loads?|Unpickler)", name)
            in_runtime = path.parent.name == "runtime" and name == "pickle.loads"
            unsafe = name == "torch.load" and "weights_only=True" not in map(ast.unparse, call.keywords)
            if unsafe or (unpickles and not in_runtime):
                found.append(f"{path.relative_to(ROOT)}:{call.lineno}: {name}")
    assert found == []
