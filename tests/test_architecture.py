"""The order of the rooms is the order of the chapters, and ARCHITECTURE.md shows the rooms as they are."""

import ast
import re
import tomllib
from pathlib import Path

import grimp
import pytest

from pictures import rooms
from tests import ROOT
from tplab.common.imports import ImportGraph

PYPROJECT = (ROOT / "pyproject.toml").read_text()
CONTRACTS = tomllib.loads(PYPROJECT)["tool"]["importlinter"]["contracts"]
TPLAB = ROOT / "tplab"


def chapters_of_layers(container: str) -> dict[str, range]:
    """The chapters that the comments of a contract in pyproject.toml give its layers: {"tensor": range(2, 10), ...}."""
    contract = next(one for one in CONTRACTS if one.get("containers") == [container])
    found, chapters = {}, range(0)
    for layer in contract["layers"]:
        comment = re.search(rf'^    "{re.escape(layer)}", # (\d\d)(?: to (\d\d))?$', PYPROJECT, re.MULTILINE)
        if comment:
            chapters = range(int(comment[1]), int(comment[2] or comment[1]) + 1)
        elif container == "tplab":
            continue  # the ground floor, viz and course serve all chapters
        found |= dict.fromkeys(layer.split(" | "), chapters)
    return found


def chapters_named_in(path: Path) -> range:
    """What the docstring of a module or of a room opens with: "Chapter 04: ..." or "Chapters 02 to 09: ..."."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    named = re.match(r"Chapters? (\d\d)(?: to (\d\d))?: ", docstring)
    return range(int(named[1]), int(named[2] or named[1]) + 1) if named else range(0)


ROOMS = chapters_of_layers("tplab")


def test_the_rooms_are_in_the_order_of_the_chapters():
    firsts = [chapters[0] for chapters in ROOMS.values()]
    assert firsts == sorted(firsts, reverse=True)
    assert set(range(16)) == {chapter for chapters in ROOMS.values() for chapter in chapters}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_and_its_modules_name_the_chapters_that_they_serve(room):
    """The modules of the capstone are many, and all of chapter 15: there the room says so once."""
    layers = chapters_of_layers("tplab.tensor") if room == "tensor" else {}
    assert chapters_named_in(TPLAB / room / "__init__.py") == ROOMS[room]
    modules = [path for path in (TPLAB / room).glob("*.py") if path.stem != "__init__" and room != "capstone"]
    assert {path.stem: chapters_named_in(path) for path in modules} == {
        path.stem: layers.get(path.stem, ROOMS[room]) for path in modules
    }


def test_ls_shows_rooms_and_little_else_and_every_room_opens_with_what_it_is_for():
    shown = {path.name for path in TPLAB.iterdir() if path.name != "__pycache__"}
    rooms = {path.name for path in TPLAB.iterdir() if (path / "__init__.py").exists()}
    assert shown - rooms == {"__init__.py", "__main__.py", "plain.py", "py.typed"}
    assert rooms == {*ROOMS, "common", "runtime", "viz", "course"}
    for room in rooms:
        docstring = ast.get_docstring(ast.parse((TPLAB / room / "__init__.py").read_text())) or ""
        assert len(docstring.partition("\n")[0]) > 40, room


# Checks that can be read


def files_of_checks() -> dict[str, list[Path]]:
    """For each exercise the files of its chapter that one has to read to follow its check."""
    graph = ImportGraph(ROOT, "tplab")
    found = {}
    for path in sorted((TPLAB / "course" / "exercises").glob("ch*/*.py")):
        for exercise in re.findall(r'^@?(?:checks\.)?exercise\(\s*"([\d.]+)"', path.read_text(), re.MULTILINE):
            needed = graph.closure([path])
            found[exercise] = [file for file in needed if file.parent == path.parent and file.stem != "__init__"]
    return found


def test_a_check_is_followed_through_two_short_files_on_average_and_three_at_most():
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


def test_the_imports_in_the_picture_are_those_that_import_linter_sees():
    graph = grimp.build_graph("tplab", cache_dir=None)
    shown = rooms.imports_of_rooms()
    for room in shown:
        graph.squash_module(f"tplab.{room}")
    for room, others in shown.items():
        imported = {name.removeprefix("tplab.") for name in graph.find_modules_directly_imported_by(f"tplab.{room}")}
        assert others == imported - {"tplab", "plain", room, *rooms.GROUND}, room


def test_every_file_that_architecture_names_is_there():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for name in re.findall(r"`([\w./]+\.(?:py|md|toml|svg))`", text):
        if "NN" not in name:
            homes = [ROOT, TPLAB, TPLAB / "runtime", TPLAB / "course" / "checks"]
            assert any((home / name).exists() for home in homes), name
