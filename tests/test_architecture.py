"""The order of the rooms is the order of the chapters, and ARCHITECTURE.md shows the rooms as they are."""

import ast
import importlib
import re
import tomllib
from pathlib import Path

from pictures import rooms
from tests import ROOT
from tplab.common.imports import ImportGraph

PYPROJECT = (ROOT / "pyproject.toml").read_text()
CONTRACTS = tomllib.loads(PYPROJECT)["tool"]["importlinter"]["contracts"]
TPLAB = ROOT / "tplab"


def chapters_of_rooms() -> dict[str, range]:
    """The chapters that the comments of a contract in pyproject.toml give the rooms: {"tensor": range(2, 10), ...}."""
    contract = next(one for one in CONTRACTS if one.get("containers") == ["tplab"])
    found = {}
    for layer in contract["layers"]:
        comment = re.search(rf'^    "{re.escape(layer)}", # (\d\d)(?: to (\d\d))?$', PYPROJECT, re.MULTILINE)
        if comment:
            chapters = range(int(comment[1]), int(comment[2] or comment[1]) + 1)
            found |= dict.fromkeys(layer.split(" | "), chapters)
    return found


ROOMS = chapters_of_rooms()


def test_the_rooms_are_in_the_order_of_the_chapters():
    firsts = [chapters[0] for chapters in ROOMS.values()]
    assert firsts == sorted(firsts, reverse=True)
    assert set(range(16)) == {chapter for chapters in ROOMS.values() for chapter in chapters}


def test_ls_shows_rooms_and_little_else():
    shown = {path.name for path in TPLAB.iterdir() if path.name != "__pycache__"}
    rooms = {path.name for path in TPLAB.iterdir() if (path / "__init__.py").exists()}
    assert shown - rooms == {"__init__.py", "__main__.py", "plain.py", "py.typed"}
    assert rooms == {*ROOMS, "common", "runtime", "viz", "course"}


def test_every_module_is_in_the_table_of_its_package():
    for init in sorted(TPLAB.rglob("__init__.py")):
        package = init.parent
        if "exercises" in package.parts:
            continue
        modules = {path.stem for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
        table = re.findall(r"^ *(?:\d\d  )?(\S.*?)  ", ast.get_docstring(ast.parse(init.read_text())), re.MULTILINE)
        assert modules - set(re.findall(r"\w+", " ".join(table))) <= {"__init__", "__main__"}, package


def names_used_in(path: Path) -> set[str]:
    """All words of a text or a chapter. In other code, the names that it reads or imports, except by recursion."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md" or path.parent.name == "solutions":
        return set(re.findall(r"\w+", text))
    names: set[str] = set()
    for statement in ast.parse(text).body:
        own = {getattr(statement, "name", "")}
        for node in ast.walk(statement):
            match node:
                case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name) | ast.alias(name=name):
                    names |= {name} - own
    return names


def test_a_chapter_a_command_a_document_or_other_code_uses_every_exported_name():
    """Tests don't count as users, and neither does the changelog."""
    folders = ("tplab", "solutions", "pictures", "benchmarks")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    texts = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("tplab/**/*.md")]
    users = [path for path in sources + texts if path.name not in ("__init__.py", "CHANGELOG.md")]
    used = set().union(*map(names_used_in, users))
    rooms = [importlib.import_module(f"tplab.{init.parent.name}") for init in TPLAB.glob("*/__init__.py")]
    exported = {name for room in rooms for name in getattr(room, "__all__", ())}
    assert len(exported) > 200
    assert exported - used == {"gradient_bytes"}, "only tests use them"  # it completes parameter_ and optimizer_bytes


# Checks that can be read


def files_of_checks() -> dict[str, list[Path]]:
    """For each exercise the files of its chapter that its check depends on, without those that chapters share."""
    graph = ImportGraph(ROOT, "tplab")
    found = {}
    for path in sorted((TPLAB / "course" / "exercises").glob("ch*/*.py")):
        for exercise in re.findall(r'^@?(?:checks\.)?exercise\(\s*"([\d.]+)"', path.read_text(), re.MULTILINE):
            needed = graph.closure([path])
            found[exercise] = [file for file in needed if file.parent == path.parent and file.stem != "__init__"]
    return found


def test_a_check_needs_two_short_files_of_its_chapter_on_average_and_three_at_most():
    files = files_of_checks()
    assert len(files) > 70
    assert {exercise: len(of_one) for exercise, of_one in files.items() if len(of_one) > 3} == {}
    assert sum(map(len, files.values())) <= 2 * len(files)
    lengths = {path: len(path.read_text().splitlines()) for of_one in files.values() for path in of_one}
    assert {str(path): length for path, length in lengths.items() if length > 400} == {}


# The picture in ARCHITECTURE.md


def test_the_picture_shows_the_rooms_and_their_imports_as_they_are_now():
    assert rooms.TARGET.read_text() == rooms.svg(), "the picture is out of date: run `make picture` and look at it"
    assert "(pictures/rooms.svg)" in (ROOT / "ARCHITECTURE.md").read_text()


def test_every_file_that_architecture_names_is_there():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for name in re.findall(r"`([\w./]+\.(?:py|md|toml|svg))`", text):
        if "NN" not in name:
            homes = [ROOT, TPLAB, TPLAB / "runtime", TPLAB / "course" / "checks"]
            assert any((home / name).exists() for home in homes), name
