"""The build: what it refuses, what it writes, and that it writes the same every time."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

import pytest
from nbformat.v4 import new_output

from tests.course import tiny
from tplab.course.notebooks import build, outputs
from tplab.course.notebooks.rewrite import blank_prediction
from tplab.course.notebooks.rules import validate
from tplab.course.notebooks.source import SourceError, read

SOLUTION = "    ### BEGIN SOLUTION\n    return 2 * x\n    ### END SOLUTION\n"
CHECK = '# %% check="90.1"\ncheck("90.1", double_1)\n'


def part(name: str) -> str:
    """The text of one cell of exercise 90.1 in the source, from its marker to the next."""
    text = tiny.source(1)
    start = text.index(f'{name}="90.1"')
    start = text.rindex("# %%", 0, start)
    return text[start : text.index("# %%", start + 4)]


# What is replaced in the source, by what, and what the message must say.
BROKEN = {
    "exercise without check": (part("check"), "", "task 90.1 isn't in its place"),
    "a cell in between": (part("check"), "# %%\n1 + 1\n\n" + part("check"), "isn't in its place"),
    "solution outside an exercise": ('print("a given cell")', SOLUTION.replace("    ", ""), "outside an exercise"),
    "no solution": (SOLUTION, "    return 2 * x\n", "has no ### BEGIN SOLUTION"),
    "unclosed": ("    ### END SOLUTION\n", "", "its markers are ### BEGIN SOLUTION; each"),
    "broken code": (
        SOLUTION,
        SOLUTION.replace("    ### END", "    ### BROKEN\n    y\n    ### END"),
        "must be a comment",
    ),
    "a formula in a hint": ("# 3. `2 * x`\n", "# 3. $2x$\n", "a terminal can't typeset"),
    "prose after the hints": ("# 3. `2 * x`\n", "# 3. `2 * x`\n#\n# Good luck.\n", "outside the list"),
    "check is two statements": (CHECK, CHECK + "print(1)\n", "exactly one expression"),
    "check calls another": (
        CHECK,
        CHECK.replace("check(", "print(check(").replace("_1)", "_1))"),
        "exactly one expression",
    ),
    "check of another number": (CHECK, CHECK.replace('check("90.1"', 'check("90.2"'), "says '90.2'"),
    "a name before its check": ('print("a given cell")', "double_1(3)", "move it below check 90.1"),
    "a function uses it before": ('print("a given cell")', "def f():\n    return double_1", "move it below check 90.1"),
    "exercise needs a given cell": (
        'print("a given cell")\n',
        "factor = 2\n\n# %%\nprint(3)\n",
        "give that cell the tag setup",
    ),
    "a statement in an exercise": (
        'def double_1(x):\n    """Tw',
        'y = 1\n\ndef double_1(x):\n    """Tw',
        "holds `y = 1`",
    ),
    "a whole function blanked": (
        'def double_1(x):\n    """Twice x."""\n' + SOLUTION,
        "### BEGIN SOLUTION\ndef double_1(x):\n    return 2 * x\n### END SOLUTION\n",
        "holds `raise NotImplementedError",
    ),
    "wrong chapter": ('"90.1"', '"91.1"', "in chapter 90, count up from 90.1"),
    "no title": (' title="Double 1"', "", "needs title"),
    "unknown attribute": ('exercise="90.1"', 'excercise="90.1"', "unknown attribute excercise"),
    "unknown tag": ('tags=["setup"]', 'tags=["set-up"]', "unknown tag set-up"),
    "long code": ('print("a given cell")', f'print("{"a" * 81}")', "has 90 characters"),
    "not Python": ('print("a given cell")', "print(", "is not Python"),
    "exercise in markdown": ('# %% exercise="90.1"', '# %% [markdown] exercise="90.1"', "belongs on a code cell"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_source_is_refused_by_file_cell_and_remedy(name, tmp_path, capsys):
    old, new, says = BROKEN[name]
    text = tiny.source(1)
    assert old in text
    text = text.replace(old, new)
    if name == "exercise needs a given cell":
        text = text.replace("return 2 * x", "return factor * x")
    tiny.write(tmp_path, text)
    assert build.main(["--root", str(tmp_path)]) == 1
    message = capsys.readouterr().err
    assert "refused     90_tiny.py: " in message
    assert says in message
    assert not (tmp_path / "chapters").exists()


def test_numbers_count_up_and_a_refusal_names_the_line(tmp_path):
    for text in (tiny.EXERCISE.format(k=1) * 2, tiny.EXERCISE.format(k=2)):
        with pytest.raises(SourceError, match="count up from 90.1"):
            validate(read(tiny.write(tmp_path, tiny.START + text)))
    with pytest.raises(SourceError, match=r"cell 3 \(line 7\): the cell line says predict"):
        validate(read(tiny.write(tmp_path, tiny.START.replace('predict("90.a", value=4)', "predict(4)"))))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A chapter that was built once: its root."""
    root = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(root))
        text = tiny.source(2) + WIDGET
        tiny.make(root, text)
    return root


WIDGET = """
# %% tags=["explore"]
import matplotlib.pyplot as plt
from tplab import viz

def draw(p):
    plt.figure(figsize=(1, 1))
    plt.plot([p, 1])
    plt.show()

viz.explore(draw, p=[1, 2, 4])
"""


def cells(root, folder) -> dict[str, dict]:
    notebook = json.loads((root / folder / "90_tiny.ipynb").read_text(encoding="utf-8"))
    return {cell["id"]: cell for cell in notebook["cells"]}


def test_rebuild_is_equal_to_the_byte(built, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(built))
    names = ["solutions/90_tiny.ipynb", "chapters/90_tiny.ipynb"]
    before = [(built / name).read_bytes() for name in names]
    assert build.main(["--root", str(built), "--force", "90"]) == 0
    assert [(built / name).read_bytes() for name in names] == before


def test_plain_nbval_compares_the_results_of_checks(built, tmp_path, monkeypatch):
    """One check shows what it should; of the other, the notebook expects another text."""
    monkeypatch.setenv("PYTHONPATH", str(built))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # the others take longer to import than nbval runs
    path = tmp_path / "90_tiny.ipynb"
    text = (built / "solutions" / "90_tiny.ipynb").read_text(encoding="utf-8")
    path.write_text(text.replace("Exercise 90.2 passed", "Exercise 90.2 surpassed"), encoding="utf-8")
    code = [cell["id"] for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "nbval.plugin", "--nbval-lax"]
    done = subprocess.run([*command, "-c", os.devnull, path], capture_output=True, text=True, cwd=tmp_path)
    outcomes = dict(re.findall(r"::Cell (\d+) (PASSED|FAILED)", done.stdout))
    failed = [code[int(cell)] for cell, outcome in outcomes.items() if outcome == "FAILED"]
    assert (len(outcomes), failed) == (len(code), ["check-90-2"]), done.stdout


def test_check_needs_no_kernel_and_finds_what_is_stale(built, monkeypatch, capsys):
    monkeypatch.setattr(build, "execute", None)
    check = ["--root", str(built), "--check"]
    assert build.main(check) == 0
    for name, old, new in (
        ("chapters/90_tiny.ipynb", "Double 1", "Double one"),
        ("solutions/90_tiny.ipynb", "return 2 * x", "return x + x"),
        ("solutions/90_tiny.py", "Twice x.", "Two times x."),
    ):
        path = built / name
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(old, new, 1), encoding="utf-8")
        assert build.main(check) == 1
        assert "stale" in capsys.readouterr().out
        path.write_text(text, encoding="utf-8")
    assert build.main(check) == 0


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A copy of the course package, with checks of chapter 90 in it."""
    for name in build.SHOWING:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_bytes((build.COURSE / f"{name}.py").read_bytes())
    monkeypatch.setattr(build, "COURSE", tmp_path)
    return tmp_path


def test_a_changed_check_makes_the_solution_stale_but_not_one_of_another_chapter(built, course, monkeypatch, capsys):
    monkeypatch.setattr(build, "execute", None)  # needs no kernel
    for chapter in ("ch90", "ch91"):
        (course / "exercises" / chapter).mkdir(parents=True)
        (course / "exercises" / chapter / "predictions.md").write_text("Since.\n", encoding="utf-8")
    notebook = built / "solutions" / "90_tiny.ipynb"
    stored = json.loads(notebook.read_text(encoding="utf-8"))["metadata"]["tplab"]["checks"]
    text = notebook.read_text(encoding="utf-8")
    try:
        for changed, is_stale in (
            ("exercises/ch91/predictions.md", False),
            ("exercises/ch90/predictions.md", True),
            ("exercises/ch90/new.py", True),
            ("feedback/verdict.py", True),
        ):
            notebook.write_text(text.replace(stored, build.fingerprint(90)), encoding="utf-8")
            assert build.main(["--root", str(built), "--check"]) == 0
            with open(course / changed, "a", encoding="utf-8") as file:
                file.write("# another word\n")
            assert build.main(["--root", str(built), "--check"]) == is_stale, changed
            assert ("stale       solutions/90_tiny.ipynb" in capsys.readouterr().out) == is_stale
    finally:
        notebook.write_text(text, encoding="utf-8")


def test_a_changed_text_keeps_the_outputs_and_changed_code_runs_again(built, tmp_path):
    shutil.copytree(built, tmp_path, dirs_exist_ok=True)
    source, solution = tmp_path / "solutions" / "90_tiny.py", tmp_path / "solutions" / "90_tiny.ipynb"
    outputs = [cell.get("outputs") for cell in cells(tmp_path, "solutions").values()]
    ran = []

    def executed(notebook, folder):
        ran.append(folder)
        return notebook

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "execute", executed)
        text = source.read_text()
        source.write_text(text.replace("Write `double_1`.", "Now write `double_1`."))
        assert build.main(["--root", str(tmp_path)]) == 0
        assert "Now write" in solution.read_text()
        assert [cell.get("outputs") for cell in cells(tmp_path, "solutions").values()] == outputs
        assert not ran
        for old, new in (("return 2 * x", "return x * 2"), ('title="Double 1"', 'title="Twice"')):
            source.write_text(text := text.replace(old, new))
            assert build.main(["--root", str(tmp_path)]) == 0
        assert len(ran) == 2
        patch.setattr(build, "fingerprint", lambda number: "of changed checks")
        assert build.main(["--root", str(tmp_path)]) == 0
        assert len(ran) == 3


