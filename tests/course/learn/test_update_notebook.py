"""A new version of a chapter comes into a learner's notebook, and nothing that the learner wrote is lost.

test_random_updates.py tries what nobody thought of.
"""

import re

import pytest

from tests import saying
from tests.course import tiny
from tplab.course.learn.update_notebook import Changes, update_notebook
from tplab.course.notebooks.build import blank_chapter, skeleton
from tplab.course.notebooks.source import read

MORE = """
# %% [markdown]
# A new section, which the first version doesn't have.

# %%
print("new")
"""


def blank(root, text: str) -> dict:
    """The blank chapter that a source makes, as JSON."""
    chapter = read(tiny.write(root, text))
    return blank_chapter(chapter, skeleton(chapter, blank=False))


@pytest.fixture
def old(tmp_path) -> dict:
    return blank(tmp_path, tiny.source(3))


@pytest.fixture
def new(tmp_path) -> dict:
    """A given cell, a stub's docstring and a text changed, a cell went, a section was added, and so was an exercise."""
    text = tiny.source(4)
    for before, after in [
        ('print("a given cell")', 'print("a given cell, changed")'),
        ("# # 90. A made-up chapter", "# # 90. A made-up chapter, second edition"),
        ('def double_3(x):\n    """Twice x."""', 'def double_3(x):\n    """Twice x, for any x."""'),
        ("# %%\ndouble_2(4)\n", ""),
    ]:
        assert before in text
        text = text.replace(before, after)
    return blank(tmp_path, text + MORE)


def updated(old: dict, mine: tiny.Learner, new: dict) -> tuple[tiny.Learner, Changes]:
    merged, changes = update_notebook(old, mine.content, new)
    return tiny.Learner(merged), changes


def sources(notebook: tiny.Learner) -> list[str]:
    return [cell["source"] for cell in notebook.cells]


def find(notebook: tiny.Learner, words: str) -> dict:
    return next(cell for cell in notebook.cells if words in cell["source"])


def test_untouched_notebook_becomes_the_new_version(old, new):
    merged, changes = update_notebook(old, old, new)
    assert merged["cells"] == new["cells"]
    assert changes.kept == []


def test_answers_predictions_and_own_cells_stay_where_they_were(old, new):
    mine = tiny.Learner(old)
    answer = mine.cell("exercise-90-1")
    answer.update(source="def double_1(x): return x + x", outputs=[{"output_type": "stream"}], execution_count=7)
    answer["metadata"]["collapsed"] = True
    mine.answer(3, "return x * 2")
    mine.cell("predict-90-a")["source"] = 'predict("90.a", value=5)'
    mine.insert(mine.place("exercise-90-2"), "helper = 1", "mine-1")
    mine.insert(0, "# First of all, a note", "mine-0")
    mine.insert(len(mine.cells), "# the end", "mine-2")
    merged, changes = updated(old, mine, new)
    assert merged.cell("exercise-90-1") == answer
    assert merged.cell("exercise-90-3")["source"] == "def double_3(x):\n    return x * 2\n"
    assert merged.cell("predict-90-a")["source"] == 'predict("90.a", value=5)'
    assert merged.place("mine-0") == 0
    assert merged.place("mine-1") == merged.place("exercise-90-2") - 1
    assert merged.place("mine-2") > merged.place("check-90-3")
    assert changes.kept == ["90.1", "90.3"]
    assert changes.new_task == ["90.3"], "its given lines changed"
    assert re.search(saying("90.1", "90.3", "90.3", "chapters/"), str(changes))
    assert 'print("a given cell, changed")' in sources(merged)
    assert not {'print("a given cell")', "double_2(4)"} & set(sources(merged))
    assert merged.cell("exercise-90-4")


def test_a_given_cell_that_only_the_learner_changed_stays_as_they_left_it(old, new):
    mine = tiny.Learner(old)
    find(mine, "double_1(4)")["source"] = "double_1(400)"
    mine.cells.remove(find(mine, "double_3(4)"))
    attached = {"a.png": {"image/png": "AA=="}}
    mine.cell("task-90-1").update(source="My words ![](attachment:a.png)", attachments=attached)
    for id in ("exercise-90-2", "check-90-2"):
        mine.cells.remove(mine.cell(id))
    merged, changes = updated(old, mine, new)
    assert "double_1(400)" in sources(merged)
    assert not {"double_1(4)", "double_3(4)"} & set(sources(merged))
    assert changes.beside == []
    assert find(merged, "My words")["attachments"] == attached
    for id in ("exercise-90-2", "check-90-2"):
        assert merged.cell(id) == tiny.Learner(new).cell(id), "only a given cell stays deleted"


def test_a_given_cell_that_both_changed_is_followed_by_the_learners(old, new):
    changed = next(cell for cell in new["cells"] if "a given cell, changed" in cell["source"])
    another = changed | {"id": "another", "source": "other = 1"}
    place = new["cells"].index(changed)
    new["cells"][place : place + 1] = [another | {"id": "one-more"}, changed, another]
    mine = tiny.Learner(old)
    given = find(mine, "a given cell")
    given["source"] = 'print("a given cell")\nx = 3  # mine'
    mine.insert(mine.cells.index(given) + 1, "print(x)", "mine")
    merged, changes = updated(old, mine, new)
    theirs = find(merged, "x = 3  # mine")
    assert theirs["metadata"] == {"tags": ["raises-exception"]}, "it may fail, and what is below it runs all the same"
    assert sources(merged)[place : place + 5] == [
        "other = 1", changed["source"], theirs["source"], "print(x)", "other = 1",
    ]  # fmt: skip
    assert changes.beside == [changed["id"]]


def test_the_learners_own_cell_stays_below_a_given_cell_that_the_course_changed(old, new):
    mine = tiny.Learner(old)
    mine.insert(mine.cells.index(find(mine, "a given cell")) + 1, "print(x)", "mine")
    merged, changes = updated(old, mine, new)
    assert merged.place("mine") == sources(merged).index('print("a given cell, changed")') + 1
    assert changes.beside == []


def test_an_edited_check_is_followed_by_the_learners(old, new):
    mine = tiny.Learner(old)
    mine.cell("check-90-1")["source"] += "  # mine"
    merged, changes = updated(old, mine, new)
    place = merged.place("check-90-1")
    assert merged.cells[place] == tiny.Learner(new).cell("check-90-1")
    assert "# mine" in merged.cells[place + 1]["source"]
    assert changes.beside == ["check-90-1"]
    assert "1 place" in str(changes)
