"""Answers move along when the course gives their exercises other numbers, and never into a different task."""

import json
import re
from pathlib import Path

import pytest

from tests import saying
from tests.course.learn.test_start import killed_at
from tplab.course.learn import library, start
from tplab.course.learn.course_files import ChapterFiles, Course
from tplab.course.learn.passages import Passage
from tplab.course.learn.update_notebook import update_notebook


def stub(number: str, *heads: str) -> str:
    raises = f'raise NotImplementedError("exercise {number}")'
    return "\n\n\n".join(
        f"{head}:\n    def forward(self):\n        {raises}" if head.startswith("class") else f"{head}:\n    {raises}"
        for head in heads
    )


def notebook(**sources: str) -> dict:
    """A notebook of exercise cells: notebook(e2_2="def f(x): ...")."""
    cells = []
    for key, source in sources.items():
        number = key[1:].replace("_", ".")
        cells.append({
            "cell_type": "code", "id": f"exercise-{number.replace('.', '-')}", "source": source, "outputs": [],
            "execution_count": None, "metadata": {"tplab": {"exercise": number}},
        })  # fmt: skip
    return {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


class Chapters:
    """The pages of a course: what they were (base), what the learner made of them, and what they are now (blank)."""

    def __init__(self, folder: Path) -> None:
        self.course = Course(folder / "material", folder)
        for name in ("solutions", "chapters"):
            (self.course.material / name).mkdir(parents=True)
        self.course.bases.mkdir(parents=True)
        self.pages: list[ChapterFiles] = []

    def add(self, stem: str, base: dict | None, mine: dict | None, blank: dict) -> None:
        files = ChapterFiles(self.course, stem)
        self.pages.append(files)
        for path, content in (
            (files.reference, blank), (files.blank, blank), (files.base, base), (files.learner, mine),
        ):  # fmt: skip
            if content is not None:
                path.write_text(json.dumps(content))

    def update(self) -> list[str]:
        return start.update(self.course).moved

    def cells(self, stem: str) -> list[dict]:
        return json.loads((self.course.folder / f"{stem}.ipynb").read_text())["cells"]

    def cell(self, stem: str, number: str) -> str:
        (found,) = [cell for cell in self.cells(stem) if cell["metadata"].get("tplab", {}).get("exercise") == number]
        return "".join(found["source"])


MINE = "import math\n\n\ndef split(x):\n    return math.floor(x)  # mine"


@pytest.fixture
def chapters(tmp_path: Path) -> Chapters:
    """Exercise 2.2, `split(x)`, has moved to a new page as S.1, and 2.2 is a different task now."""
    made = Chapters(tmp_path)
    made.add("02_old", notebook(e2_2=stub("2.2", "def split(x)")), notebook(e2_2=MINE),
             notebook(e2_2=stub("2.2", "def other(y)")))  # fmt: skip
    made.add("00_start", None, None, notebook(eS_1=stub("S.1", "def split(x)")))
    return made


def test_an_update_that_was_killed_is_finished_by_the_next(tmp_path, monkeypatch):
    other, new = notebook(e2_2=stub("2.2", "def other(y)")), notebook(e3_1=stub("3.1", "def split(x)"))
    killed, step = True, 0
    while killed:
        made = Chapters(tmp_path / str(step))
        made.add("02_old", notebook(e2_2=stub("2.2", "def split(x)")), notebook(e2_2=MINE), other)
        made.add("03_new", notebook(), notebook(), new)
        killed = killed_at(step, monkeypatch, made.update)
        made.update()
        assert made.cell("03_new", "3.1") == MINE, step
        assert made.cell("02_old", "2.2") == stub("2.2", "def other(y)"), step
        step += 1
    assert step > 5


def test_an_answer_follows_its_exercise_and_its_whole_cell_moves_as_it_was_written(tmp_path):
    written = """import math

# first half
def shard(x):
    !echo inside
    return math.floor(x)
shard = math.cache(shard)
%time shard(3)

@shard
def unshard(x):
    return x

# to do: why?"""
    made = Chapters(tmp_path)
    made.add("02_old", notebook(e2_2=stub("2.2", "def shard(x)", "def unshard(x)")), notebook(e2_2=written),
             notebook(e2_2=stub("2.2", "def other(y)")))  # fmt: skip
    made.add("00_start", None, None, notebook(eS_1=stub("S.1", "def unshard(x)", "def shard(x)")))
    (told,) = made.update()
    assert re.search(saying("S.1", "00_start.ipynb", "2.2"), told)
    assert made.cell("00_start", "S.1") == written
    assert made.cell("02_old", "2.2") == stub("2.2", "def other(y)")
    assert len(made.cells("02_old")) == 1
    assert made.update() == []


def test_an_answer_does_not_replace_what_the_learner_has_written_in_its_new_place(chapters):
    since = stub("S.1", "def split(x)") + "\n# an idea"
    chapters.pages[1].learner.write_text(json.dumps(notebook(eS_1=since)))
    chapters.update()
    assert [cell["source"] for cell in chapters.cells("00_start")] == [MINE, since]


def test_an_answer_whose_new_notebook_cannot_be_read_stays_where_it_is(chapters):
    chapters.pages[1].learner.write_text("{")
    chapters.update()
    assert "# mine" in chapters.pages[0].learner.read_text()


def answer(head: str) -> str:
    return f"{head}:\n    return 1  # mine"


SHARDS = {"e2_1": stub("2.1", "def shard(x)"), "e4_3": stub("4.3", "def shard(x)")}
PAGE = "02_page.ipynb"


@pytest.mark.parametrize(
    ("old", "mine", "new", "told", "cells"),
    [
        (
            notebook(e2_1=stub("2.1", "def count(n)")), notebook(e2_1=answer("def count(n)")),
            notebook(e2_1=stub("2.1", "def count(shape)")), [],
            [answer("def count(n)")],
        ),
        (
            notebook(e4_4=stub("4.4", "def init_from_master(param)")),
            notebook(e4_4=answer("def init_from_master(param)")), notebook(e4_4=stub("4.4", "def init_shard(param)")),
            [saying("4.4", PAGE, "4.4")], [answer("def init_shard(param)")],
        ),
        (
            notebook(e3_2=stub("3.2", "class G"), e3_3=stub("3.3", "class S"), e3_4=stub("3.4", "class T")),
            notebook(e3_2=answer("class G"), e3_3=answer("class S"), e3_4=stub("3.4", "class T")),
            notebook(e3_3=stub("3.3", "class G", "class S", "class T")),
            [saying("3.3", PAGE, "3.2", "3.3")],
            ["\n\n\n".join([answer("class G"), answer("class S"), stub("3.3", "class T")])],
        ),
        (  # an answer to one of two exercises that ask for the same name isn't one to the other
            notebook(**SHARDS), notebook(**SHARDS | {"e2_1": answer("def shard(x)")}), notebook(**SHARDS), [],
            [answer("def shard(x)"), SHARDS["e4_3"]],
        ),
    ],
    ids=["other arguments", "a new name", "joined", "the same name twice"],
)  # fmt: skip
def test_where_an_answer_is_after_the_exercise_changed(old, mine, new, told, cells, tmp_path):
    made = Chapters(tmp_path)
    made.add("02_page", old, mine, new)
    assert all(re.search(one, said) for one, said in zip(told, made.update(), strict=True))
    found = made.cells("02_page")
    assert [cell["source"] for cell in found] == cells
    assert all("tplab" not in cell["metadata"] for cell in found[len(new["cells"]) :])


def test_a_prediction_that_asks_for_other_values_is_new():
    def predicting(source: str) -> dict:
        made = notebook(e2_1=source)
        made["cells"][0] |= {"id": "predict-2-a", "metadata": {"tplab": {"predict": "2.a"}}}
        return made

    old, mine = predicting('predict("2.a", rows=...)'), predicting('predict("2.a", rows=3)')
    merged = update_notebook(old, mine, predicting('predict("2.a", weights=...)'))[0]["cells"]
    assert [cell["source"] for cell in merged] == ['predict("2.a", weights=...)', 'predict("2.a", rows=3)']
    assert merged[1]["metadata"] == {"tags": ["raises-exception"]}, "it fails, and what is below it runs all the same"


CHECK_TWO = r"tplab check 2(?! ?\d)"


def test_the_library_waits_for_a_new_check_of_a_chapter_whose_exercises_have_changed(chapters):
    passage = Passage([], [], ["def split(x):\n    return x"])
    library.add(chapters.course, {"2.2": passage, "2.3": passage, "S.2": passage})
    assert re.search(CHECK_TWO, chapters.update()[0])
    assert library.load(chapters.course).keys() == {"S.2"}


def test_an_answer_whose_arguments_have_changed_leaves_the_library_until_it_passes_again(tmp_path):
    made = Chapters(tmp_path)
    base, today = notebook(e2_2=stub("2.2", "def split(x)")), notebook(e2_2=stub("2.2", "def split(tensor)"))
    made.add("02_old", base, notebook(e2_2=MINE), today)
    library.add(made.course, {"2.2": Passage([], [], ["def split(x):\n    return x"])})
    assert re.search(CHECK_TWO, made.update()[0])
    assert library.load(made.course) == {}
    assert made.cell("02_old", "2.2") == MINE