def test_widget_leaves_a_still_picture_and_no_state(built):
    text = (built / "solutions" / "90_tiny.ipynb").read_text(encoding="utf-8")
    assert "widget-view" not in text
    assert "widget-state" not in text
    widget = [cell for cell in cells(built, "solutions").values() if "explore" in cell["metadata"].get("tags", [])]
    (shown,) = widget[0]["outputs"]  # and not what explore says to a page whose kernel is gone
    assert "image/png" in shown["data"]


def test_still_picture_of_a_widget_keeps_its_width():
    size = {"image/png": {"width": 730, "height": 200}}
    picture = {"output_type": "display_data", "data": {"image/png": "AAAA"}, "metadata": {**size, "other": 1}}
    widgets = {
        "box": {"state": {"children": ["IPY_MODEL_slider", "IPY_MODEL_output"]}},
        "slider": {"state": {}},
        "output": {"state": {"outputs": [picture]}},
    }
    view = new_output("display_data", data={outputs.WIDGET_VIEW: {"model_id": "box"}})
    (shown,) = outputs.storable([view], widgets)
    assert shown.data == {"image/png": "AAAA"}
    assert shown.metadata == size


def test_failing_solution_is_named_and_nothing_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    tiny.write(tmp_path, tiny.source(1).replace("return 2 * x", "return 3 * x"))
    assert build.main(["--root", str(tmp_path)]) == 1
    message = capsys.readouterr().err
    assert "cell check-90-1 of the solution failed" in message
    assert "double_1(3) is 9" in message
    assert not (tmp_path / "solutions" / "90_tiny.ipynb").exists()


def test_machine_paths_do_not_reach_a_notebook():
    path = f"{outputs.PACKAGE_ROOT}/tplab/tensor/linear.py and {tempfile.gettempdir()}/ipykernel_123/456.py"
    assert outputs.redact(path) == "tplab-course/tplab/tensor/linear.py and cell"


def test_prediction_keeps_its_layout():
    text = 'predict(\n    "4.a",\n    größe=[1,\n        2],  # bytes\n    calls=f(1),\n)'
    assert blank_prediction(text) == 'predict(\n    "4.a",\n    größe=...,  # bytes\n    calls=...,\n)'
