"""Draws pictures/rooms.svg, the picture in ARCHITECTURE.md: the rooms of tplab and which of them import which.

    make picture

Names and summaries are read from each room's docstring, and arrows from the imports in the sources. Only where a box
stands is decided here. `tests/test_architecture.py` fails when the file no longer matches the sources.
"""

import ast
import re
import textwrap
from pathlib import Path

from pictures.drawing import arrow, box, document, text
from tplab.common.imports import ImportGraph

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "pictures" / "rooms.svg"

# The column and row of each room; row 0 is at the bottom, and a room stands above everything it imports
PLACES = {
    "trace": (0, 0), "collectives": (2, 0), "memory": (4, 0),
    "tensor": (2, 1), "cost": (5, 1),
    "checkpoint": (1, 2), "gpt": (2, 2), "data": (4, 2),
    "sequence": (2, 3),
    "pipeline": (3, 4),
    "viz": (0, 5), "cluster": (4, 5),
    "course": (2, 6),
    "capstone": (1, 7),
}  # fmt: skip
GROUND = ["runtime", "common"]  # every room may import these two, so they get no arrows

COLUMN, ROW = 178, 122  # distance between two boxes, in pixels
WIDTH, HEIGHT = 160, 86  # of a box
FLOOR_HEIGHT = 48
MARGIN = 14
COLUMNS, ROWS = 6, 8
SOFT, LINE, BOX, FLOOR = "#52606d", "#7b8794", "#e6f0fa", "#eceff1"
DESCRIPTION = "The rooms of tplab as boxes. An arrow points from a room to each room it imports."


def svg() -> str:
    """The picture as text. Raises ValueError if a room has no place, or stands below a room it imports."""
    imports = imports_of_rooms()
    if missing := imports.keys() - PLACES.keys() - set(GROUND):
        raise ValueError(f"give {', '.join(sorted(missing))} a place in PLACES of pictures/rooms.py")
    if gone := (PLACES.keys() | set(GROUND)) - imports.keys():
        raise ValueError(f"there is no room called {', '.join(sorted(gone))}: take it out of pictures/rooms.py")
    width, height = 2 * MARGIN + COLUMN * (COLUMNS - 1) + WIDTH, 2 * MARGIN + ROW * ROWS + FLOOR_HEIGHT
    arrows = [_arrow(room, other) for room, others in without_detours(imports).items() for other in sorted(others)]
    boxes = [_box(room, *_corner(room), WIDTH, HEIGHT, BOX) for room in PLACES]
    half = (width - 2 * MARGIN - (COLUMN - WIDTH)) / 2
    floor = [
        _box(room, MARGIN + i * (half + COLUMN - WIDTH), MARGIN + ROW * ROWS, half, FLOOR_HEIGHT, FLOOR)
        for i, room in enumerate(GROUND)
    ]
    return document(width, height, [*arrows, *boxes, *floor], "The rooms of tplab", DESCRIPTION)


def imports_of_rooms() -> dict[str, set[str]]:
    """The rooms that each room imports, without the ground floor."""
    package = ROOT / "tplab"
    graph = ImportGraph(ROOT, "tplab")
    found: dict[str, set[str]] = {path.parent.name: set() for path in package.glob("*/__init__.py")}
    for file in package.glob("*/**/*.py"):
        room = file.relative_to(package).parts[0]
        for needed in graph.imports(file):
            other = needed.relative_to(package).parts[0]
            if other in found and other not in (room, *GROUND):
                found[room].add(other)
    return found


def without_detours(imports: dict[str, set[str]]) -> dict[str, set[str]]:
    """Without the imports that follow from others: where a imports b and b imports c, there is no arrow from a to c."""

    def reachable(room: str) -> set[str]:
        return imports[room].union(*(reachable(other) for other in imports[room]))

    return {
        room: {other for other in others if not any(other in reachable(via) for via in others - {other})}
        for room, others in imports.items()
    }


def _corner(room: str) -> tuple[float, float]:
    column, row = PLACES[room]
    return MARGIN + COLUMN * column, MARGIN + ROW * (ROWS - 1 - row)


def _arrow(room: str, other: str) -> str:
    """From the bottom of a box to the top of the one it imports."""
    (x, y), (to_x, to_y) = _corner(room), _corner(other)
    if y >= to_y:
        raise ValueError(f"{room} imports {other}, so its row in PLACES of pictures/rooms.py must be the higher one")
    lean = (to_x - x) / COLUMN * 12  # so that arrows which share a box do not meet in one point
    return arrow(x + WIDTH / 2 + lean, y + HEIGHT, to_x + WIDTH / 2 - lean, to_y - 1, LINE, 1.5)


def _box(room: str, x: float, y: float, width: float, height: float, color: str) -> str:
    chapters, summary = _summary(room)
    lines = textwrap.wrap(summary, int((width - 8) / 5.9))
    middle = x + width / 2
    number = f' <tspan font-weight="normal" font-size="11" fill="{SOFT}">{chapters}</tspan>' if chapters else ""
    drawn = [box(x, y, width, height, color, LINE, 1, 8)]
    drawn.append(text(middle, y + 18, room, size=14, anchor="middle", bold=True).replace("</text>", f"{number}</text>"))
    for row, said in enumerate(lines):
        drawn.append(text(middle, y + 35 + 14 * row, said, size=10.5, color=SOFT, anchor="middle"))
    return "\n".join(drawn)


def _summary(room: str) -> tuple[str, str]:
    """The chapters ("02 to 09" or "") and the first line of a room's docstring."""
    docstring = ast.get_docstring(ast.parse((ROOT / "tplab" / room / "__init__.py").read_text(encoding="utf-8")))
    first = (docstring or " ").splitlines()[0].rstrip(".")
    found = re.match(r"Chapters? (\d\d(?: to \d\d)?): (.*)", first)
    chapters, summary = (found[1].replace(" to ", "\N{EN DASH}"), found[2]) if found else ("", first)
    return chapters, summary[0].upper() + summary[1:].replace("`", "")


if __name__ == "__main__":
    TARGET.write_text(svg(), encoding="utf-8")
    print(f"wrote {TARGET.relative_to(ROOT)}")
