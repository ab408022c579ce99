"""A check that is a table: the known mistakes that run beside a wrong answer pick its question."""

import inspect
from pathlib import Path
from textwrap import dedent

import pytest
import torch
import torch.distributed as dist

from tests.course.checks import refused
from tplab.course.checks import trials
from tplab.course.checks.cases import Case, random_tensor
from tplab.course.checks.forms import alone
from tplab.course.checks.forms.alone import Alone, Call, one
from tplab.course.checks.trials import OnRanks, exercise
from tplab.course.checks.twins import Twin
from tplab.course.notebooks.mistakes import tables

TABLE = """
## 90.81

### Which collective adds?
- no collective: `dist.all_reduce(y)` → `pass`

### Is that the mean?
- the mean: `return y` → `return y / dist.get_world_size()`

### Is one added?
- one more: `return y` → `return y + 1`

### [between two other calls]
- never ends beside an answer: `return y` → `raise KeyError("a known mistake that ends in an error")`

## 90.82

### Which line overwrites x?
- overwrites x: `return x + 1` → `return x.zero_()`

### Is that two more?
- two more: `x + 1` → `x + 2`
"""


def more(x):
    return x + 1


def total(x):
    y = x.clone()
    dist.all_reduce(y)
    return y


SOURCES = {"90.81": inspect.getsource(total), "90.82": inspect.getsource(more)}


SUM = OnRanks(
    cases=[Case()], draw=lambda case, generator, size: [random_tensor(generator, 9) for _ in range(size)],
    give=lambda case, xs, place: xs[place.index], run=lambda answer, case, x, group: {"out": answer(x)},
    right=lambda case, xs, place: {"out": torch.stack(xs).sum(0)}, terms=lambda case, xs, size: {"x": xs},
    world_sizes=(4, 2), without=(Twin.BFLOAT16,),
)  # fmt: skip


@pytest.fixture(autouse=True)
def exercise_90(chapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mistakes.md"
    path.write_text(TABLE, encoding="utf-8")

    def reference_answers(number, change=lambda source: source):
        namespace = {"dist": dist, "torch": torch, "__name__": "__main__"}
        exec(change(dedent(SOURCES[number])), namespace)
        return {name: namespace[name] for name in ("total", "more") if name in namespace}

    monkeypatch.setattr(trials, "table", lambda section: tables(path)[section])
    for module in (trials, alone):
        monkeypatch.setattr(module, "reference_answers", reference_answers)
    exercise("90.81", "Add", takes=["total"], trials=[SUM], passed="It adds.")


def one_more(x):
    y = x + torch.ones(()) / dist.get_world_size()
    dist.all_reduce(y)
    return y


def test_an_answer_that_does_the_same_as_a_known_mistake_gets_its_question():
    assert refused("90.81", one_more).question == "Is one added?"


def test_a_mistake_that_writes_into_what_it_is_given_leaves_the_others_alone():
    """The known mistakes run one after the other on the same call, and each has to see the values that it's about."""
    trial = Alone(
        calls=lambda generator: [Call(torch.arange(3.0), "one call")],
        run=lambda answer, call: one({"out": answer(call.given)}),
        right=lambda call: one({"out": call.given + 1}),
    )  # fmt: skip
    exercise("90.82", "Add one", takes=["more"], trials=[trial], passed="It adds.")
    assert refused("90.82", lambda x: x + 2).question == "Is that two more?"
