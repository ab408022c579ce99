"""The learner's library: what passes goes into a plain package, which does what the notebook's answers do."""

import ast
import importlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT
from tests.course import tiny
from tests.course.test_chapters import EXERCISES
from tplab.course.checks.exercises import check
from tplab.course.grade.answers import Piece
from tplab.course.learner import library, library_text, start
from tplab.course.learner.course_files import MARKER, MEMORY, Course, all_chapters
from tplab.course.learner.passages import NotPlain, extract
from tplab.course.notebooks.cells import Cell, read_notebook
from tplab.course.notebooks.numbering import chapter_of
from tplab.course.tools import cli


def empty_course(folder: Path) -> Course:
    (folder / MEMORY).mkdir(parents=True)
    (folder / MEMORY / MARKER).write_text("{}")
    return Course(ROOT, folder)


def pass_all(course: Course, exercises: list[str]) -> None:
    """Put the reference answers to these exercises into the library."""
    for number, files in all_chapters(course).items():
        mine = [exercise for exercise in exercises if chapter_of(exercise) == number]
        reference = read_notebook(files.reference)
        library.add_passed(course, reference, reference, mine)


# All reference answers


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Course:
    course = empty_course(tmp_path_factory.mktemp("mine") / "my_course")
    pass_all(course, list(EXERCISES))
    return course


INSTEAD = {  # the checks compare with the course's classes, and 10.3 is tried with options that 5.2 and 6.2 lack
    "given/tensor_sharding.py": "from tplab.tensor.sharding import *\n",
    "given/pipeline_schedules.py": "from tplab.pipeline.schedules import *\n",
    "given/memory_memory_bill.py": "from tplab.memory.memory_bill import *\n",
    "blocks.py": "from tplab.sequence import *\nfrom tplab.tensor import *\n",
}


