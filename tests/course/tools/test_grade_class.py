"""`tplab grade` on a whole class, some of them hostile (see a_class.py): everyone gets a verdict, no cheat passes.

It runs twice: with all that Linux offers, and without namespaces and Landlock, as on a system that has neither. Cells
that aim at other processes or files of the user are tried only where something holds them back.
"""

import csv
import io
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.course import tiny
from tests.course.tools import a_class
from tplab.course.tools.grading_many import limits
from tplab.course.tools.grading_many.submissions import printable

pytestmark = pytest.mark.slow

# What a system without namespaces and Landlock looks like to `tplab grade`
BARE = """
import tplab.course.tools.grading_many.limits as limits
limits.landlock_version = lambda: 0
limits.namespace = lambda: []
"""
AIMED = ("kills everyone", "kills what it can find", "deletes everything", "writes elsewhere", "kills its parents",
         "forges results", "takes Ann's file", "takes the solution")  # fmt: skip
PARTS = 6  # of the class, one a test
LIMITS = ("--cell-timeout", "20", "--timeout", "60", "--memory", "2", "--disk", "0.3", "--processes", "100")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        tiny.make(folder, tiny.source(a_class.EXERCISES))
    return folder


class Graded:
    """A run of `tplab grade` on a class, in folders of its own."""

    def __init__(self, root: Path, base: Path, names: list[str], bare: bool = False):
        self.folder, self.out, self.home = base / "class", base / "class-grades", base / "home"
        self.expected = a_class.make(root, self.folder, self.out, self.home, names)
        (self.home / "diary").parent.mkdir()
        (self.home / "diary").write_text("private")
        self.before = a_class.contents(self.folder)
        path = [str(root)]
        if bare:
            (base / "bare").mkdir()
            (base / "bare" / "sitecustomize.py").write_text(tiny.SITE.replace("__file__", repr(str(root / "x"))) + BARE)
            path.insert(0, str(base / "bare"))
        self.environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path), "HOME": str(self.home), "API_TOKEN": a_class.SECRET, "COLUMNS": "200",
        }  # fmt: skip
        self.command = [sys.executable, "-m", "tplab", "grade", str(self.folder), "--root", str(root), *LIMITS]
        self.said = self.run()

    def run(self) -> str:
        done = subprocess.run(self.command, env=self.environment, capture_output=True, text=True, errors="replace")
        assert done.returncode in (0, 1), done.stdout + done.stderr
        assert done.stderr == ""
        return done.stdout

    @property
    def rows(self) -> dict[str, dict[str, str]]:
        """The rows of the CSV file by submission."""
        text = (self.out / "grades.csv").read_bytes().decode("utf-8-sig")
        return {row["submission"].removeprefix("'"): row for row in csv.DictReader(io.StringIO(text, newline=""))}

    def row(self, name: str) -> dict[str, str]:
        shown = printable(name)
        return self.rows.get(shown) or self.rows[f"{shown}.ipynb"]

    def wrong(self) -> dict[str, tuple]:
        """The submissions with other statuses than expected."""
        found = {}
        for name, statuses in self.expected.items():
            row = self.row(name)
            got = tuple(row[f"90.{k}"] for k in range(1, a_class.EXERCISES + 1))
            cheated = got[2] == "passed" and name not in a_class.HONEST
            wanted = statuses if statuses != () else ("",) * a_class.EXERCISES
            if cheated or (wanted is not None and got != wanted):
                found[name] = (got, wanted, row["remarks"])
        return found

    def texts(self) -> list[str]:
        return [path.read_text(encoding="utf-8") for path in self.out.rglob("*.html")]


class Tags(HTMLParser):
    """The tags of a page, with their attributes' names."""

    def __init__(self, text: str):
        super().__init__()
        self.found: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found |= {tag, *(name for name, _ in attributes)}


KNOWN_TAGS = {
    "html", "lang", "head", "meta", "charset", "http-equiv", "content", "name", "title", "style", "body", "h1", "h2",
    "h3", "p", "pre", "span", "aria-label", "role", "details", "summary", "div", "class", "table", "tr", "td", "th",
    "a", "href",
}  # fmt: skip


def looked_at(graded: Graded) -> None:
    """What holds for every class."""
    assert graded.wrong() == {}
    assert a_class.contents(graded.folder) == graded.before
    assert a_class.left_behind() == []
    texts = graded.texts()
    assert len(texts) == len(graded.rows) + 1
    for text in texts:
        assert Tags(text).found <= KNOWN_TAGS
        assert a_class.SECRET not in text
    for row in graded.rows.values():
        assert not [cell for cell in row.values() if cell.startswith(("=", "+", "-", "@"))]
    assert "and 0 are to be checked" in graded.run()
    assert graded.wrong() == {}


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("bare", [False, True], ids=["protected", "bare"])
def test_the_whole_class(root, tmp_path, bare, part):
    if not bare and not (limits.namespace() and limits.landlock_version() >= 6):
        pytest.skip("needs namespaces and Landlock 6, with which nothing reaches the processes of this test")
    names = ["Ann", *a_class.everyone()[part::PARTS]]  # the others link to Ann's file and try to take it
    graded = Graded(root, tmp_path, [name for name in names if not (bare and name in AIMED)], bare)
    print(graded.said)
    looked_at(graded)


def test_a_small_class(root, tmp_path):
    graded = Graded(root, tmp_path, ["Ann", "injects", "os._exit", "cut short", "link.ipynb", "empty/"])
    looked_at(graded)
    assert "1 passed" not in graded.row("empty/")["remarks"]
    assert graded.row("empty/")["remarks"] == "The folder has no notebook."
    assert "This is a link" in graded.row("link.ipynb")["remarks"]
    assert "not valid JSON" in graded.row("cut short")["remarks"]
    assert graded.row("Ann")["passed"] == "3"
