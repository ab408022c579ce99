"""Compile device.cpp against the torch of this Python. Takes half a minute, once for each version of either."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sysconfig
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).with_name("device.cpp")
CACHE = Path(__file__).resolve().parents[2] / "build" / "emulated_gpu"
NAME = "_emulated_gpu.so"


def built() -> Path:
    """Return the compiled module, which is compiled if necessary. Raises RuntimeError without g++."""
    content = SOURCE.read_bytes() + f"{version('torch')} {sysconfig.get_python_version()}".encode()
    folder = CACHE / hashlib.sha256(content).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / NAME).exists():
            _compile(folder)
    return folder / NAME


def torch_folder() -> Path:
    spec = find_spec("torch")  # without importing it
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _compile(folder: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        raise RuntimeError("emulated GPUs need g++: apt-get install g++")
    torchs = torch_folder()
    includes = [torchs / "include", torchs / "include/torch/csrc/api/include", Path(sysconfig.get_paths()["include"])]
    libraries = ["torch", "torch_cpu", "c10", "torch_python"]
    unfinished = folder / f"{NAME}.new"
    command = [
        compiler, "-O1", "-std=c++20", "-shared", "-fPIC", "-w", str(SOURCE), "-o", str(unfinished),
        *(f"-I{path}" for path in includes), f"-L{torchs / 'lib'}", *(f"-l{name}" for name in libraries),
        f"-Wl,-rpath,{torchs / 'lib'}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    os.replace(unfinished, folder / NAME)
