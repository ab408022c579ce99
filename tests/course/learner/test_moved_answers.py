"""Answers move along when the course gives their exercises other numbers, and never into a different task."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import ROOT
from tplab.course.learner import library, moved_answers
from tplab.course.learner.course_files import Course
from tplab.course.learner.passages import Passage
from tplab.course.learner.update_notebook import update_notebook


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
        self.course = Course(folder, folder)
        self.course.memory.mkdir()
        self.pages: list = []
        self.blanks: dict[str, bytes] = {}

    def add(self, stem: str, base: dict | None, mine: dict | None, blank: dict) -> None:
        page = SimpleNamespace(
            stem=stem, base=self.course.memory / f"{stem}.ipynb", learner=self.course.folder / f"{stem}.ipynb"
        )
        for path, content in ((page.base, base), (page.learner, mine)):
            if content is not None:
                path.write_text(json.dumps(content))
        self.pages.append(page)
        self.blanks[stem] = json.dumps(blank).encode()

    def plan(self) -> moved_answers.Moves:
        return moved_answers.plan(self.course, [page for page in self.pages if page.learner.exists()], self.blanks)

    def update(self, readable: int = 99) -> list[str]:
        """Update the first pages, as if only so many could be read."""
        moves = self.plan()
        for page in self.pages[:readable]:
            new = json.loads(self.blanks[page.stem])
            mine = new
            if page.learner.exists():
                base, there = (
                    json.loads(path.read_text()) if path.exists() else None for path in (page.base, page.learner)
                )
                mine, _ = update_notebook(base, there, new, moves.changed, moves.carried)
            page.learner.write_text(json.dumps(mine))
            page.base.write_bytes(self.blanks[page.stem])
        return moved_answers.fill_in(self.course, self.pages, moves)

    def cell(self, stem: str, number: str) -> str:
        cells = json.loads((self.course.folder / f"{stem}.ipynb").read_text())["cells"]
        (found,) = [cell for cell in cells if cell["metadata"].get("tplab", {}).get("exercise") == number]
        return "".join(found["source"])


@pytest.fixture
def chapters(tmp_path: Path) -> Chapters:
    """Exercise 2.2, `split(x)`, has moved to a new page as S.1, and 2.2 is a different task now."""
    made = Chapters(tmp_path)
    answer = "import math\n\n\ndef split(x):\n    return math.floor(x)  # mine"
    made.add("02_old", notebook(e2_2=stub("2.2", "def split(x)")), notebook(e2_2=answer),
             notebook(e2_2=stub("2.2", "def other(y)")))  # fmt: skip
    made.add("start", None, None, notebook(eS_1=stub("S.1", "def split(x)")))
    return made


def test_an_answer_follows_its_exercise_with_all_it_needs(chapters):
    assert chapters.update() == ["Your answer to 2.2 is now in exercise S.1 in start.ipynb."]
    assert chapters.cell("start", "S.1") == "import math\n\n\ndef split(x):\n    return math.floor(x)  # mine"
    assert chapters.cell("02_old", "2.2") == stub("2.2", "def other(y)")
    assert chapters.update() == []


def test_a_killed_update_is_finished_by_the_next(chapters):
    chapters.plan()
    page = chapters.pages[0]  # the notebook was updated and the old answer is gone from it, but nothing was filled in
    for path in (page.base, page.learner):
        path.write_bytes(chapters.blanks["02_old"])
    for path in (chapters.pages[1].base, chapters.pages[1].learner):
        path.write_bytes(chapters.blanks["start"])
    assert chapters.update() == ["Your answer to 2.2 is now in exercise S.1 in start.ipynb."]
    assert "# mine" in chapters.cell("start", "S.1")
    assert not (chapters.course.memory / moved_answers.PLAN).exists()


def test_every_line_of_the_cell_moves_along_in_its_order(tmp_path):
    answer = """\'\'\'My notes.\'\'\'
# how it works
import math

# first half
def shard(x):
    !echo inside
    return math.floor(x)
shard = math.cache(shard)
% ls
%time shard(3)

# second half
@shard
def unshard(x):
    return x

# to do: why?"""
    made = Chapters(tmp_path)
    made.add("02_old", notebook(e2_2=stub("2.2", "def shard(x)", "def unshard(x)")), notebook(e2_2=answer),
             notebook(e2_2=stub("2.2", "def other(y)")))  # fmt: skip
    made.add("start", None, None, notebook(eS_1=stub("S.1", "def unshard(x)", "def shard(x)")))
    made.update()
    cell = made.cell("start", "S.1")
    first, second = answer.index("# first half"), answer.index("# second half")
    parts = answer[:first], answer[second:], answer[first:second]  # the new exercise asks for them in another order
    assert [part.strip() for part in cell.split("\n\n\n")] == [part.strip() for part in parts]
    assert answer not in (tmp_path / "02_old.ipynb").read_text()


