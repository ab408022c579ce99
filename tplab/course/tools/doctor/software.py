"""Findings about Python, the packages, PyTorch, and the kernel that notebooks run in.

Every function that returns a finding takes the values that it judges as arguments, so tests can simulate any fault.
`look` fetches the real ones.
"""

import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from packaging.requirements import Requirement

from tplab.course.notebooks.kernels import PACKAGE_ROOT
from tplab.course.tools.doctor.findings import BAD, GOOD, Finding
from tplab.course.tools.doctor.probe import Torch
from tplab.course.tools.lab import environment

OLDEST = (3, 11)  # as in pyproject.toml; the Makefile looks for it too
INSTALL = "make lab (or, in your own environment: python -m pip install -c constraints.txt -e .)"
KERNEL = 'python -m ipykernel install --sys-prefix --name python3 --display-name "Python 3 (ipykernel)"'


def python(version: tuple[int, ...], executable: str) -> Finding:
    told = f"{'.'.join(map(str, version[:3]))}, {executable}"
    if version[:2] >= OLDEST:
        return Finding("Python", GOOD, told)
    wanted = ".".join(map(str, OLDEST))
    return Finding("Python", BAD, f"{told}; the course needs {wanted} or newer", f"make lab PYTHON=python{wanted}")


def packages(requirements: Iterable[Requirement], version_of: Callable[[str], str]) -> Finding:
    """Return the finding about the versions of all packages that the course needs, except for torch (see `torch`).

    version_of: a function that returns a package's installed version, or raises PackageNotFoundError
    """
    wrong = []
    looked_at = 0
    for requirement in requirements:
        if requirement.name == "torch" or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        looked_at += 1
        try:
            version = version_of(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} is {version}, not {requirement.specifier}")
    if wrong:
        return Finding("packages", BAD, "; ".join(wrong), INSTALL)
    return Finding("packages", GOOD, f"{looked_at} packages, each in the range that the course needs")


def torch(seen: Torch, wanted: Requirement) -> Finding:
    """Return the finding about PyTorch: whether it can be imported, its version, and its backends."""
    if seen.error:
        return Finding("PyTorch", BAD, f"it can't be imported: {seen.error}", INSTALL)
    if not wanted.specifier.contains(seen.version, prereleases=True):
        return Finding("PyTorch", BAD, f"{seen.version}; the course needs {wanted.specifier}", INSTALL)
    if not seen.gloo:
        return Finding("PyTorch", BAD, f"{seen.version}, built without gloo, over which ranks talk", INSTALL)
    return Finding("PyTorch", GOOD, f"{seen.version} with {'gloo and NCCL' if seen.nccl else 'gloo'}")


def kernel(argv: list[str] | None, executable: str) -> Finding:
    """Return the finding about the "python3" kernel, which must run this Python.

    argv: the command line that starts the kernel, or None if there is no such kernel
    """
    if argv is None:
        return Finding("kernel", BAD, "Jupyter knows no kernel called python3", KERNEL)
    named = argv[0] if argv else ""
    # Jupyter itself takes a bare "python" to mean its own Python
    same = os.path.basename(named) == named and named.startswith("python")
    if same or _same_environment(named, executable):
        return Finding("kernel", GOOD, "notebooks run in this Python")
    return Finding("kernel", BAD, f"notebooks run in another Python: {named}", KERNEL)


def _same_environment(one: str, other: str) -> bool:
    """Return whether two Pythons are in the same folder, and so in the same environment.

    The files themselves prove nothing, because those of different environments may be links to the same file.
    """
    return os.path.realpath(os.path.dirname(one)) == os.path.realpath(os.path.dirname(other))


def jupyterlab(version: str | None) -> Finding:
    if version is None:
        return Finding("JupyterLab", BAD, "it is not installed", INSTALL)
    return Finding("JupyterLab", GOOD, f"{version}; start it with make lab, or tplab lab")


# The functions below look at the real environment


def requirements() -> list[Requirement]:
    """Return the requirements in pyproject.toml, falling back to those of the installed package."""
    path = PACKAGE_ROOT / "pyproject.toml"
    if path.exists() and sys.version_info >= OLDEST:
        import tomllib  # imported here because older versions of Python don't have it

        texts = tomllib.loads(path.read_text(encoding="utf-8"))["project"]["dependencies"]
    else:
        texts = importlib.metadata.requires("tplab") or []
    return [Requirement(text) for text in texts]


def kernel_argv() -> list[str] | None:
    """Return the command line of the kernel that `tplab lab` would start, or None if there is none."""
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    folders = environment(os.environ)["JUPYTER_PATH"].split(os.pathsep)
    manager = KernelSpecManager()
    manager.kernel_dirs = [str(Path(folder, "kernels")) for folder in folders] + manager.kernel_dirs
    try:
        return list(manager.get_kernel_spec("python3").argv)
    except NoSuchKernel:
        return None


def look(seen: Torch) -> list[Finding]:
    needed = requirements()
    wanted = next(requirement for requirement in needed if requirement.name == "torch")
    try:
        lab: str | None = importlib.metadata.version("jupyterlab")
    except importlib.metadata.PackageNotFoundError:
        lab = None
    try:
        argv = kernel_argv()
    except ImportError:
        argv = None
    return [
        python(sys.version_info[:3], sys.executable),
        torch(seen, wanted),
        packages(needed, importlib.metadata.version),
        jupyterlab(lab),
        kernel(argv, sys.executable),
    ]
