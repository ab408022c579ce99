"""Which tests run: all of them, those of `make test`, those that it leaves to `make nightly`, those a change can reach.

    pytest tests                       everything there is: `make nightly`
    pytest tests --part daily          what `make test` runs
    pytest tests --part nightly        the rest
    pytest tests --reached HEAD~3      of these, what the changes since HEAD~3 can reach (HEAD: what is not committed)

Two markers say what is left to the night:

    @pytest.mark.nightly               runs in the night only
    @pytest.mark.share(4)              a quarter runs by day, another quarter after each commit, all of them at night

A share is taken from all the tests that one function is parametrized into or, for a `pytestmark`, from all the tests
in its file.

The quarter that is due is the one of `--turn`, the number of commits, so the same commit always runs the same tests.
A test file is reached by a change of any module that it imports, directly or not, also where it names the module only
to start it (`tplab.common.imports`), and by a change of any other file whose name it mentions. Tests that are made for
each chapter are reached by that chapter's files, and tests about all modules by any of them.
"""

import re
import subprocess
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests import ROOT
from tplab.common.imports import ImportGraph

PARTS = ("all", "daily", "nightly")
EVERYWHERE = ("tests/conftest.py", "tests/selection.py", "pyproject.toml", "constraints.txt")  # reach every test
ABOUT_ALL_MODULES = ("tests/test_architecture.py", "tests/test_house.py", "tests/test_renamed_modules.py")


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("selection")
    group.addoption("--part", choices=PARTS, default="all", help="daily: what `make test` runs; nightly: the rest")
    group.addoption("--turn", type=int, default=0, metavar="N", help="which share of the shared tests is due")
    group.addoption("--reached", metavar="COMMIT", help="only tests that a change since this commit can reach")


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take out of `items` what is not asked for, and keep in mind how much that is."""
    part, since = config.getoption("part"), config.getoption("reached")
    due = {id(item) for item in due_today(items, config.getoption("turn"))}
    kept = [item for item in items if part == "all" or (id(item) in due) == (part == "daily")]
    if since is not None:
        kept = reached(kept, changed_since(since))
    chosen = {id(item) for item in kept}
    left_out = [item for item in items if id(item) not in chosen]
    config.stash[LEFT_OUT] = Counter(_kind(item) for item in left_out)
    if (to_controller := getattr(config, "workeroutput", None)) is not None:  # under pytest-xdist
        to_controller["left_out"] = dict(config.stash[LEFT_OUT])
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


LEFT_OUT = pytest.StashKey[Counter[str]]()


def report(config: pytest.Config, terminal: pytest.TerminalReporter) -> None:
    """Say what was left out, so that nothing rots unseen."""
    left_out = config.stash.get(LEFT_OUT, Counter())
    if left_out:
        terminal.section(f"left out: {left_out.total()} tests (`make nightly` runs everything)", sep="-", bold=True)
        for kind, count in left_out.most_common():
            terminal.write_line(f"{count:6} {kind}")


def _kind(item: pytest.Item) -> str:
    """The function that a test was made from: "tests/course/test_chapters.py::test_wrong_answer_is_caught"."""
    return item.nodeid.partition("[")[0]


# By day and by night


def due_today(items: Iterable[pytest.Item], turn: int) -> list[pytest.Item]:
    """What runs by day: tests without a mark, and of each shared one every k-th, but at least one."""
    due, shared = [], defaultdict(list)
    for item in items:
        if item.get_closest_marker("nightly"):
            continue
        if found := next(item.iter_markers_with_node("share"), None):
            node, share = found
            shared[node.nodeid if isinstance(node, pytest.Module) else _kind(item), share.args[0]].append(item)
        else:
            due.append(item)
    for (_, count), of_one_kind in shared.items():
        shuffled = sorted(of_one_kind, key=lambda item: (zlib.crc32(item.nodeid.encode()), item.nodeid))
        due += shuffled[turn % min(count, len(shuffled)) :: count]
    return due


# By change


def changed_since(commit: str) -> set[Path]:
    """The files that differ from a commit: committed since, not committed, or new."""
    if not (ROOT / ".git").exists():
        raise pytest.UsageError("--reached needs a git checkout, to know what has changed")
    names: list[str] = []
    for command in (["diff", "--name-only", commit], ["ls-files", "--others", "--exclude-standard"]):
        run = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)
        if run.returncode:
            raise pytest.UsageError(f"--reached {commit}: {run.stderr.strip()}")
        names += run.stdout.splitlines()
    return {ROOT / name for name in names}


def reached(items: Iterable[pytest.Item], changed: set[Path]) -> list[pytest.Item]:
    """The tests that a change of these files can make fail."""
    if any(path.relative_to(ROOT).as_posix() in EVERYWHERE for path in changed):
        return list(items)
    graph = ImportGraph(ROOT, "tplab", "tests", "benchmarks", mentions=ROOT / "tests")
    files = Files(graph, changed)
    return [item for item in items if files.reach(item)]


class Files:
    """Whether changed files reach a test, remembered by test file and by chapter."""

    def __init__(self, graph: ImportGraph, changed: set[Path]) -> None:
        self.graph, self.changed = graph, changed
        self.names = {name for path in changed if path.suffix != ".py" or _is_source(path) for name in _names(path)}
        self._by_file: dict[Path, bool] = {}
        self._by_chapter: dict[int, bool] = {}

    def reach(self, item: pytest.Item) -> bool:
        chapter = chapter_of(item)
        if chapter is None or item.path in self.changed:
            return self._reach_file(item.path)
        return self._reach_chapter(chapter)

    def _reach_file(self, path: Path) -> bool:
        if path not in self._by_file:
            needed = self.graph.closure([path])
            mentioned = any(name in file.read_text() for file in needed if _is_test(file) for name in self.names)
            about_all = path.relative_to(ROOT).as_posix() in ABOUT_ALL_MODULES and any(map(_is_module, self.changed))
            self._by_file[path] = bool(needed & self.changed) or mentioned or about_all
        return self._by_file[path]

    def _reach_chapter(self, number: int) -> bool:
        """By its source, its notebooks, its wrong answers, its checks, what they need, or the machinery around them."""
        if number not in self._by_chapter:
            package = (ROOT / "tplab/course/chapters" / f"ch{number:02d}").glob("*.py")
            sources = set((ROOT / "solutions").glob(f"{number:02d}_*.py"))
            own = {*sources, *(ROOT / "solutions").glob(f"{number:02d}_*.ipynb")}
            own |= {*(ROOT / "chapters").glob(f"{number:02d}_*.ipynb"), ROOT / f"tests/wrong_answers/ch{number:02d}.py"}
            machinery = [ROOT / "tests/wrong_answers/__init__.py", *(ROOT / "tplab/course/grading").glob("*.py")]
            needed = self.graph.closure([*package, *sources, *machinery]) - set((ROOT / "tests").rglob("ch??.py"))
            self._by_chapter[number] = bool((own | needed) & self.changed)
        return self._by_chapter[number]


def chapter_of(item: pytest.Item) -> int | None:
    """The chapter that a test of `tests/course/test_chapters.py` or of the browser was made for, by its parameter."""
    if item.path.name != "test_chapters.py":
        return None
    number = re.search(r"\[(\d+)[\]._ ]", item.nodeid)
    return int(number[1]) if number else None


def _is_module(path: Path) -> bool:
    return path.suffix == ".py" and not _is_source(path)


def _is_source(path: Path) -> bool:
    """A Python file that no test imports: it is reached by its name."""
    return path.relative_to(ROOT).parts[0] not in ("tplab", "tests", "benchmarks")


def _names(path: Path) -> set[str]:
    """How a test may call a file: by its own name, or by that of its folder."""
    relative = path.relative_to(ROOT)
    return {relative.name} | ({f'"{relative.parts[0]}"', f"{relative.parts[0]}/"} if len(relative.parts) > 1 else set())


def _is_test(path: Path) -> bool:
    return ROOT / "tests" in path.parents
