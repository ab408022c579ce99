"""Whatever a learner types and however the course changes meanwhile: after the update, all of it is in a notebook.

Each seed makes a chapter of two pages, has a learner edit it at random, has the course edit it at random, and updates.
Every edit of the learner types a new word, and every word must be found in one of the updated notebooks.
"""

import copy
import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import pytest

from tests.course.learn.test_moved_answers import Chapters
from tplab.course.learn.update_notebook import update_notebook

SEEDS = 150  # thousands of others have passed as well
PAGES = ("01_a", "02_b")


def make_cell(kind: str, source: str, id: str, **marks: str) -> dict:
    made = {"cell_type": kind, "id": id, "metadata": {"tplab": marks} if marks else {}, "source": source}
    return made | ({"outputs": [], "execution_count": None} if kind == "code" else {})


class Exercise:
    """An exercise of the course: what it is called, and the heads of the functions that it asks for."""

    def __init__(self, number: str, *heads: str) -> None:
        self.number, self.heads, self.docstring = number, list(heads), "What it does."

    def cells(self) -> list[dict]:
        id, names = self.number.replace(".", "-"), [re.split(r"\W", head.split()[1])[0] for head in self.heads]
        raises = f'raise NotImplementedError("exercise {self.number}")'
        stub = "\n\n\n".join(f'{head}:\n    """{self.docstring}"""\n    {raises}' for head in self.heads)
        check = f'check("{self.number}", {", ".join(names)})'
        return [
            make_cell("markdown", f"## {self.number}\n\nWrite {names}.", f"task-{id}", task=self.number),
            make_cell("code", stub, f"exercise-{id}", exercise=self.number),
            make_cell("code", check, f"check-{id}", check=self.number),
        ]

    def edit(self, draw: random.Random, count: int) -> None:
        what = draw.choice(["docstring", "arguments", "name", "task"])
        old, new = {"arguments": ("(", f"(new_{count}, "), "name": ("init_from_master", "init_shard")}.get(
            what, ("", "")
        )
        if what == "docstring":
            self.docstring += f" And more {count}."
        elif what == "task":
            self.heads = [f"def other_{count}(y)"]
        else:
            self.heads = [head.replace(old, new) for head in self.heads]


class Prediction:
    def __init__(self, number: str, *fields: str) -> None:
        self.number, self.fields = number, list(fields)

    def cells(self) -> list[dict]:
        asked = ", ".join(f"{field}=..." for field in self.fields)
        id = f"predict-{self.number.replace('.', '-')}"
        return [make_cell("code", f'predict("{self.number}", {asked})', id, predict=self.number)]

    def edit(self, draw: random.Random, count: int) -> None:
        self.fields = draw.choice([["rows"], ["loss", "calls"], [*self.fields, "steps"]])


class Given:
    def __init__(self, kind: str, source: str) -> None:
        self.number, self.kind, self.source = "", kind, source

    def cells(self) -> list[dict]:
        return [make_cell(self.kind, self.source, f"cell-{crc32((self.kind + self.source).encode())}")]

    def edit(self, draw: random.Random, count: int) -> None:
        self.source = draw.choice([self.source + f"\n# more {count}", f"other = {count}\nprint(other)"])


def first_version() -> list[list]:
    """The pages of the course, as lists of what is on them."""
    return [
        [
            Given("markdown", "# A page about halves\n\nEach rank has a half."), Given("code", "import torch"),
            Prediction("1.a", "rows"), Exercise("1.1", "def half(x)"), Given("code", "half(4)\nprint(half(8))"),
            Exercise("1.2", "def shard(x, dim)", "def unshard(parts, dim)"), Given("markdown", "Now we have both."),
            Prediction("1.b", "calls", "bytes"), Given("code", "for size in (2, 4):\n    print(shard(size, 0))"),
        ],
        [
            Given("markdown", "# A page about layers"), Exercise("2.1", "class Layer"),
            Given("code", "layer = Layer()"), Exercise("2.2", "def init_from_master(param)"),
            Prediction("2.a", "loss"), Given("markdown", "The end."),
        ],
    ]  # fmt: skip


