"""Which tests run: all of them, those of `make test`, those that it leaves to `make nightly`, those a change can reach.

    pytest tests                       everything there is: `make nightly`
    pytest tests --part daily          what `make test` runs
    pytest tests --part nightly        the rest
    pytest tests --reached HEAD~3      of these, what the changes since HEAD~3 can reach (HEAD: what is not committed)
    pytest tests --at-most 1200        of these, if there are more, a share, which changes with the number of commits

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
from tplab.course.notebooks.numbering import START_NUMBER, chapter_files, number_of, package, parse_chapter

PARTS = ("all", "daily", "nightly")
EVERYWHERE = ("tests/conftest.py", "tests/selection.py", "pyproject.toml", "constraints.txt")  # reach every test
PER_CHAPTER = "test_chapters.py"  # in tests/course and in tests/browser
ABOUT_ALL_MODULES = ("tests/test_architecture.py", "tests/test_house.py", "tests/test_renamed_modules.py")


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("selection")
    group.addoption("--part", choices=PARTS, default="all", help="daily: what `make test` runs; nightly: the rest")
    group.addoption("--turn", type=int, default=0, metavar="N", help="which share of the shared tests is due")
    group.addoption("--reached", metavar="COMMIT", help="only tests that a change since this commit can reach")
    group.addoption("--at-most", type=int, metavar="N", help="if there are more tests than N, run only a share of them")


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take out of `items` what is not asked for, and keep in mind how much that is."""
    part, since = config.getoption("part"), config.getoption("reached")
    due = {id(item) for item in due_today(items, config.getoption("turn"))}
    kept = [item for item in items if part == "all" or (id(item) in due) == (part == "daily")]
    if since is not None and (files := _files(config)):
        kept = [item for item in kept if files.reach(item)]
    if (most := config.getoption("at_most")) and len(kept) > most:
        kept = _share_due(kept, config.getoption("turn"), -(-len(kept) // most))
    chosen = {id(item) for item in kept}
    left_out = [item for item in items if id(item) not in chosen]
    whole_files = {path.relative_to(ROOT).as_posix(): ALL for path in config.stash.get(IGNORED, [])}
    config.stash[LEFT_OUT] = Counter(_kind(item) for item in left_out) + Counter(whole_files)
    if (to_controller := getattr(config, "workeroutput", None)) is not None:  # under pytest-xdist
        to_controller["left_out"] = dict(config.stash[LEFT_OUT])
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if id(item) in chosen]


LEFT_OUT = pytest.StashKey[Counter[str]]()  # how many tests each function lacks; ALL for a file that was not imported
IGNORED = pytest.StashKey[list[Path]]()
ALL = 1_000_000


def report(config: pytest.Config, terminal: pytest.TerminalReporter) -> None:
    """Say what was left out, so that nothing rots unseen."""
    left_out = config.stash.get(LEFT_OUT, Counter())
    if left_out:
        files = sum(count == ALL for count in left_out.values())
        tests = left_out.total() - files * ALL
        some = f"{tests} tests" + (f" and {files} test files that the change can't reach" if files else "")
        terminal.section(f"left out: {some} (`make nightly` runs everything)", sep="-", bold=True)
        is_quick = config.getoption("reached") and config.getoption("part") == "daily"  # nobody reads a list then
        for kind, count in [] if is_quick else left_out.most_common():
            terminal.write_line(f"{'all' if count == ALL else count:>6} {kind}")


def ignores(config: pytest.Config, path: Path) -> bool | None:
    """Return True for a test file that the change can't reach, so that it isn't even imported."""
    if config.getoption("reached") is None or not path.name.startswith("test_") or path.name == PER_CHAPTER:
        return None
    files = _files(config)
    if files is None or files.reach_file(path):
        return None
    config.stash.setdefault(IGNORED, []).append(path)
    return True


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
        due += _share_due(of_one_kind, turn, count)
    return due


def _share_due(items: list[pytest.Item], turn: int, count: int) -> list[pytest.Item]:
    """Return every `count`-th of the items, but at least one. In `count` successive turns, each of them is returned."""
    shuffled = sorted(items, key=lambda item: (zlib.crc32(item.nodeid.encode()), item.nodeid))
    return shuffled[turn % min(count, len(shuffled)) :: count]


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


FILES = pytest.StashKey["Files | None"]()


def _files(config: pytest.Config) -> "Files | None":
    """What the change since `--reached` reaches, found only once. None: everything."""
    if FILES not in config.stash:
        changed = changed_since(config.getoption("reached"))
        everything = any(path.relative_to(ROOT).as_posix() in EVERYWHERE for path in changed)
        graph = ImportGraph(ROOT, "tplab", "tests", "benchmarks", mentions=ROOT / "tests")
        config.stash[FILES] = None if everything else Files(graph, changed)
    return config.stash[FILES]


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
            return self.reach_file(item.path)
        return self._reach_chapter(chapter)

    def reach_file(self, path: Path) -> bool:
        if path not in self._by_file:
            needed = self.graph.closure([path])
            mentioned = any(name in file.read_text() for file in needed if _is_test(file) for name in self.names)
            about_all = path.relative_to(ROOT).as_posix() in ABOUT_ALL_MODULES and any(map(_is_module, self.changed))
            self._by_file[path] = bool(needed & self.changed) or mentioned or about_all
        return self._by_file[path]

    def _reach_chapter(self, number: int) -> bool:
        """By its source, its notebooks, its wrong answers, its checks, what they need, or the machinery around them."""
        if number not in self._by_chapter:
            checks = (ROOT / "tplab/course/exercises" / package(number)).glob("*.py")
            sources = {path for path in chapter_files(ROOT / "solutions", ".py") if number_of(path.stem) == number}
            own = {*sources, *(path.with_suffix(".ipynb") for path in sources)}
            own |= {ROOT / "chapters" / f"{path.stem}.ipynb" for path in sources}
            own |= {ROOT / f"tests/wrong_answers/{package(number)}.py"}
            machinery = [ROOT / "tests/wrong_answers/__init__.py", *(ROOT / "tplab/course/grade").glob("*.py")]
            all_wrong_answers = {*(ROOT / "tests/wrong_answers").glob("*.py")} - {machinery[0]}
            needed = self.graph.closure([*checks, *sources, *machinery]) - all_wrong_answers
            self._by_chapter[number] = bool((own | needed) & self.changed)
        return self._by_chapter[number]


def chapter_of(item: pytest.Item) -> int | None:
    """The chapter that a test of `tests/course/test_chapters.py` or of the browser was made for, by its parameter."""
    if item.path.name != PER_CHAPTER:
        return None
    number = re.search(r"\[(start|S|\d+|-1)[\]._ ]", item.nodeid)
    return (START_NUMBER if number[1] == str(START_NUMBER) else parse_chapter(number[1])) if number else None


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
