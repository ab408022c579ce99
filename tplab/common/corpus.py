"""Real text without a download: the sources of the running Python's standard library, as bytes.

    text = python_sources(200_000)
    for inputs, targets in byte_batches(text, context=64, batch_size=8, steps=100, seed=0): ...

Each byte is a token (vocabulary 256), and its target is the next byte. The text is the same in every run with the same
Python version, and all ranks that use the same seed get the same batches.
"""

import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

VOCABULARY = 256
_SKIPPED = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__", "lib2to3", "ensurepip"}


def python_sources(limit_bytes: int | None = None) -> bytes:
    """Return the standard library's .py files, concatenated in path order, up to `limit_bytes` bytes."""
    if limit_bytes is not None and limit_bytes < 0:
        raise ValueError(f"limit_bytes={limit_bytes} is negative")
    text = bytearray()
    for path in files_below(Path(sysconfig.get_path("stdlib")), _is_source_or_folder):
        if limit_bytes is not None and len(text) >= limit_bytes:
            break
        text += path.read_bytes().replace(b"\r\n", b"\n")
    return bytes(text[:limit_bytes])


def files_below(folder: Path, wanted: Callable[[Path], bool]) -> Iterator[Path]:
    """Yield the files in and below a folder, sorted by name at each level, so the order is the same on every machine.

    wanted    returns True to yield a file, or to search a folder; it isn't called for `folder` itself

    Links are followed, but no folder is entered twice, so circular links don't loop forever.
    """
    seen: set[tuple[int, int]] = set()
    waiting = [folder]
    while waiting:
        path = waiting.pop()
        if not path.is_dir():
            yield path
            continue
        place = path.stat()
        inside = sorted(path.iterdir(), key=lambda path: path.name, reverse=True)  # the last one is popped first
        if (place.st_dev, place.st_ino) not in seen:
            seen.add((place.st_dev, place.st_ino))
            waiting += filter(wanted, inside)


def _is_source_or_folder(path: Path) -> bool:
    if path.is_dir():
        return path.name not in _SKIPPED and not path.name.startswith("config-")
    return path.suffix == ".py" and not path.name.startswith("_sysconfigdata")


def byte_batches(text: bytes, context: int, batch_size: int, steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield `steps` random pairs (inputs, targets), [batch_size, context] int64. Targets are shifted by one byte.

    Raises ValueError if the text is too short for one context and its target.
    """
    if len(text) < context + 1:
        raise ValueError(f"a text of {len(text)} bytes is too short for a context of {context}: it needs {context + 1}")
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(context + 1)  # [context + 1]
    for _ in range(steps):
        starts = torch.randint(len(data) - context, (batch_size, 1), generator=generator)  # [batch_size, 1]
        windows = data[starts + window]  # [batch_size, context + 1]
        yield windows[:, :-1], windows[:, 1:]