def notebook(page: list) -> dict:
    cells = [cell for part in page for cell in part.cells()]
    return {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


def change_the_course(draw: random.Random, pages: list[list]) -> None:
    for count in range(draw.choice([0, 1, 1, 2, 4, 8])):
        page = draw.choice(pages)
        part = draw.choice(page)
        others = [other for page in pages for other in page if type(other) is type(part)]
        match draw.choice(["edit", "edit", "edit", "remove", "add", "move", "swap numbers", "new number", "join"]):
            case "remove" if len(page) > 3:
                page.remove(part)
            case "move" if len(page) > 3:
                page.remove(part)
                draw.choice(pages).insert(draw.randrange(3), part)
            case "add":
                page.insert(draw.randrange(len(page) + 1), Given(draw.choice(["markdown", "code"]), f"new = {count}"))
            case "swap numbers":
                other = draw.choice(others)
                part.number, other.number = other.number, part.number
            case "new number":
                part.number = f"3.{count + 1}"
            case "join" if isinstance(part, Exercise):
                part.heads += [head for other in others if other in page and other is not part for head in other.heads]
                page[:] = [other for other in page if other is part or other not in others]
            case _:
                part.edit(draw, count)


class Learner:
    def __init__(self, draw: random.Random, notebook: dict, words: Iterator[str]) -> None:
        self.draw, self.cells, self.words = draw, notebook["cells"], words
        self.typed: list[str] = []

    def word(self) -> str:
        self.typed.append(next(self.words))
        return self.typed[-1]

    def edit(self) -> None:
        place = self.draw.randrange(len(self.cells))
        marked = [place for place, cell in enumerate(self.cells) if "tplab" in cell["metadata"]]
        if marked and self.draw.random() < 0.7:
            place = self.draw.choice(marked)
        others = [self.delete, self.duplicate, self.move, self.split, self.insert, self.change_type, self.lose]
        self.draw.choice([self.write] * 8 + others)(place)

    def write(self, place: int) -> None:
        cell = self.cells[place]
        marks = cell["metadata"].get("tplab", {})
        forms = [self.inside] * 3 + [self.answer] * 3 * ("exercise" in marks) + [self.guess] * 3 * ("predict" in marks)
        form = self.draw.choice(forms)
        cell["source"] = form(cell["source"]) if cell["cell_type"] == "code" else f"{cell['source']}\n\n{self.word()}"

    def line(self) -> str:
        forms = [
            "{} = 16", "# with h = 16: {}", "note = '''\n{}\n'''", "!echo {}", "x = %time {}", "{}?", "%%{}",
            "def {}(x): return x", "'{}'", "{}(", "    {}", ";print {}", "if {}:", "\n\n{}\n\n", "# {}\n",
        ]  # fmt: skip
        return self.draw.choice(forms).format(self.word())

    def inside(self, source: str) -> str:
        """Write a line into a cell, above it or below it."""
        lines = source.split("\n")
        lines.insert(self.draw.choice([0, len(lines), self.draw.randrange(len(lines) + 1)]), self.line())
        return "\n".join(lines)

    def answer(self, source: str) -> str:
        return re.sub("raise NotImplementedError.*", lambda _: f"return {self.word()}  # {self.word()}", source)

    def guess(self, source: str) -> str:
        forms = ["{}", "f(h={})", "'{}'", "{", "3, # {}\n"]
        return re.sub(r"\.\.\.", lambda _: self.draw.choice(forms).replace("{}", self.word()), source)

    def delete(self, place: int) -> None:
        if len(self.cells) > 3 and not any(word in self.cells[place]["source"] for word in self.typed):
            self.cells.pop(place)

    def duplicate(self, place: int) -> None:
        twin = copy.deepcopy(self.cells[place])
        twin["id"] = self.draw.choice([twin.get("id", ""), f"twin-{len(self.cells)}"])
        self.cells.insert(self.draw.choice([place, place + 1, 0, len(self.cells)]), twin)
        self.write(self.draw.choice([self.cells.index(twin), place]))

    def move(self, place: int) -> None:
        self.cells.insert(self.draw.randrange(len(self.cells)), self.cells.pop(place))

    def split(self, place: int) -> None:
        lines = self.cells[place]["source"].split("\n")
        middle = self.draw.randrange(len(lines) + 1)
        twin = copy.deepcopy(self.cells[place]) | {
            "id": f"split-{len(self.cells)}",
            "source": "\n".join(lines[middle:]),
        }
        self.cells[place]["source"] = "\n".join(lines[:middle])
        self.cells.insert(place + 1, twin)

    def insert(self, place: int) -> None:
        self.cells.insert(place, make_cell("code", self.line(), f"own-{len(self.cells)}"))

    def change_type(self, place: int) -> None:
        self.cells[place]["cell_type"] = self.draw.choice(["markdown", "raw"])
        self.write(place)

    def lose(self, place: int) -> None:
        """Lose the ids or the metadata, of one cell or of all."""
        lost = self.draw.choice([{"id": ""}, {"metadata": {}}])
        for cell in self.draw.choice([self.cells, [self.cells[place]]]):
            cell |= copy.deepcopy(lost)


def learn(draw: random.Random, notebook: dict, words: Iterator[str]) -> list[str]:
    learner = Learner(draw, notebook, words)
    for _ in range(draw.choice([1, 1, 2, 4, 8, 16])):
        learner.edit()
    return [word for word in learner.typed if word in json.dumps(notebook)]  # without what they typed over later


@pytest.mark.parametrize("first", range(0, SEEDS, 50))
def test_nothing_that_a_learner_typed_is_ever_lost(first: int, tmp_path: Path) -> None:
    for seed in range(first, first + 50):
        lost = update_at_random(seed, tmp_path / str(seed))
        assert not lost, f"seed {seed} loses {lost}"


def update_at_random(seed: int, folder: Path) -> list[str]:
    """Make and update two pages; return the typed words that no notebook has any more."""
    draw = random.Random(seed)
    words = (f"typed{count}x" for count in itertools.count())
    old = [notebook(page) for page in first_version()]
    mine = copy.deepcopy(old)
    typed = [word for page in mine for word in learn(draw, page, words)]
    pages = first_version()
    change_the_course(draw, pages)
    new = [notebook(page) for page in pages]
    chapters = Chapters(folder)
    has_base = draw.random() < 0.85
    for stem, base, theirs, blank in zip(PAGES, old, mine, new, strict=True):
        chapters.add(stem, base if has_base else None, theirs, blank)
    chapters.update()
    for page, base, blank in zip(chapters.pages, old, new, strict=True):
        if has_base and base == blank:
            continue  # such a page isn't updated
        merged = json.loads(page.learner.read_text())
        there = {cell["id"]: cell["source"] for cell in merged["cells"]}
        assert len(there) == len(merged["cells"]), f"seed {seed}: an id twice"
        for cell in blank["cells"]:
            role = next(iter(cell["metadata"].get("tplab", {})), "")
            assert role not in ("exercise", "check", "predict") or cell["id"] in there, f"seed {seed}: no {cell['id']}"
            assert role != "check" or there[cell["id"]] == cell["source"], f"seed {seed}: an old check"
        assert update_notebook(blank, merged, blank)[0]["cells"] == merged["cells"], f"seed {seed}: a second update"
    updated = "".join(page.learner.read_text() for page in chapters.pages)
    return [word for word in typed if word not in updated]
