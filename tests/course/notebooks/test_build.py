"""The build: what it refuses, what it writes, and when it executes a chapter again."""

import json
import re
import shutil
import tempfile

import pytest

from tests import saying
from tests.course import tiny
from tplab.course.notebooks import build, outputs
from tplab.course.notebooks.rewrite import blank_prediction

SOLUTION = "    ### BEGIN SOLUTION\n    return 2 * x\n    ### END SOLUTION\n"
CHECK = '# %% check="90.1"\ncheck("90.1", double_1)\n'


CALL, PARTS = 'check("90.1", ...)', saying("exercise 90.1", "task, exercise, hints, check")
# What is replaced in the source, by what, and what the message must say.
BROKEN = {
    "exercise without check": (CHECK, "", PARTS),
    "no solution": (SOLUTION, "    return 2 * x\n", saying("### BEGIN SOLUTION ... ### END SOLUTION")),
    "unclosed": ("    ### END SOLUTION\n", "", saying(*["### BEGIN SOLUTION"] * 2, "### BROKEN", "### END SOLUTION")),
    "broken code": ("    ### END", "    ### BROKEN\n    y\n    ### END", saying("y'", "comment")),
    "a formula in a hint": ("# 3. `2 * x`\n", "# 3. $2x$\n", saying("`code`", "$...$")),
    "check is two statements": (CHECK, CHECK + "print(1)\n", saying(CALL)),
    "check of another number": (CHECK, CHECK.replace('check("90.1"', 'check("90.2"'), saying(CALL)),
    "prediction without its number": (
        'predict("90.a", ',
        "predict(",
        saying("cell 3 ('predict(value=4)')", 'predict("90.a", ...)'),
    ),
    "a statement in an exercise": ("def double_1", "y = 1\n\ndef double_1", saying("`y = 1`")),
    "wrong chapter": ('"90.1"', '"91.1"', PARTS),
    "unknown attribute": ('exercise="90.1"', 'excercise="90.1"', saying("excercise")),
    "long code": ('print("a given cell")', f'print("{"a" * 81}")', saying("90 characters", "column 88")),
    "not Python": ('print("a given cell")', "print(", saying("was never closed")),
}


def test_each_page_that_is_asked_for_must_exist(tmp_path, capsys):
    tiny.write(tmp_path, tiny.source(1))
    for known in ("90", "90_tiny"):
        assert build.main(["--root", str(tmp_path), "--check", known, "90"]) == 1  # it hasn't been built yet
        assert "stale       solutions/90_tiny.ipynb" in capsys.readouterr().out
    for unknown in (["91"], ["90", "99"]):
        with pytest.raises(SystemExit):
            build.main(["--root", str(tmp_path), "--check", *unknown])
        assert re.search(saying("solutions", unknown[-1]), capsys.readouterr().err)


@pytest.mark.parametrize("name", BROKEN)
def test_broken_source_is_refused_by_file_cell_and_remedy(name, tmp_path, capsys):
    old, new, says = BROKEN[name]
    text = tiny.source(1)
    assert old in text
    tiny.write(tmp_path, text.replace(old, new))
    assert build.main(["--root", str(tmp_path)]) == 1
    message = capsys.readouterr().err
    assert "refused     90_tiny.py: " in message
    assert re.search(says, message)
    assert not (tmp_path / "chapters").exists()


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A chapter that was built once: its root."""
    root = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(root))
        tiny.make(root, tiny.source(2) + WIDGET)
    return root


WIDGET = """
# %% tags=["explore"]
import matplotlib.pyplot as plt
from tplab import viz

