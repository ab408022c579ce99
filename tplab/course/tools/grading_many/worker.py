"""The process that checks one notebook for `tplab grade`. It limits itself, and then does what `tplab check` does.

It reads one JSON object from stdin (see `order`) and writes one JSON line to stdout for each verdict and note, and
{"done": true} at the end. jobs.py starts it, reads the lines, and ends it.
"""

import json
import os
import re
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tplab.course.grading.check_notebook import Note, check_notebook
from tplab.course.grading.merge import Piece, merge
from tplab.course.notebooks.cells import Unreadable, read_notebook
from tplab.course.tools.grading_many.limits import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
    PR_SET_PDEATHSIG,
    Limits,
    confine,
    limit_process,
    prctl,
)

_SUSPICIOUS = re.compile(
    r"\bos\.(?:kill\w*|_exit|abort|fork|getppid|remove|unlink|rmdir|chmod|environ|system|popen)\b|\bsubprocess\b"
    r"|\b(?:ctypes|psutil|multiprocessing|socket|urllib|requests|importlib|get_ipython|sys\.modules|sys\._\w+)\b"
    r"|\b(?:gc|inspect)\.\w+|\btplab\.course\.\w+|__(?:globals|code|import|builtins|dict)__|/proc\b"
    r"|\b(?:setattr|exec|eval|open|globals)(?=\()|\b(?:torch|tplab)(?:\.\w+)+(?= *=[^=])"
)
LONGEST = 20_000  # how many characters of a message are kept
COMMAND = [sys.executable, "-P", "-c", "from tplab.course.tools.grading_many.worker import main; main()"]


def order(reference: Path, notebook: Path, scratch: Path, limits: Limits) -> bytes:
    """Return the JSON object that a worker reads from stdin."""
    paths = {"reference": str(reference), "notebook": str(notebook), "scratch": str(scratch)}
    return json.dumps(paths | {"limits": asdict(limits)}).encode()


def main() -> None:
    if os.getpid() != 1:  # process 1 of a namespace ends with it, and the namespace ends with process 1
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the run ends what it has started
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_DUMPABLE, 0)  # so that no cell can open this process's pipe through /proc
    asked = json.loads(sys.stdin.buffer.read())
    limits, path = Limits(**asked["limits"]), Path(asked["notebook"])
    reference = read_notebook(Path(asked["reference"]))  # read it now, since `confine` makes it unreadable
    limit_process(limits)
    confine(Path(asked["scratch"]))
    try:
        learner = read_notebook(path)
        pieces = merge(reference, learner).pieces
        tell({"answers": answers(pieces)})
        if words := suspicious(pieces):
            told = f"Read this one's code yourself: it mentions {', '.join(words)}, which no exercise needs."
            tell({"note": {"text": told[:LONGEST]}})
        for said in check_notebook(reference, path, learner=learner, timeout=limits.cell):
            kind = "note" if isinstance(said, Note) else "verdict"
            tell({kind: {name: text[:LONGEST] for name, text in asdict(said).items()}})
    except Unreadable as error:
        tell({"problem": str(error).replace(str(path), "The notebook")[:LONGEST]})
    except MemoryError:
        tell({"problem": "The notebook needs more memory than the limit just to be read."})
    except (ValueError, TypeError, RecursionError) as error:
        tell({"problem": f"The notebook can't be read: {error}"[:LONGEST]})
    tell({"done": True})


def answers(pieces: list[Piece]) -> dict[str, str]:
    """Return the student's code by exercise."""
    found: dict[str, str] = {}
    for piece in pieces:
        if piece.role == "exercise":
            found[piece.number] = (found.get(piece.number, "") + piece.source.rstrip() + "\n")[:LONGEST]
    return found


def suspicious(pieces: list[Piece]) -> list[str]:
    """Return words in the student's code that no exercise needs, but that an attempt to cheat may need."""
    theirs = [piece.source for piece in pieces if piece.role in ("exercise", "own")]
    return sorted({found[0] for source in theirs for found in _SUSPICIOUS.finditer(source)})[:10]


def tell(what: dict[str, Any]) -> None:
    line = memoryview(json.dumps(what).encode() + b"\n")
    while line:
        line = line[os.write(sys.stdout.fileno(), line) :]
