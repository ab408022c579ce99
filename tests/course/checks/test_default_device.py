"""A tensor on the default device is noticed where the device of the input is meant, and nowhere else."""

import warnings
from contextlib import nullcontext

import pytest
import torch

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
    "a single number": lambda x: x * torch.tensor(2.0),
    "moved there": lambda x: x + torch.zeros(3, 4).to(x.device),
    "moved to a tensor": lambda x: x + torch.zeros(3, 4).to(x),
    "an index": lambda x: x[torch.arange(2)],
    "like one on the CPU, but moved": lambda x: x + torch.zeros_like(torch.zeros(3, 4), device=x.device),
    "copied from the CPU": lambda x: torch.empty_like(x).copy_(torch.ones(3, 4)),
}
WRONG = {
    "torch.zeros": lambda x: x + torch.zeros(3, 4),
    "torch.ones and its row": lambda x: x * torch.ones(3, 4)[0],
    "the CPU by name": lambda x: x + torch.zeros(3, 4, device="cpu"),
    "like the input, but on the CPU by name": lambda x: x + torch.zeros_like(x, device="cpu"),
    "a new tensor on the CPU by name": lambda x: x.new_full((3, 4), 2.0, device="cpu") * x,
    "made like the input on the CPU, then returned": lambda x: torch.empty_like(x, device="cpu").copy_(x),
    "moved to the CPU": lambda x: x.cpu() * 2,
    "moved to the CPU by name": lambda x: x.to("cpu"),
    "another dtype on the way": lambda x: x + torch.zeros(3, 4, dtype=torch.float64).float(),
    "filled and returned": lambda x: torch.empty(3, 4).copy_(x),
    "backward": backward,
}


@pytest.mark.parametrize("name", [*RIGHT, *WRONG])
def test_only_a_tensor_on_the_cpu_is_noticed(name):
    assert ("on the CPU" in marks((RIGHT | WRONG)[name])) == (name in WRONG)


@pytest.fixture
def every_warning():
    """Torch otherwise shows some warnings only once per process."""
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


@pytest.mark.usefixtures("every_warning")
def test_a_warning_names_the_line_that_called_the_operator():
    def reverses_the_shape(x):
        return x.T

    shown = warnings.showwarning
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for mode in (nullcontext(), DefaultDevice()):
            with mode:
                reverses_the_shape(torch.ones(2, 3, 4))
    line = reverses_the_shape.__code__.co_firstlineno + 1
    assert [(one.filename, one.lineno) for one in seen] == [(__file__, line)] * 2
    assert warnings.showwarning is shown


TWICE = OnRanks(
    cases=[Case()], draw=lambda case, generator, size: torch.ones(2, dtype=torch.float64),
    run=lambda answer, case, x, group: {"out": answer(x)}, right=lambda case, x, place: {"out": 2 * x},
    world_sizes=(1,), without=set(Twin),
)  # fmt: skip


@pytest.mark.usefixtures("table")
def test_it_is_told_once_all_else_is_right():
    exercise("90.95", "twice as much", takes=["answer"], trials=[TWICE], passed="")
    wrong = refused("90.95", lambda x: x + torch.ones(2))
    assert "wrong device" in wrong.headline
    assert "add would get a tensor of shape [2] on the CPU" in wrong.rows[0][2]
    assert wrong.question == shared("device")
    assert "wrong device" not in refused("90.95", lambda x: x + torch.zeros(2)).headline
