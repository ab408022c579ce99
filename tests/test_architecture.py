"""The order of the rooms is the order of the chapters, and ARCHITECTURE.md shows the rooms as they are."""

import ast
import importlib
import re
import tomllib
from pathlib import Path

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
    assert len(exported) > 150
    assert not exported - used, "only tests use them"


def test_a_check_needs_two_short_files_of_its_chapter_on_average_and_three_at_most():
    graph, counts, needed = ImportGraph(ROOT, "tplab"), [], set()
    for path in (TPLAB / "course" / "exercises").glob("ch*/*.py"):
        files = {file for file in graph.closure([path]) if file.parent == path.parent and file.stem != "__init__"}
        for _ in re.findall(r'^@?(?:checks\.)?exercise\(\s*"[\d.]+"', path.read_text(), re.MULTILINE):
            counts.append(len(files))
            needed |= files
    assert len(counts) > 70
    assert max(counts) <= 3
    assert sum(counts) <= 2 * len(counts)
    assert max(len(file.read_text().splitlines()) for file in needed) <= 400


GROUND = {"runtime", "common"}  # every room may import these


def imports_of_rooms() -> dict[str, set[str]]:
    """The rooms that each room imports, without the ground floor."""
    graph = ImportGraph(ROOT, "tplab")
    found: dict[str, set[str]] = {init.parent.name: set() for init in TPLAB.glob("*/__init__.py")}
    for file in TPLAB.glob("*/**/*.py"):
        room, *_ = file.relative_to(TPLAB).parts
        found[room] |= {needed.relative_to(TPLAB).parts[0] for needed in graph.imports(file)} & found.keys()
    return {room: others - {room} - GROUND for room, others in found.items() if room not in GROUND}


def reachable(arrows: dict[str, set[str]], room: str) -> set[str]:
    return arrows[room].union(*(reachable(arrows, other) for other in arrows[room]))


def test_the_picture_shows_the_rooms_and_their_imports_as_they_are_now():
    picture = re.search(r"```mermaid\n(.*?)```", (ROOT / "ARCHITECTURE.md").read_text(), re.DOTALL)[1]
    boxes = dict(re.findall(r'^    (\w+)\["<b>\1</b>(.*)"\]$', picture, re.MULTILINE))
    drawn: dict[str, set[str]] = dict.fromkeys(boxes, set())
    drawn |= {room: set(others.split(" & ")) for room, others in re.findall(r"(\w+) --> (.*)", picture)}
    real = imports_of_rooms()
    assert boxes.keys() == real.keys()
    for room, others in real.items():
        assert drawn[room] <= others, f"remove the arrow from {room} to what it doesn't import"
        assert others <= reachable(drawn, room), f"add an arrow from {room} to what it imports"
        direct = {other for other in drawn[room] if not any(other in reachable(drawn, via) for via in drawn[room])}
        assert drawn[room] == direct, f"remove the arrow from {room} that follows from others"
        first = ast.get_docstring(ast.parse((TPLAB / room / "__init__.py").read_text())).splitlines()[0]
        chapters, summary = re.match(r"(?:Chapters? (\d\d(?: to \d\d)?): )?(.*)", first.replace("`", "")).groups("")
        numbers = f" {chapters.replace(' to ', '–')}" if chapters else ""
        box = f"{numbers}<br>{summary.rstrip('.')}"
        assert boxes[room].lower() == box.lower(), f"the docstring of {room} begins with {first}"
