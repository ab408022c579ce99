"""The outcomes of `tplab grade`, one file per notebook, so that a second run only checks what is new or has changed.

    OUT/outcomes/<key>.json       the outcome
    OUT/outcomes/<key>.started    says that this notebook is being checked, or was when grading was killed

The key is a hash of the submission and of everything that its verdict depends on: the chapter's checks and all of tplab
that they need, the solution, and the limits. A file that can't be read counts as missing.
"""

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from tplab.common.files import replace
from tplab.course.grading.check_notebook import Verdict
from tplab.course.learner.course_files import ChapterFiles
from tplab.course.notebooks.kernels import PACKAGE_ROOT
from tplab.course.tools.fingerprint import checker_files
from tplab.course.tools.grading_many.jobs import Outcome
from tplab.course.tools.grading_many.limits import Limits
from tplab.course.tools.grading_many.submissions import Notebook

TRIES = 2  # a notebook is given up after `tplab grade` itself was killed this many times during its check


def checks_hash(files: ChapterFiles, limits: Limits) -> str:
    """Return a hash of everything besides the submission that a verdict depends on."""
    grading = (PACKAGE_ROOT / "tplab" / "course" / "grading").glob("*.py")
    digest = hashlib.sha256(json.dumps(asdict(limits)).encode())
    for path in [*sorted({*checker_files(files.number), *grading}), files.reference]:
        digest.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}".encode())
    return digest.hexdigest()


def key(notebook: Notebook, checks: str) -> str:
    return hashlib.sha256(f"{notebook.chapter} {notebook.hash} {checks}".encode()).hexdigest()[:32]


class Store:
    """The outcomes that are stored in a folder."""

    def __init__(self, out: Path) -> None:
        self.folder = out / "outcomes"
        self.folder.mkdir(parents=True, exist_ok=True)

    def load(self, key: str) -> Outcome | None:
        try:
            stored = json.loads((self.folder / f"{key}.json").read_text(encoding="utf-8"))
            verdicts = [Verdict(**verdict) for verdict in stored.pop("verdicts")]
            return Outcome(verdicts, **stored)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None

    def save(self, key: str, outcome: Outcome) -> None:
        replace(self.folder / f"{key}.json", json.dumps(asdict(outcome), indent=1).encode())
        self.forget(key)

    def tries(self, key: str) -> int:
        """Return how many times `tplab grade` was killed while it checked this notebook."""
        with suppress(OSError):
            return len((self.folder / f"{key}.started").read_bytes())
        return 0

    def start(self, key: str) -> None:
        with open(self.folder / f"{key}.started", "ab") as file:
            file.write(b"x")

    def forget(self, key: str) -> None:
        (self.folder / f"{key}.started").unlink(missing_ok=True)

    def given_up(self, key: str) -> str:
        return (
            f"tplab grade itself was killed {TRIES} times while it checked this notebook, the last time with no other "
            f"beside it. Check it by hand, in a container. To try again, delete {self.folder / f'{key}.started'}."
        )