def test_an_answer_that_arrives_late_does_not_replace_what_the_learner_has_written_since(chapters):
    chapters.plan()  # the update was killed right after it had taken the answer out of the old notebook
    for page in chapters.pages:
        page.base.write_bytes(chapters.blanks[page.stem])
        page.learner.write_bytes(chapters.blanks[page.stem])
    since = stub("S.1", "def split(x)") + "\n# an idea"
    chapters.pages[1].learner.write_text(json.dumps(notebook(eS_1=since)))
    chapters.update()
    cells = json.loads(chapters.pages[1].learner.read_text())["cells"]
    assert [cell["source"] for cell in cells] == [
        "import math\n\n\ndef split(x):\n    return math.floor(x)  # mine",
        since,
    ]
    chapters.update()
    assert json.loads(chapters.pages[1].learner.read_text())["cells"] == cells


def test_an_answer_whose_new_notebook_cannot_be_read_stays_until_it_can(chapters):
    page = chapters.pages[1]
    page.learner.write_text("{")
    chapters.update(readable=1)
    assert "# mine" in chapters.pages[0].learner.read_text()
    page.learner.write_text(json.dumps(notebook(eS_1=stub("S.1", "def split(x)"))))
    page.base.write_bytes(chapters.blanks["start"])
    chapters.update()
    assert "# mine" in chapters.cell("start", "S.1")


def test_a_function_with_other_arguments_is_a_different_task(tmp_path):
    made = Chapters(tmp_path)
    made.add("02_old", notebook(e2_1=stub("2.1", "def count(n)")), notebook(e2_1="def count(n):\n    return n"),
             notebook(e2_1=stub("2.1", "def count(shape)")))  # fmt: skip
    assert made.update() == []
    cells = json.loads((tmp_path / "02_old.ipynb").read_text())["cells"]
    assert [cell["source"] for cell in cells] == [stub("2.1", "def count(shape)"), "def count(n):\n    return n"]
    assert "tplab" not in cells[1]["metadata"], "the old answer stays below, as a cell of the learner's own"


def test_an_answer_stays_if_its_exercise_asks_for_one_more_function(tmp_path):
    made = Chapters(tmp_path)
    pages = [
        notebook(e5_4=stub("5.4", "class Gated")),
        notebook(e5_4="class Gated:\n    pass  # mine"),
        notebook(e5_4=stub("5.4", "def rows(rank)", "class Gated")),
    ]
    for page in pages:
        page["cells"][0]["metadata"]["tags"] = ["nbval-ignore-output"]  # a tag of the course's, not of the learner's
    made.add("05_mlp", *pages)
    assert made.update() == ["Exercise 5.4 in 05_mlp.ipynb has changed. Your answer is in its new version."]
    cells = json.loads((tmp_path / "05_mlp.ipynb").read_text())["cells"]
    assert [cell["source"] for cell in cells] == [
        stub("5.4", "def rows(rank)") + "\n\n\nclass Gated:\n    pass  # mine"
    ], "a second copy below would hide later changes to the first"


def test_an_answer_gets_the_new_name_of_a_function_that_was_renamed(tmp_path):
    chapters = Chapters(tmp_path)
    answer = "def init_from_master(param):\n    return param  # mine, from init_from_master"
    chapters.add(
        "04_layers", notebook(e4_4=stub("4.4", "def init_from_master(param)")), notebook(e4_4=answer),
        notebook(e4_4=stub("4.4", "def init_shard(param)")),
    )  # fmt: skip
    assert chapters.update() == ["Exercise 4.4 in 04_layers.ipynb has changed. Your answer is in its new version."]
    assert chapters.cell("04_layers", "4.4") == answer.replace("init_from_master", "init_shard")


def test_an_answer_of_the_library_gets_the_new_name_too(tmp_path, monkeypatch):
    course = Course(tmp_path, tmp_path)
    course.memory.mkdir()
    monkeypatch.setattr(library, "write", lambda course, written: None)
    answer = Passage([], ["P = 2"], ["def one_f_one_b(p, m):\n    return one_f_one_b(p - 1, m) if p > P else []"])
    library._store(course, {"13.2": library.Written(answer, "today")})
    library.renumber(course, {"13.2": "13.1"}, {"13.1", "13.2"})
    (passage,) = [written.passage for written in library.load(course).values()]
    assert passage.names == {"schedule"}
    assert passage.used.isdisjoint({"one_f_one_b"})


def test_exercises_that_were_joined_are_filled_in_as_far_as_they_were_answered(tmp_path):
    made = Chapters(tmp_path)
    old = notebook(e3_2=stub("3.2", "class G"), e3_3=stub("3.3", "class Scatter"), e3_4=stub("3.4", "class Gather"))
    mine = notebook(
        e3_2="class G:\n    mine = 2", e3_3="class Scatter:\n    mine = 3", e3_4=stub("3.4", "class Gather")
    )
    new = notebook(e3_3=stub("3.3", "class G", "class Scatter", "class Gather"))
    made.add("03_ops", old, mine, new)
    assert made.update() == ["Your answers to 3.2 and 3.3 are now in exercise 3.3 in 03_ops.ipynb."]
    text = made.cell("03_ops", "3.3")
    assert text.startswith("class G:\n    mine = 2\n\n\nclass Scatter:\n    mine = 3\n\n\nclass Gather:\n")
    assert 'raise NotImplementedError("exercise 3.3")' in text


