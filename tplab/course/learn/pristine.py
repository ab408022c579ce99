"""Rebuild a chapter in its original state, and keep dated copies of files that are about to change."""

import hashlib
import time
from pathlib import Path

from tplab.common.files import replace
from tplab.course.learn.course_files import ChapterFiles, Misuse

KEPT = "kept"  # folder inside the learner's folder


def first_state(files: ChapterFiles) -> str:
    """Build the learner's notebook in its original state from the chapter's source. Raises Misuse if that fails."""
    from tplab.course.notebooks.build import blank_chapter, load, skeleton, to_text  # slow to import
    from tplab.course.notebooks.source import SourceError, read

    try:
        source, solution = read(files.source), load(files.reference)
    except (OSError, SourceError) as error:
        raise Misuse(f"{files.source} can't be read: {error}. Bring the course up to date: git pull") from error
    ids = [cell.id for cell in skeleton(source, blank=True).cells]
    if solution is None or [cell.id for cell in solution.cells] != ids:
        raise Misuse(f"solutions/{files.stem}.ipynb doesn't fit its source. Run `make notebooks`")
    return to_text(blank_chapter(source, solution))


def keep(path: Path, data: bytes, folder: Path) -> Path:
    """Save `data` in `folder`/kept/ as a time-stamped copy of the file, and return its path.

    Copies are never overwritten. If there's already a copy of the file with the same content, no new one is made.
    """
    kept, digest = folder / KEPT, hashlib.sha256(data).hexdigest()[:12]
    for copy in kept.glob(f"{path.stem}-*-{digest}*{path.suffix}"):
        if copy.read_bytes() == data:  # otherwise, somebody has edited the copy
            return copy
    kept.mkdir(parents=True, exist_ok=True)
    name, count = f"{path.stem}-{time.strftime('%Y-%m-%d-%H%M%S')}-{digest}", 1
    copy = kept / f"{name}{path.suffix}"
    while copy.exists():
        count += 1
        copy = kept / f"{name}-{count}{path.suffix}"
    replace(copy, data)
    return copy
