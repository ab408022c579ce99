"""A tensor on the default device is noticed where the device of the input is meant, and nowhere else."""

import re

import pytest
import torch

from tests import saying
from tests.course.checks import refused
from tplab.course.checks.cases import Case
from tplab.course.checks.default_device import MADE_THERE, DefaultDevice
from tplab.course.checks.trials import OnRanks, exercise
from tplab.course.checks.twins import Twin
from tplab.course.notebooks.mistakes import shared


def marks(function) -> str:
    x = torch.randn(3, 4)
    with DefaultDevice() as watch:
        out = function(x)
    return watch.claims({"out": out}).get(MADE_THERE, "")


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy + torch.zeros(dy.shape)


def backward(x):
    leaf = x.detach().requires_grad_()
    InBackward.apply(leaf).sum().backward()
    return leaf.grad


RIGHT = {
    "like the input": lambda x: x + torch.zeros_like(x),
    "moved there": lambda x: x + torch.zeros(3, 4).to(x.device),
    "an index": lambda x: x[torch.arange(2)],
    "like the input, on its device": lambda x: x + torch.zeros_like(x, device=x.device),
    "copied from the CPU": lambda x: torch.empty_like(x).copy_(torch.ones(3, 4)),
}
WRONG = {
    "torch.zeros": lambda x: x + torch.zeros(3, 4),
    "torch.ones and its row": lambda x: x * torch.ones(3, 4)[0],
    "moved to the CPU": lambda x: x.cpu() * 2,
    "filled and returned": lambda x: torch.empty(3, 4).copy_(x),
    "like the input, but on the CPU": lambda x: x + torch.zeros_like(x, device="cpu"),
    "new_zeros on the CPU": lambda x: x + x.new_zeros(3, 4, device="cpu"),
    "backward": backward,
}


@pytest.mark.parametrize("name", [*RIGHT, *WRONG])
def test_only_a_tensor_on_the_cpu_is_noticed(name):
    assert ("CPU" in marks((RIGHT | WRONG)[name])) == (name in WRONG)


def test_a_warning_of_an_operator_names_the_line_that_called_it():
    torch.set_warn_always(True)
    try:
        with pytest.warns(UserWarning, match="matrices") as warned, DefaultDevice():
            assert torch.ones(2, 3, 4).T.shape == (4, 3, 2)  # deprecated for more than two dimensions
    finally:
        torch.set_warn_always(False)
    assert {warning.filename for warning in warned} == {__file__}


TWICE = OnRanks(
    cases=[Case()], draw=lambda case, generator, size: torch.ones(2, dtype=torch.float64),
    run=lambda answer, case, x, group: {"out": answer(x)}, right=lambda case, x, place: {"out": 2 * x},
    world_sizes=(1,), without=set(Twin),
)  # fmt: skip


@pytest.mark.usefixtures("table")
def test_it_is_told_once_all_else_is_right():
    exercise("90.95", "twice as much", takes=["answer"], trials=[TWICE], passed="")
    wrong = refused("90.95", lambda x: x + torch.ones(2))
    assert "device" in wrong.headline
    assert re.search(saying("add", "[2]", "CPU"), wrong.rows[0][2])
    assert wrong.question == shared("device")
    assert "device" not in refused("90.95", lambda x: x + torch.zeros(2)).headline