viz.explore(lambda p: plt.plot([p, 1]) and plt.show(), p=[1, 2, 4])
"""


def cells(root, folder) -> dict[str, dict]:
    notebook = json.loads((root / folder / "90_tiny.ipynb").read_text(encoding="utf-8"))
    return {cell["id"]: cell for cell in notebook["cells"]}


def test_nbval_compares_the_results_of_checks_alone(built):
    code = {id: cell for id, cell in cells(built, "solutions").items() if cell["cell_type"] == "code"}
    found = {id: [tag for tag in cell["metadata"]["tags"] if tag.startswith("nbval")] for id, cell in code.items()}
    compared = dict.fromkeys(("check-90-1", "check-90-2"), ["nbval-check-output"])
    assert found == dict.fromkeys(found, ["nbval-ignore-output"]) | compared


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


def test_the_fingerprint_is_of_the_chapters_checks_and_of_what_words_their_results(tmp_path, monkeypatch):
    for name in build.SHOWING:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").touch()
    monkeypatch.setattr(build, "COURSE", tmp_path)
    for chapter in ("ch90", "ch91"):
        (tmp_path / "exercises" / chapter).mkdir(parents=True)
    for changed, counts in (
        ("exercises/ch91/predictions.md", False),
        ("exercises/ch90/predictions.md", True),
        ("exercises/ch90/new.py", True),
        ("feedback/verdict.py", True),
    ):
        before = build.fingerprint(90)
        (tmp_path / changed).write_text("# another word\n")
        assert (build.fingerprint(90) != before) == counts, changed


def test_a_changed_text_keeps_the_outputs_and_changed_code_runs_again(built, tmp_path, monkeypatch):
    shutil.copytree(built, tmp_path, dirs_exist_ok=True)
    source, solution = tmp_path / "solutions" / "90_tiny.py", tmp_path / "solutions" / "90_tiny.ipynb"
    outputs = [cell.get("outputs") for cell in cells(tmp_path, "solutions").values()]
    ran = []
    monkeypatch.setattr(build, "execute", lambda notebook, folder: ran.append(folder) or notebook)
    text = source.read_text()
    source.write_text(text.replace("Write `double_1`.", "Now write `double_1`."))
    assert build.main(["--root", str(tmp_path)]) == 0
    assert "Now write" in solution.read_text()
    assert [cell.get("outputs") for cell in cells(tmp_path, "solutions").values()] == outputs
    assert not ran
    source.write_text(text.replace("return 2 * x", "return x * 2"))
    assert build.main(["--root", str(tmp_path)]) == 0
    assert len(ran) == 1
    monkeypatch.setattr(build, "fingerprint", lambda number: "of changed checks")
    assert build.main(["--root", str(tmp_path)]) == 0
    assert len(ran) == 2


def test_widget_leaves_a_still_picture_and_no_state(built):
    text = (built / "solutions" / "90_tiny.ipynb").read_text(encoding="utf-8")
    assert "widget-view" not in text
    assert "widget-state" not in text
    widget = [cell for cell in cells(built, "solutions").values() if "explore" in cell["metadata"].get("tags", [])]
    (shown,) = widget[0]["outputs"]  # and not what explore says to a page whose kernel is gone
    assert "image/png" in shown["data"]


def test_failing_solution_is_named_and_nothing_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    tiny.write(tmp_path, tiny.source(1).replace("return 2 * x", "return 3 * x"))
    assert build.main(["--root", str(tmp_path)]) == 1
    message = capsys.readouterr().err
    assert re.search(saying("refused     90_tiny.py: ", "double_1(3) is 9"), message)
    assert not (tmp_path / "solutions" / "90_tiny.ipynb").exists()


def test_machine_paths_do_not_reach_a_notebook():
    path = f"{outputs.PACKAGE_ROOT}/tplab/tensor/linear.py and {tempfile.gettempdir()}/ipykernel_123/456.py"
    assert outputs.redact(path) == "tplab-course/tplab/tensor/linear.py and cell"


def test_prediction_keeps_its_layout():
    text = 'predict(\n    "4.a",\n    größe=[1,\n        2],  # bytes\n    calls=f(1),\n)'
    assert blank_prediction(text) == 'predict(\n    "4.a",\n    größe=...,  # bytes\n    calls=...,\n)'
