"""The learner's library: what passes goes into a plain package, which does what the notebook's answers do."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT, saying
from tests.course import tiny
from tests.course.grade import in_process
from tests.course.test_chapters import EXERCISES
from tplab.course.commands import cli
from tplab.course.commands.mine import page
from tplab.course.grade.answers import Piece, merge
from tplab.course.learn import library, start
from tplab.course.learn.course_files import MARKER, MEMORY, Course, all_chapters
from tplab.course.learn.passages import extract, extract_from
from tplab.course.notebooks.cells import Cell, read_notebook
from tplab.course.notebooks.numbering import chapter_of


def empty_course(folder: Path) -> Course:
    (folder / MEMORY).mkdir(parents=True)
    (folder / MEMORY / MARKER).write_text("{}")
    return Course(ROOT, folder)


def pass_all(course: Course, exercises: list[str]) -> None:
    """Put the reference answers to these exercises into the library."""
    passages = {}
    for number, files in all_chapters(course).items():
        if mine := [exercise for exercise in exercises if chapter_of(exercise) == number]:
            reference = read_notebook(files.reference)
            merged = merge(reference, reference)
            passages |= {exercise: extract_from(merged, exercise) for exercise in mine}
    library.add(course, passages)


# All reference answers


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Course:
    course = empty_course(tmp_path_factory.mktemp("mine") / "my_course")
    pass_all(course, list(EXERCISES))
    return course


def test_once_everything_is_written_nothing_comes_from_tplab_but_copies_of_what_is_used(whole):
    assert [module.borrowed for module in library.modules(whole)] == [{}] * 17
    assert sum(len(module.answers) for module in library.modules(whole)) == len(EXERCISES)
    folder = whole.folder / library.PACKAGE
    assert "from .linear import ColumnParallelLinear, RowParallelLinear\n" in (folder / "mlp.py").read_text()
    texts = {path.name: path.read_text() for path in folder.rglob("*.py")}
    assert [name for name, text in texts.items() if re.search(r"^ *(from|import) tplab", text, re.MULTILINE)] == []
    copied = list((folder / "given").glob("*.py"))
    assert 1000 < sum(len(path.read_text().splitlines()) for path in copied) < 2000
    assert not re.search("attention|linear|embedding", " ".join(path.name for path in copied))


def test_the_library_runs_on_two_processes(whole):
    command = [sys.executable, "-m", "my_tp", "pipeline"]
    done = subprocess.run(command, cwd=whole.folder, capture_output=True, text=True)
    assert len(re.findall(r"\bok\b", done.stdout)) == 2, done.stderr
    assert "python -m my_tp pipeline" in repr(page(whole, 13))
    assert "python -m" not in repr(page(whole, 12))


def test_every_name_of_a_module_is_defined_and_every_import_is_used(whole):
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "E9,F", str(whole.folder / library.PACKAGE)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


# Some answers


def test_layers_of_earlier_chapters_are_borrowed_until_they_are_written(tmp_path):
    course = empty_course(tmp_path / "my_course")
    pass_all(course, ["5.2", "5.4"])
    (mlp,) = library.modules(course)
    assert mlp.borrowed == {"4.1": ["ColumnParallelLinear"], "4.2": ["RowParallelLinear"]}
    path = course.folder / library.PACKAGE / "mlp.py"
    assert "from tplab.tensor import ColumnParallelLinear, RowParallelLinear\n" in path.read_text()
    pass_all(course, ["4.1"])
    assert library.modules(course)[1].borrowed == {"4.2": ["RowParallelLinear"]}
    text = path.read_text()
    assert "from .linear import ColumnParallelLinear\n" in text
    assert "from tplab.tensor import RowParallelLinear\n" in text


def test_an_answer_waits_for_those_of_its_chapter_that_it_uses(tmp_path):
    course = empty_course(tmp_path / "my_course")
    pass_all(course, ["8.1", "8.3"])
    assert [(module.name, [*module.answers]) for module in library.modules(course)] == [("cross_entropy.py", ["8.1"])]
    assert library.waiting(course, library.modules(course)) == ["8.3"]
    assert "8.3" in page(course).notes[0]
    pass_all(course, ["8.2"])
    (module,) = library.modules(course)
    assert ([*module.answers], module.borrowed) == (["8.1", "8.2", "8.3"], {"3.3": ["reduce_from_region"]})
    assert library.waiting(course, library.modules(course)) == []


@pytest.fixture
def tiny_course(root) -> Course:
    course = Course(root, root / "my_course")
    start.start(course)
    return course


NAME = "90_tiny.ipynb"


def write_answers(course: Course, *bodies: str, helper: str = "") -> list[Cell]:
    made = tiny.Learner(course.material / "chapters" / NAME)
    for k, body in enumerate(bodies, 1):
        made.answer(k, body)
    if helper:
        made.insert(made.place("exercise-90-1"), helper)
    return read_notebook(made.save(course.folder / NAME))


def add(course: Course, learner: list[Cell], *exercises: str) -> list[str]:
    reference = read_notebook(course.material / "solutions" / NAME)
    return library.add_passed(course, reference, learner, list(exercises))[0]


def module_text(course: Course) -> str:
    return (course.folder / library.PACKAGE / "chapter_90.py").read_text()


@pytest.mark.parametrize("lost", [False, True])
def test_a_module_edited_by_hand_is_kept_before_it_is_written_again(lost, tiny_course):
    add(tiny_course, write_answers(tiny_course, "return x + x"), "90.1")
    path = tiny_course.folder / library.PACKAGE / "chapter_90.py"
    path.write_text(path.read_text() + "\nmine = 1\n")
    assert library.edited(tiny_course) == ["chapter_90.py"]
    if lost:
        (tiny_course.memory / library.HASHES).unlink()
    add(tiny_course, write_answers(tiny_course, "return 2 * x"), "90.1")
    assert "mine = 1" not in path.read_text()
    assert library.edited(tiny_course) == []
    (copy,) = (tiny_course.folder / "kept").iterdir()
    assert "mine = 1" in copy.read_text()


def test_a_damaged_store_counts_as_empty_and_the_next_pass_restores_it(tiny_course):
    learner = write_answers(tiny_course, "return x + x")
    add(tiny_course, learner, "90.1")
    for content in ("{", '{"exercises": {"90.1": 3}}'):
        (tiny_course.memory / library.STORE).write_text(content)
        assert library.load(tiny_course) == {}
        assert add(tiny_course, learner, "90.1") == ["90.1"]
    (tiny_course.memory / library.STORE).unlink()
    add(tiny_course, write_answers(tiny_course, "return x + x", "return 2 * x"), "90.2")
    assert "x + x" not in module_text(tiny_course)
    assert any("x + x" in copy.read_text() for copy in (tiny_course.folder / "kept").iterdir())


def test_only_what_passes_tplab_check_comes_in_and_mine_shows_it(tmp_path, monkeypatch, capsys):
    with in_process.course(tmp_path, 3):
        course = Course(tmp_path, tmp_path / "my_course")
        start.start(course)
        monkeypatch.chdir(course.folder)
        write_answers(course, "return x + x", "return 3 * x")
        assert cli.main(["check", "90"]) == 1
        assert re.search(saying("Note:", "90.1", "my_tp/chapter_90.py"), capsys.readouterr().out)
        before = module_text(course)
        assert "double_2" not in before
        assert cli.main(["mine"]) == 0
        assert re.search(saying("chapter_90.py", " 2 lines", "90.1"), capsys.readouterr().out)
        write_answers(course, "return 3 * x")
        cli.main(["check", "90"])
        assert module_text(course) == before


# Passages


def passage(*cells: str):
    pieces = [Piece("own", str(place), source) for place, source in enumerate(cells[:-1])]
    check = Piece("check", "c", 'check("9.9", answer)', "9.9")
    return extract("9.9", [*pieces, Piece("exercise", "x", cells[-1], "9.9"), check])


def test_what_the_answer_uses_comes_along():
    found = passage("table = {}", "table = []", "table.append = 3", "def answer():\n    return table")
    assert found.helpers == ["table = []", "table.append = 3"], "the last binding, and what changes its value"
    found = passage("import os, math as m\nfrom torch import nn, ones as one", "def answer():\n    return m.pi, one")
    assert found.imports == ["from torch import ones as one", "import math as m"]
    answer = "# why\n@functools.cache\ndef answer():\n    return 1"
    found = passage("%matplotlib inline\nimport functools", f"%%time\n{answer}")
    assert found.code == [answer]


def test_code_that_only_tries_an_answer_out_is_left_out():
    needed = [
        "table = {}", "table = dict(table)", "table.update(a=1)", "x = [1]", "os.environ['A'] = '1'",
        "def answer():\n    y = 1\n    return table, x, best", "answer.near = True", "answer = cache(answer)",
    ]  # fmt: skip
    tried = ["x = launch(answer, 2)\nbest = max(x)\ny = 3\nprint(y)", "for i in x:\n    table[i] = launch(i, 2)"]
    cell = "\n".join([*needed[:3], tried[0], *needed[3:], tried[1]])
    assert passage(cell).code == needed


ANSWER = "def answer(x):\n    return x + x"
TRIED = ["files = !ls", "t = %timeit -o answer(1)", "answer?", "%time y = answer(2)", "%cd .", ";print x y",
         "await asyncio.sleep(0)", "def shown():\n    !ls"]  # fmt: skip


def test_what_only_ipython_understands_is_left_out_unless_the_answer_needs_it():
    forms = ["{answer}\n\n\n{tried}", "{tried}\n{answer}", "%%time\n{answer}\n{tried}"]
    for tried in TRIED:
        notebooks = [(form.format(answer=ANSWER, tried=tried),) for form in forms]
        for cells in (*notebooks, (tried, "def broken(:", ANSWER)):
            found = passage(*cells)
            assert (found.code, found.helpers, found.imports) == ([ANSWER], [], []), cells


@pytest.mark.parametrize(
    ("cell", "line"),
    [
        ("files = !ls\ndef answer(x):\n    return files", "files = get_ipython().getoutput('ls')"),
        ("def answer(x):\n    x += 1\n    !ls\n    return x", "get_ipython().system('ls')"),
        ("two = await find()\ndef answer(x):\n    return two", "two = await find()"),
        ("%%mine\n" + ANSWER, "get_ipython().run_cell_magic('mine', '',"),
    ],
)
def test_an_answer_that_needs_ipython_is_refused_with_the_line(cell, line):
    with pytest.raises(SyntaxError, match=saying(f"`{line}")):
        passage(cell)


def test_the_other_answers_come_into_the_library_if_one_cannot(tiny_course):
    learner = write_answers(tiny_course, "return 2 * x", "!ls\n    return 2 * x", "return x +")
    reference = read_notebook(tiny_course.material / "solutions" / NAME)
    changed, refused = library.add_passed(tiny_course, reference, learner, ["90.1", "90.2", "90.3"])
    assert changed == ["90.1"]
    assert [number for number in ("90.2", "90.3") if number in " ".join(refused)] == ["90.2", "90.3"]
    assert "`get_ipython().system('ls')`" in refused[0]
    assert "double_2" not in module_text(tiny_course)


def test_an_answer_that_is_no_definition_and_what_changes_one_come_along(tiny_course):
    body = "return 0\n\n\ndouble_1.__doc__ = 'mine'\nshow = print\nshow(double_1(1))"
    learner = write_answers(tiny_course, body, "return 3 * x")
    place = next(place for place, cell in enumerate(learner) if cell.marks.get("exercise") == "90.1")
    later = Cell("code", "def better(x):\n    return sum([x, x])\n\ndouble_1 = lambda x: better(x)", "mine")
    learner.insert(place + 1, later)
    add(tiny_course, learner, "90.1")
    text = module_text(tiny_course)
    assert text.index("def better") < text.index("double_1 = lambda x: better(x)")
    assert "show" not in text
    found: dict = {}
    exec(text, found)
    assert found["double_1"](4) == 8