def test_an_answer_that_lacks_something_is_carried_over_but_has_not_passed(tmp_path):
    """As 15.4, which became 15.1: one of its functions has a new argument, so that one has to be written again."""
    made = Chapters(tmp_path)
    old = notebook(e15_4=stub("15.4", "def newest(folder)", "def save(folder)"))
    mine = notebook(e15_4="def newest(folder):\n    return 1\n\n\ndef save(folder):\n    return 2")
    new = notebook(e15_1=stub("15.1", "def newest(folder)", "def save(folder, group)"))
    made.add("15_capstone", old, mine, new)
    assert made.plan().whole == set()
    assert made.update() == ["Your answer to 15.4 is now in exercise 15.1 in 15_capstone.ipynb."]
    text = (made.course.folder / "15_capstone.ipynb").read_text()
    assert all(part in text for part in ("return 1", "return 2", "def save(folder, group)")), "nothing is lost"


def test_two_exercises_that_ask_for_the_same_names_stay_apart(tmp_path):
    """As 2.1 and 4.3, which both ask for `shard`: an answer to one is none to the other."""
    made = Chapters(tmp_path)
    both = notebook(e2_1=stub("2.1", "def shard(x)"), e4_3=stub("4.3", "def shard(x)"))
    mine = notebook(e2_1="def shard(x):\n    return x", e4_3=stub("4.3", "def shard(x)"))
    made.add("02_both", both, mine, both)
    assert made.update() == []
    assert made.cell("02_both", "4.3") == stub("4.3", "def shard(x)")


def test_a_prediction_that_asks_for_other_values_is_new():
    def predicting(source: str) -> dict:
        made = notebook(e2_1=source)
        made["cells"][0] |= {"id": "predict-2-a", "metadata": {"tplab": {"predict": "2.a"}}}
        return made

    old, mine = predicting('predict("2.a", rows=...)'), predicting('predict("2.a", rows=3)')
    new = predicting('predict("2.a", weights=...)')
    merged = update_notebook(old, mine, new)[0]["cells"]
    assert [cell["source"] for cell in merged] == ['predict("2.a", weights=...)', 'predict("2.a", rows=3)']
    assert merged[1]["metadata"] == {"tags": ["raises-exception"]}, "it fails, and what is below it runs all the same"
    assert update_notebook(old, mine, old)[0]["cells"][0]["source"] == 'predict("2.a", rows=3)'


def test_an_answer_of_the_library_keeps_what_it_uses_although_that_is_no_exercise_anymore(tmp_path, monkeypatch):
    course = Course(tmp_path, tmp_path)
    course.memory.mkdir()
    monkeypatch.setattr(library, "write", lambda course, written: None)
    answers = {
        "2.1": Passage(["import math"], ["HALF = 0.5"], ["def half(x):\n    return math.floor(HALF * x)"]),
        "2.2": Passage([], [], ["def quarter(x):\n    return half(half(x))"]),
        "2.3": Passage([], [], ["def unused(x):\n    return x"]),
        "2.4": Passage([], ["TWO = 2"], ["def stays(x):\n    return TWO * quarter(x)"]),
        "3.1": Passage([], [], ["def half(x):\n    return x"]),
    }
    stored = {number: library.Written(passage, "today") for number, passage in answers.items()}
    library._store(course, stored)
    library.renumber(course, {"2.4": "2.2"}, {"2.1", "2.2", "2.3", "2.4"})
    kept = library.load(course)
    assert list(kept) == ["2.2", "3.1"]
    assert kept["3.1"] == stored["3.1"]
    assert kept["2.2"].passage.code == answers["2.4"].code
    names: dict = {}
    for text in (*kept["2.2"].passage.imports, *kept["2.2"].passage.helpers, *kept["2.2"].passage.code):
        exec(text, names)
    assert names["stays"](9) == 4
    assert "unused" not in names


@pytest.mark.parametrize(("old", "new"), moved_answers.REWORDED.items())
def test_an_answer_stays_where_it_is_if_the_course_only_renamed_an_argument(tmp_path, old, new):
    answer = f"def {old}:\n    return 1"
    chapters = Chapters(tmp_path)
    base, today = notebook(e1_1=stub("1.1", f"def {old}")), notebook(e1_1=stub("1.1", f"def {new}"))
    chapters.add("01_x", base, notebook(e1_1=answer), today)
    assert chapters.plan() == moved_answers.Moves(set(), {}, {})
    merged, changes = update_notebook(base, notebook(e1_1=answer), today, chapters.plan().changed)
    assert [cell["source"] for cell in merged["cells"]] == [answer]
    assert (changes.kept, changes.new_task) == (["1.1"], ["1.1"])


def test_what_was_reworded_is_what_chapters_01_and_08_ask_for():
    sources = [path for number in ("01", "08") for path in (ROOT / "solutions").glob(f"{number}_*.py")]
    asked = [moved_answers._definitions(path.read_text(encoding="utf-8")) for path in sources]
    assert set(moved_answers.REWORDED.values()) <= {name for each in asked for name in each.values()}
