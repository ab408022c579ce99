"""On a notebook page, a cell that meets an unwritten exercise shows a calm box and is done; anywhere else it fails."""

import re
from collections.abc import Iterator

import pytest

from tests import ROOT, saying
from tests.runtime.kernel import Cell, Notebook, opened
from tplab.course.notebooks.cells import read_notebook

STUB = """\
from tplab.course import check
def shard(tensor, dim, rank, world_size):
    raise NotImplementedError("exercise 2.1")
def unshard(shards, dim):
    raise NotImplementedError("exercise 2.1")"""
CHECK = 'check("2.1", shard, unshard)'
SOLUTION = read_notebook(next((ROOT / "solutions").glob("02_*.ipynb")))
RIGHT = next(cell.source for cell in SOLUTION if cell.id == "exercise-2-1")


@pytest.fixture(scope="module")
def book() -> Iterator[Notebook]:
    """A kernel as JupyterLab starts it."""
    yield from opened("02.ipynb", STUB)


@pytest.fixture(scope="module")
def bare() -> Iterator[Notebook]:
    """A kernel without a page, as nbclient and nbval start it."""
    yield from opened(None, STUB)


def status(book: Notebook, cell: Cell) -> str:
    """What the kernel answered: on "error", a page doesn't run the cells that are queued."""
    request = cell.messages[0]["parent_header"]["msg_id"]
    while True:
        reply = book.client.get_shell_msg(timeout=60)
        if reply["parent_header"]["msg_id"] == request:
            return reply["content"]["status"]


def test_an_unwritten_check_is_calm(book: Notebook) -> None:
    cell = book.run(CHECK)
    assert (cell.error, status(book, cell)) == ("", "ok")
    assert cell.text.startswith("Exercise 2.1 ")
    assert 'raise NotImplementedError("exercise 2.1")' in " ".join(cell.text.split()), "it may be all that's left to do"


def test_given_cells_wait_too_also_on_ranks_and_for_what_is_missing(book: Notebook) -> None:
    met = book.run("parts = shard(torch.ones(4), 0, 0, 2)")
    assert (met.error, status(book, met)) == ("", "ok")
    assert "exercise 2.1" in met.text
    missed = book.run("print(parts.sum())")
    assert (missed.error, status(book, missed)) == ("", "ok")
    assert re.search(saying("`parts`", "exercise 2.1", "NameError: name 'parts' is not defined"), missed.text)
    half = book.run("runs = {}\nruns[2] = shard(torch.ones(4), 0, 0, 2)")
    assert "exercise 2.1" in half.text
    empty = book.run("min(runs)")
    assert (empty.error, status(book, empty)) == ("", "ok")
    assert "`runs`" in empty.text
    assert "ValueError" in empty.text, "what else may be wrong isn't hidden"
    ranks = book.run("tplab.launch(lambda: shard(torch.ones(4), 0, 0, 2), 2)")
    assert (ranks.error, status(book, ranks)) == ("", "ok")
    assert "exercise 2.1" in ranks.text
    assert "Error" not in met.text + ranks.text


def test_another_exercises_check_names_the_one_to_start_with(book: Notebook) -> None:
    cell = book.run('check("2.4", lambda y: shard(y, 0, 0, 2))')
    assert re.search(saying("Exercise 2.4", "exercise 2.1"), cell.text)  # the first launch may come before it
    assert not cell.error


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("no_such_name", "NameError"),
        ("raise NotImplementedError('no such operator')", "no such operator"),
        ("1 / 0", "ZeroDivisionError"),
        ("tplab.launch(lambda: 1 / 0, 2)", "ZeroDivisionError"),
        ('check("2.1", lambda *a: a[0], lambda *a: a[0][0])', "CheckFailed"),
    ],
)
def test_every_other_error_is_still_one(book: Notebook, source: str, told: str) -> None:
    cell = book.run(source)
    assert told in cell.error
    assert status(book, cell) == "error"


def test_a_check_that_runs_before_its_exercise_says_so(book: Notebook) -> None:
    cell = book.run('check("2.4", gather_last_dim)')
    assert (cell.error, status(book, cell)) == ("", "ok")
    assert re.match(saying("Exercise 2.4", "`gather_last_dim`"), cell.text)
    inner = book.run('check("2.4", lambda y: nothing_like_this)')
    assert "NameError" in inner.error + inner.text, "a mistake in the answer stays one"
    assert status(book, inner) == "error"


def test_a_stopped_check_says_where_the_answer_was(book: Notebook) -> None:
    book.run("def shard(tensor, dim, rank, world_size):\n    print('here')\n    time.sleep(600)")
    request = book.start(CHECK)
    book.wait_until_shown(request, "here")
    book.manager.interrupt_kernel()
    cell = book.finish(request)
    assert re.match(saying("KeyboardInterrupt: ", "exercise 2.1", "\n  cell ["), cell.error)
    assert cell.error.endswith("line 3, in shard\n    time.sleep(600)")
    assert "exercises.py" not in cell.error
    assert status(book, cell) == "error"
    book.run(STUB)


def test_a_written_exercise_passes_and_what_was_missing_is_made(book: Notebook) -> None:
    book.run("first = shard(torch.ones(4), 0, 0, 2)")
    book.run("first = 1 / 0")  # fails, so `first` is still missing
    book.run(RIGHT)
    assert re.search(saying("Exercise 2.1", "passed"), book.run(CHECK).text)
    assert "exercise 2.1" in book.run("first").text
    assert not book.run("first = shard(torch.ones(4), 0, 0, 2)").text
    assert "tensor([1., 1.])" in book.run("first").text
    assert "AttributeError" in book.run("first.nothing").error
    book.run(STUB)


def test_without_a_page_it_fails(bare: Notebook) -> None:
    cell = bare.run("shard(torch.ones(4), 0, 0, 2)")
    assert "NotImplementedError: exercise 2.1" in cell.error
    assert status(bare, cell) == "error"
    for source in (CHECK, 'check("2.4", lambda y: shard(y, 0, 0, 2))'):
        cell = bare.run(source)
        assert status(bare, cell) == "error", "Run All stops here"
        error = next(m["content"] for m in cell.messages if m["msg_type"] == "error")
        assert (error["ename"], error["evalue"]) == ("NotImplementedError", "exercise 2.1"), "`tplab check` reads these"


def test_a_pass_shows_one_box_and_a_failure_a_box_and_one_line(bare: Notebook) -> None:
    passed = bare.run('tplab.course.feedback.verdict.CheckPassed("4.1", "Column", "", "Right: out.")')
    (shown,) = [m["content"]["data"] for m in passed.messages if "data" in m["content"]]
    assert "✓ Exercise 4.1" in shown["text/html"]
    failed = bare.run(
        'raise tplab.course.feedback.verdict.CheckFailed("Exercise 4.2: wrong.", question="Who adds up?")'
    )
    box, error = [m["content"] for m in failed.messages if m["msg_type"] in ("display_data", "error")]
    assert "Who adds up?" in box["data"]["text/html"]
    assert "Who adds up?" in box["data"]["text/plain"]
    assert error["traceback"] == ["CheckFailed: Exercise 4.2: wrong."]
    assert "Who adds up?" in error["evalue"]
