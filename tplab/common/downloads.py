"""Recognize files that were downloaded only in part, and say how to get the rest.

    model.safetensors, 134 bytes     a git-lfs pointer: three lines of text with the size of the file that it stands for
    config.json, 0 bytes             an interrupted download

(https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md)
"""

import json
import re
from pathlib import Path
from typing import Any

_POINTER = re.compile(rb"version https://git-lfs\.github\.com/spec/[^\n]*\n(?:.*\n)*?size (\d+)\n?")


def read_json(path: Path) -> dict[str, Any]:
    """Read a file with a JSON object. Raises ValueError, which names the file and the cure, if there isn't any."""
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"isn't valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise damaged(path, f"should contain a JSON object, but it contains a {type(value).__name__}")
    return value


def damaged(path: Path, what: str) -> ValueError:
    """Return the error for a file that can't be read. `what` is its predicate if it's neither a pointer nor empty."""
    size = path.stat().st_size
    trouble = f"{path} {what}. It has {size:,} bytes" if size else f"{path} is empty (0 bytes)"
    return ValueError(pointer(path) or f"{trouble}. If the download was interrupted, download the file again")


def pointer(path: Path) -> str | None:
    """Return what to do about a git-lfs pointer, or None for any other file."""
    with open(path, "rb") as file:
        found = _POINTER.match(file.read(1024))
    if found is None:
        return None
    return (
        f"{path} is a git-lfs pointer ({path.stat().st_size:,} bytes) to a file of {int(found[1]):,} bytes. To get "
        "that file, run `git lfs pull` in its folder, or download it again"
    )
