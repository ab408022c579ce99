"""Ask PyTorch about this machine in a separate process, because an import that crashes must not end the doctor."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field

from tplab.course.notebooks.kernels import PACKAGE_ROOT

PATIENCE = 120.0  # seconds; importing torch has taken more than ten on a busy machine

_ASK = """
import json, warnings, torch, torch.distributed as dist
with warnings.catch_warnings(record=True) as complaints:
    warnings.simplefilter("always")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
gpus = []
for number in range(count):
    known = torch.cuda.get_device_properties(number)
    try:
        free = torch.cuda.mem_get_info(number)[0]
    except RuntimeError:  # somebody else has it to themselves
        free = 0
    gpus.append({"name": known.name, "total": known.total_memory, "free": free})
peers = [[a == b or torch.cuda.can_device_access_peer(a, b) for b in range(count)] for a in range(count)]
there = dist.is_available()
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda or "", "gpus": gpus, "peers": peers,
    "complaint": str(complaints[0].message).strip().split(chr(10))[0] if complaints else "",
    "gloo": there and dist.is_gloo_available(), "nccl": there and dist.is_nccl_available(),
}))
"""


@dataclass(frozen=True)
class Gpu:
    """A GPU, with its total and free memory in bytes."""

    name: str
    total: int
    free: int


@dataclass(frozen=True)
class Torch:
    """PyTorch's report on itself and on the GPUs.

    error:     why PyTorch can't be imported, in which case everything else is empty
    cuda:      the CUDA version that PyTorch was built with, or "" for none
    complaint: the warning that PyTorch gave when it looked for GPUs, or ""
    peers:     peers[a][b] is whether GPU a can access GPU b's memory
    """

    error: str = ""
    version: str = ""
    cuda: str = ""
    complaint: str = ""
    gloo: bool = False
    nccl: bool = False
    gpus: tuple[Gpu, ...] = ()
    peers: list[list[bool]] = field(default_factory=list)


def ask_torch(code: str = _ASK, timeout: float = PATIENCE) -> Torch:
    """Ask PyTorch for its report. A failure, or no answer within `timeout` seconds, is reported as its `error`."""
    try:
        told = ask(code, timeout)
    except RuntimeError as error:
        return Torch(error=str(error))
    gpus = tuple(Gpu(**gpu) for gpu in told.pop("gpus"))
    return Torch(**told, gpus=gpus)


def ask(code: str, timeout: float) -> dict:
    """Run code in a separate process and return the JSON on its last line. Raises RuntimeError if that fails."""
    path = os.pathsep.join(filter(None, [str(PACKAGE_ROOT), os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=dict(os.environ, PYTHONPATH=path),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no answer after {timeout:.0f} seconds") from None
    lines = done.stdout.strip().splitlines()
    if done.returncode < 0:
        raise RuntimeError(f"its process was ended by signal {-done.returncode}")
    if done.returncode:
        words = done.stderr.strip().splitlines()
        raise RuntimeError(words[-1] if words else f"it ended with status {done.returncode} and without a word")
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError):
        raise RuntimeError(f"an answer that nobody understands: {done.stdout[-200:]!r}") from None