@pytest.fixture(scope="module")
def on_path(whole, tmp_path_factory) -> Iterator[Path]:
    package = tmp_path_factory.mktemp("path") / library.PACKAGE
    shutil.copytree(whole.folder / library.PACKAGE, package)
    for name, text in INSTEAD.items():
        (package / name).write_text(text)
    path = package / "transformer.py"  # the check of 10.4 uses the course's layer
    path.write_text(path.read_text().replace("from . import transformer", "from tplab.gpt import transformer"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(package.parent))
        yield package
    for name in [name for name in sys.modules if name.split(".")[0] == library.PACKAGE]:
        del sys.modules[name]


LAST_OF_EACH_CHAPTER = list({chapter_of(exercise): exercise for exercise in EXERCISES}.values())


@pytest.mark.parametrize("exercise", LAST_OF_EACH_CHAPTER)
def test_an_answer_passes_its_check_from_the_library(exercise, whole, on_path):
    number = chapter_of(exercise)
    module = importlib.import_module(f"{library.PACKAGE}.{library_text.module_name(number).removesuffix('.py')}")
    assert module.__file__ == str(on_path / library.path_of(whole, exercise).name)
    assert check(exercise, *(getattr(module, name) for name in library_text.names_of(whole, number)[exercise])).exercise


def test_nothing_is_borrowed_once_everything_is_written(whole):
    assert [module.borrowed for module in library.modules(whole)] == [{}] * 17
    assert sum(len(module.written) for module in library.modules(whole)) == len(EXERCISES)
    assert "borrow" not in "".join(path.read_text() for path in (whole.folder / library.PACKAGE).glob("*.py"))


def test_nothing_is_imported_from_tplab_once_everything_is_written(whole):
    for path in (whole.folder / library.PACKAGE).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(module.startswith("tplab") for module in modules), path


def test_of_the_course_only_what_is_used_is_copied(whole):
    given = whole.folder / library.PACKAGE / "given"
    lines = sum(len(path.read_text().splitlines()) for path in given.glob("*.py"))
    assert 1000 < lines < 2000
    assert "def divide(" in (given / "tensor_sharding.py").read_text()
    assert not list(given.glob("*attention*")) + list(given.glob("*linear*")) + list(given.glob("*embedding*"))


def test_later_chapters_use_earlier_answers(whole):
    text = (whole.folder / library.PACKAGE / "mlp.py").read_text()
    assert "from .linear import ColumnParallelLinear, RowParallelLinear\n" in text


def test_a_module_is_plain_python_in_one_form(whole):
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


def test_what_is_not_written_yet_is_borrowed_and_marked(tmp_path):
    course = empty_course(tmp_path / "my_course")
    pass_all(course, ["4.4", "8.4"])
    assert {m.name: m.borrowed for m in library.modules(course)} == {
        "linear.py": {"4.3": ["shard"]},
        "cross_entropy.py": {"8.2": ["vocab_logsumexp"], "8.3": ["target_logit"]},
    }
    text = (course.folder / library.PACKAGE / "cross_entropy.py").read_text()
    assert (
        '# Borrowed from the course until exercise 8.2 passes\nvocab_logsumexp = borrow("8.2", "vocab_logsumexp")'
        in text
    )
    assert "exp" not in text.split("class VocabParallelCrossEntropy")[0].replace("sumexp", ""), "no solution is shown"
    program = "from my_tp.cross_entropy import vocab_logsumexp; print(vocab_logsumexp.__name__)"
    done = subprocess.run([sys.executable, "-c", program], cwd=course.folder, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("vocab_logsumexp\n", "")


@pytest.fixture
def tiny_course(tmp_path) -> Course:
    tiny.make_unexecuted(tmp_path, tiny.source(3))
    course = Course(tmp_path, tmp_path / "my_course")
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


def test_better_code_replaces_it_and_the_same_code_changes_nothing(tiny_course):
    assert add(tiny_course, write_answers(tiny_course, "return x + x  # slow"), "90.1") == ["90.1"]
    before = module_text(tiny_course)
    assert "return x + x  # slow" in before
    assert add(tiny_course, write_answers(tiny_course, "return x + x  # slow"), "90.1") == []
    assert module_text(tiny_course) == before
    assert add(tiny_course, write_answers(tiny_course, "return 2 * x"), "90.1") == ["90.1"]
    assert "return 2 * x" in module_text(tiny_course)
    assert "# slow" not in module_text(tiny_course)


def test_helpers_and_comments_come_along_and_trials_do_not(tiny_course):
    helper = (
        "import math\n\n# Two, as I like it\nTWO = math.sqrt(4)\n\ndef twice(x):\n    return TWO * x\n\nprint(twice(3))"
    )
    learner = write_answers(tiny_course, "# mine\n    return twice(x)\n\n\nprint(double_1(2))", helper=helper)
    add(tiny_course, learner, "90.1")
    text = module_text(tiny_course)
    for words in ("import math", "# Two, as I like it\nTWO = math.sqrt(4)", "def twice(x):", "# mine"):
        assert words in text
    assert "print" not in text
    found: dict = {}
    exec(text, found)
    assert found["double_1"](4) == 8


def test_a_module_edited_by_hand_is_kept_before_it_is_written_again(tiny_course, capsys):
    add(tiny_course, write_answers(tiny_course, "return x + x"), "90.1")
    path = tiny_course.folder / library.PACKAGE / "chapter_90.py"
    path.write_text(path.read_text() + "\nmine = 1\n")
    assert [module.edited for module in library.modules(tiny_course)] == [True]
    add(tiny_course, write_answers(tiny_course, "return 2 * x"), "90.1")
    assert "mine = 1" not in path.read_text()
    assert any("mine = 1" in copy.read_text() for copy in (tiny_course.folder / "kept").iterdir())
    assert [module.edited for module in library.modules(tiny_course)] == [False]
    path.unlink()
    assert cli.main(["mine", "--root", str(tiny_course.folder)]) == 0
    assert "return 2 * x" in path.read_text()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"exercises": {"90.1": 3}}'])
def test_a_damaged_store_counts_as_empty_and_the_next_pass_restores_it(content, tiny_course):
    add(tiny_course, write_answers(tiny_course, "return x + x"), "90.1")
    (tiny_course.memory / library.STORE).write_bytes(content)
    assert library.load(tiny_course) == {}
    assert add(tiny_course, write_answers(tiny_course, "return x + x"), "90.1") == ["90.1"]


def test_only_what_passes_tplab_check_comes_in_and_mine_shows_it(tiny_course, monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", str(tiny_course.material))
    monkeypatch.chdir(tiny_course.folder)
    assert cli.main(["mine"]) == 0
    assert "still empty" in capsys.readouterr().out
    write_answers(tiny_course, "return x + x\n\n\nfiles = !ls\nlen?", "return 3 * x")
    assert cli.main(["check", "90"]) == 1
    assert "Your library has your code for 90.1 now: my_tp/chapter_90.py." in " ".join(capsys.readouterr().out.split())
    assert "double_2" not in module_text(tiny_course)
    assert cli.main(["mine"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "chapter_90.py 2 90.1" in out
    assert "2 lines of your own from 1 exercise," in out


def test_a_failed_check_leaves_the_passed_answer_in_the_library(tiny_course, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tiny_course.material))
    monkeypatch.chdir(tiny_course.folder)
    write_answers(tiny_course, "return x + x")
    cli.main(["check", "90"])
    before = module_text(tiny_course)
    write_answers(tiny_course, "return 3 * x")
    cli.main(["check", "90"])
    assert module_text(tiny_course) == before


# Passages


def passage(*cells: str):
    pieces = [Piece("own", str(place), source) for place, source in enumerate(cells[:-1])]
    return extract("9.9", [*pieces, Piece("exercise", "x", cells[-1], "9.9")])


def test_the_last_binding_of_a_name_counts_and_what_changes_its_value():
    found = passage("table = {}", "table = []", "table.append = 3", "def answer():\n    return table")
    assert found.helpers == ["table = []", "table.append = 3"]


def test_an_import_gives_only_the_names_that_are_used():
    found = passage("import os, math as m\nfrom torch import nn, ones as one", "def answer():\n    return m.pi, one")
    assert found.imports == ["from torch import ones as one", "import math as m"]


def test_decorators_and_magics_are_handled():
    found = passage(
        "%matplotlib inline\nimport functools", "%%time\n# why\n@functools.cache\ndef answer():\n    return 1"
    )
    assert found.code == ["# why\n@functools.cache\ndef answer():\n    return 1"]


ANSWER = "def answer(x):\n    return x + x"
TRIED = ["files = !ls", "t = %timeit -o answer(1)", "answer?", "?answer", "%time y = answer(2)", "!ls", "%cd .",
         ";print x y", ",print x y", "/answer 3", "await asyncio.sleep(0)", "def shown():\n    !ls"]  # fmt: skip


@pytest.mark.parametrize("tried", TRIED)
@pytest.mark.parametrize("form", ["{answer}\n\n\n{tried}", "{tried}\n{answer}", "%%time\n{answer}\n{tried}"])
def test_what_only_ipython_understands_is_left_out_unless_the_answer_needs_it(form, tried):
    for cells in ((form.format(answer=ANSWER, tried=tried),), (tried, "def broken(:", ANSWER)):
        assert passage(*cells).code == [ANSWER]
        assert passage(*cells).helpers == passage(*cells).imports == []


@pytest.mark.parametrize(
    ("cells", "line"),
    [
        (["files = !ls\ndef answer(x):\n    return files"], "files = !ls"),
        (["files = %who_ls", "def answer(x):\n    return files"], "files = %who_ls"),
        (["def answer(x):\n    x += 1\n    !ls\n    return x"], "!ls"),
        (["two = await find()\ndef answer(x):\n    return two"], "two = await find()"),
        (["def shown():\n    %cd ..", "# my answer\n\n@cache\ndef answer(x):\n    return shown()"], "%cd .."),
        (["%%mine\n" + ANSWER], "%%mine"),
    ],
)
def test_an_answer_that_needs_ipython_is_refused_with_the_line(cells, line):
    pieces = [Piece("own", str(place), source) for place, source in enumerate(cells[:-1])]
    pieces += [Piece("exercise", "x", cells[-1], "9.9"), Piece("check", "c", 'check("9.9", answer)', "9.9")]
    with pytest.raises(NotPlain, match=rf"9\.9 .*`{re.escape(line)}`"):
        extract("9.9", pieces)


def test_the_other_answers_come_into_the_library_if_one_cannot(tiny_course):
    learner = write_answers(tiny_course, "return 2 * x", "!ls\n    return 2 * x", "return x +")
    reference = read_notebook(tiny_course.material / "solutions" / NAME)
    changed, refused = library.add_passed(tiny_course, reference, learner, ["90.1", "90.2", "90.3"])
    assert changed == ["90.1"]
    assert [number for number in ("90.2", "90.3") if number in " ".join(refused)] == ["90.2", "90.3"]
    assert "`!ls`" in refused[0]
    assert "double_2" not in module_text(tiny_course)


def test_another_answer_is_no_helper_even_if_a_cell_above_imports_the_courses():
    pieces = [
        Piece("given", "i", "from tplab.tensor import shard"),
        Piece("exercise", "a", "def shard():\n    return 1", "9.8"),
        Piece("exercise", "b", "def answer():\n    return shard()", "9.9"),
    ]
    assert extract("9.9", pieces).helpers == extract("9.9", pieces).imports == []


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
