"""In JupyterLab, an answer that passes goes into the learner's library at once, as `tplab check` would put it there."""

import re
from collections.abc import Iterator

import pytest

from tests import saying
from tests.capstone.own_layers.libraries import solution
from tests.course.learn.test_library import empty_course
from tests.runtime.kernel import Notebook, opened
from tplab.course.learn.course_files import Course

SETUP = "import torch\nfrom tplab.course import check"
HELPER = "# Cuts one way\ndef pieces(tensor, dim, p):\n    return tensor.chunk(p, dim)"
ANSWER = """\
def shard(tensor, dim, rank, world_size):
    # my own words
    if tensor.shape[dim] % world_size:
        raise ValueError(f"{tensor.shape[dim]} entries can't be cut into {world_size} equal pieces")
    return pieces(tensor, dim, world_size)[rank].clone(memory_format=torch.contiguous_format)


def unshard(shards, dim):
    return torch.cat(shards, dim)


print(shard(torch.ones(4), 0, 0, 2))"""
IN_IPYTHON = "\nfiles = !ls\n%time x = unshard([torch.ones(2)], 0)\nlen?"
CHECK = 'check("2.1", shard, unshard)'
MODULE = "my_tp/splitting.py"


@pytest.fixture(scope="module")
def course(tmp_path_factory) -> Course:
    return empty_course(tmp_path_factory.mktemp("page") / "my_course")


@pytest.fixture(scope="module")
def book(course) -> Iterator[Notebook]:
    """One page for the tests below, in their order: it remembers the cells that ran, as a learner's page does."""
    yield from opened("02.ipynb", SETUP, course.folder)


def text_of(course: Course) -> str:
    path = course.folder / MODULE
    return path.read_text() if path.exists() else ""


def html(cell) -> str:
    return "".join(m["content"]["data"].get("text/html", "") for m in cell.messages if "data" in m["content"])


def test_what_no_cell_shows_is_left_to_the_command_and_said(course, book):
    (course.folder / "elsewhere.py").write_text("import torch\n" + HELPER + "\n\n" + ANSWER)
    book.run("from elsewhere import shard, unshard")
    assert "`tplab check --exercise 2.1`" in book.run(CHECK).text
    book.run(HELPER)
    book.run(ANSWER.replace("my own words", "in a cell"))
    book.run("from elsewhere import shard, unshard")  # the answer that is checked isn't the one in the cell
    assert "tplab check --exercise 2.1" in book.run(CHECK).text
    assert text_of(course) == ""


def test_a_pass_puts_the_answer_with_its_helpers_into_the_library(course, book):
    for source in ("def pieces(tensor, dim, p):\n    return None", HELPER, "1 / 0", "def broken(:"):
        book.run(source)
    book.run(ANSWER + IN_IPYTHON)
    assert text_of(course) == ""
    shown = html(book.run(CHECK))
    assert re.search(saying("✓", "2.1"), shown)
    text = text_of(course)
    assert "# my own words" in text
    assert "# Cuts one way\ndef pieces" in text
    assert "return None" not in text
    assert "print" not in text
    found: dict = {}
    exec(text, found)
    assert found["shard"](__import__("torch").arange(4), 0, 1, 2).tolist() == [2, 3]


def test_better_code_replaces_it_wherever_a_cell_has_gone_and_a_failed_check_does_not(course, book, tmp_path):
    before = text_of(course)
    book.run(ANSWER.replace("my own words", "wrong").replace("[rank]", "[0]"))
    assert "CheckFailed" in book.run(CHECK).error
    assert text_of(course) == before
    book.run(f"os.chdir({str(tmp_path)!r})")
    book.run(ANSWER.replace("my own words", "better"))
    assert re.search(saying("✓", "2.1"), html(book.run(CHECK)))
    assert "# better" in text_of(course)
    book.run(f"os.chdir({str(course.folder)!r})")


def test_a_class_is_taken_if_its_methods_are_those_of_the_cell(course, book):
    answer = solution("3.2").replace("grad_output.clone(", "grad_output.detach().clone(")
    book.run("import torch.distributed as dist\nfrom torch.autograd import Function")
    book.run(answer)
    assert re.search(saying("✓", "3.2"), html(book.run('check("3.2", CopyToRegion)')))
    assert "grad_output.detach().clone(" in (course.folder / "my_tp" / "operators.py").read_text()
    book.run(
        "CopyToRegion.backward = staticmethod(lambda ctx, dy: (dist.all_reduce(g := dy.contiguous().clone()), g)[1])"
    )
    assert "tplab check --exercise 3.2" in book.run('check("3.2", CopyToRegion)').text


def test_a_file_in_the_librarys_place_is_named(course, book):
    (course.folder / "my_tp").rename(course.folder / "moved")
    (course.folder / "my_tp").write_text("mine")
    book.run(HELPER)
    book.run(ANSWER)
    shown = html(book.run(CHECK))
    assert re.search(saying("File exists", "my_tp"), shown)
    assert (course.folder / "my_tp").read_text() == "mine"
