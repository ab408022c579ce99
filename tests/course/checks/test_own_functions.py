"""An answer that calls the course's own function is told so; one that only uses earlier parts of tplab is not."""

import pytest

import tplab.tensor.linear
from tplab.course.checks.exercises import check
from tplab.course.checks.forms.alone import Alone, Call, one
from tplab.course.checks.own_functions import tplabs_own
from tplab.course.checks.trials import exercise
from tplab.tensor import linear
from tplab.tensor.linear import ColumnParallelLinear as Theirs


class ColumnParallelLinear(Theirs):
    pass


def ring_all_reduce(x):
    from tplab.collectives.by_hand import ring_all_reduce

    return ring_all_reduce(x)


class RowParallelLinear:
    def forward(self, x):
        return linear.RowParallelLinear(3, 4)(x)


class ParallelMLP:
    def __init__(self):
        self.up = tplab.tensor.linear.ColumnParallelLinear(3, 4)


@pytest.mark.parametrize(
    ("answer", "theirs", "own"),
    [
        (Theirs, (), "ColumnParallelLinear"),
        (ColumnParallelLinear, (), "ColumnParallelLinear"),
        (ring_all_reduce, (), "ring_all_reduce"),
        (RowParallelLinear, (), "RowParallelLinear"),
        (ParallelMLP, (), ""),
        (ParallelMLP, ["ColumnParallelLinear"], "ColumnParallelLinear"),
        (lambda x: x, (), ""),
    ],
    ids=["itself", "a subclass", "imported inside", "of a module", "an earlier part", "by another name", "nothing"],
)
def test_tplabs_own_version_is_found(answer, theirs, own):
    assert tplabs_own([answer], theirs) == own


@pytest.mark.usefixtures("table")
def test_the_verdict_says_so():
    trial = Alone(
        calls=lambda generator: [Call(1, "one")], run=lambda answer, call: one({"value": call.given}),
        right=lambda call: one({"value": call.given}),
    )  # fmt: skip
    exercise("90.81", "theirs", takes=["answer"], trials=[trial], passed="Good.")
    assert (
        "uses tplab's own ColumnParallelLinear. Now write ColumnParallelLinear yourself. Good."
        in check("90.81", Theirs).note
    )
    assert check("90.81", len).note == "Good."
