"""A made-up chapter, number 90: exercise k asks for a function double_k that doubles a number."""

import copy
import json
from pathlib import Path

from nbformat.v4 import new_output

from tplab.course.notebooks.build import blank_chapter, build, skeleton, to_text
from tplab.course.notebooks.rules import validate
from tplab.course.notebooks.source import read

CHECKS = '''
"""The checks of chapter 90. Its exercises don't need ranks, so it is quick."""
from tplab.course.checks.ledger import current
from tplab.course.checks.predictions import Prediction
from tplab.course.checks.trials import Trial, exercise

class Doubled(Trial):
    def check(self, number, answers):
        from tplab.course.feedback.verdict import CheckFailed  # late, as some checks do
        current().compared["the value"] = None
        [(name, function)] = answers.items()
        if function(3) != 6:
            raise CheckFailed(f"Exercise {number}: {name}(3) is {function(3)}.", question="What is twice three?")

for k in range(1, 40):
    exercise(f"90.{k}", f"double_{k}", takes=[f"double_{k}"], trials=[Doubled()], passed="")
PREDICTIONS = {"90.a": Prediction("Twice two?", {"value": 4}, "2 + 2.")}
'''

# Python imports this file at its start, where the folder is on PYTHONPATH: so every process finds chapter 90.
SITE = """
import importlib.abc, importlib.util, pathlib, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "tplab.course.exercises.ch90":
            return importlib.util.spec_from_file_location(name, pathlib.Path(__file__).with_name("tiny_checks.py"))

sys.meta_path.append(Finder())
"""

START = """
# %% [markdown]
# # 90. A made-up chapter

# %% tags=["setup"]
from tplab.course import check, predict

# %% predict="90.a"
predict("90.a", value=4)

# %%
print("a given cell")
"""

EXERCISE = """
# %% [markdown] task="90.{k}" title="Double {k}" difficulty=2 minutes=5
# Write `double_{k}`.

# %% exercise="90.{k}"
def double_{k}(x):
    \"\"\"Twice x.\"\"\"
    ### BEGIN SOLUTION
    return 2 * x
    ### END SOLUTION

# %% [markdown] hints="90.{k}"
# 1. Add.
# 2. Add x
#    to itself:
#
#    ```python
#    x + x
#    ```
# 3. `2 * x`

# %% check="90.{k}"
check("90.{k}", double_{k})

# %%
double_{k}(4)
"""


def source(exercises: int = 2) -> str:
    return START + "".join(EXERCISE.format(k=k) for k in range(1, exercises + 1))


def write(root: Path, text: str) -> Path:
    """Write the source and its checks under `root`; returns the source's path."""
    path = root / "solutions" / "90_tiny.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.lstrip(), encoding="utf-8")
    (root / "tiny_checks.py").write_text(CHECKS.lstrip(), encoding="utf-8")
    (root / "sitecustomize.py").write_text(SITE, encoding="utf-8")
    return path


def make(root: Path, text: str) -> Path:
    """Build the chapter under `root`, which must be on PYTHONPATH; returns the blank chapter's path."""
    chapter = read(write(root, text))
    validate(chapter)
    build(chapter, root)
    return root / "chapters" / "90_tiny.ipynb"


class Learner:
    """A learner's notebook, made from the file of the blank chapter or from its contents."""

    def __init__(self, chapter: Path | dict):
        text = json.dumps(chapter) if isinstance(chapter, dict) else chapter.read_text(encoding="utf-8")
        self.content = json.loads(text)

    @property
    def cells(self) -> list[dict]:
        return self.content["cells"]

    def place(self, id: str) -> int:
        return next(place for place, cell in enumerate(self.cells) if cell.get("id") == id)

    def cell(self, id: str) -> dict:
        return self.cells[self.place(id)]

    def answer(self, k: int, body: str) -> None:
        self.cell(f"exercise-90-{k}")["source"] = f"def double_{k}(x):\n    {body}\n"

    def insert(self, place: int, source: str, id: str = "") -> None:
        made = copy.deepcopy(self.cell("exercise-90-1")) | {"metadata": {}, "source": source}
        made["id"] = id or f"mine-{len(self.cells)}"
        self.cells.insert(place, made)

    def save(self, path: Path) -> Path:
        path.write_text(json.dumps(self.content), encoding="utf-8")
        return path


def make_unexecuted(root: Path, text: str) -> Path:
    """The same without a kernel: as the output of each check stands what a check that passes shows."""
    chapter = read(write(root, text))
    solution = skeleton(chapter, blank=False)
    for place, cell in enumerate(solution.cells):
        if "check" in cell.metadata.get("tplab", {}):
            number = cell.metadata.tplab.check
            shows = f"Exercise {number} passed: double_{number[3:]}\n  Right: the value."
            cell.outputs = [new_output("execute_result", data={"text/plain": shows}, execution_count=place)]
            cell.execution_count = place
    (root / "chapters").mkdir()
    (root / "solutions" / "90_tiny.ipynb").write_text(to_text(solution), encoding="utf-8")
    path = root / "chapters" / "90_tiny.ipynb"
    path.write_text(to_text(blank_chapter(chapter, solution)), encoding="utf-8")
    return path
