"""What `observe` sees on each rank, and that it neither misses nor disturbs anything."""

import re

import pytest
import torch
from torch import Tensor

from tests import saying
from tplab.course.checks.describe import Foreign
from tplab.course.checks.observation import Changed, Snapshot, observe, portable
from tplab.course.feedback.tracebacks import HOUSE, readable_report


class Reuses(torch.autograd.Function):
    """x * 1, with a backward that notes the strides of its gradient and overwrites the output."""

    @staticmethod
    def forward(ctx, x: Tensor, kept: list) -> Tensor:
        ctx.kept = kept
        kept.append(x * 1)
        return kept[0]

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None]:
        ctx.kept[0].data.zero_()
        ctx.kept.append(dy.stride())
        return dy, None


def test_the_gradient_is_that_of_the_sum_and_expanded_and_an_output_is_noted_before_it_is_overwritten() -> None:
    kept: list = []
    seen = observe(lambda x: Reuses.apply(x, kept), None, inputs={"x": torch.ones(2, 3)})
    assert torch.equal(seen["dx"], torch.ones(2, 3))
    assert torch.equal(seen["out"], torch.ones(2, 3))
    assert kept[1] == (0, 0)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(3, 4).T,
        torch.randn(4, 6)[:, ::2],
        torch.randn(3, 1).expand(3, 5),
        torch.randn(0, 3),
    ],
)
def test_inputs_arrive_with_their_values_and_strides(x) -> None:
    met = []
    seen = observe(lambda x: met.append(x) or x * 2, None, inputs={"x": x})
    assert torch.equal(met[0], x)
    assert (met[0].stride(), met[0].requires_grad) == (x.stride(), True)
    assert torch.equal(seen["dx"], torch.full(x.shape, 2.0))
    assert not x.requires_grad


@pytest.mark.parametrize("victim", ["x", "W", "gradient"])
def test_writing_into_a_tensor_of_the_caller_is_seen(victim) -> None:
    x, w, dy = torch.ones(2), torch.ones(2, requires_grad=True), torch.ones(2)

    def run(given: Tensor) -> Tensor:
        {"x": given, "W": w, "gradient": dy}[victim].data.add_(1)
        return given * w

    seen = observe(run, dy, inputs={"x": x}, parameters={"W": w})
    (named,) = seen["inputs unchanged"]
    assert victim in named
    assert torch.equal(x, torch.ones(2)), "the caller's own"


def test_a_snapshot_sees_values_and_flags_not_promises() -> None:
    x, y = torch.tensor([1.0, float("nan")]), torch.ones(2, requires_grad=True)
    before = Snapshot(x=x, y=y, nothing=None)
    x.add_(0)
    x.detach().requires_grad_()
    assert before.changed() == Changed()
    x[0] = 5
    assert before.changed() == Changed(["x"])
    x.requires_grad_()
    y.requires_grad_(False)
    assert before.changed() == Changed(["x", "requires_grad of x", "requires_grad of y"])


def test_portable_keeps_data_and_names_the_rest() -> None:
    x = torch.ones(2, requires_grad=True)
    moved = portable({"a": [x * 2, (None, 3)], "b": [torch.float32, torch.nn.Linear(1, 1), {1}, (i for i in "ab")]})
    assert not moved["a"][0].requires_grad
    assert moved["a"][1] == (None, 3)
    assert moved["b"] == ["torch.float32", Foreign("Linear"), {1}, Foreign("generator")]


def test_a_report_loses_our_frames_and_votes_only() -> None:
    report = f"""rank 1 failed:
  File "{HOUSE}course/observing.py", line 3, in observe
    out = run()
  File "/home/me/mine.py", line 4, in forward
    return nothing
  File "{torch.__file__}", line 5, in linear
    return too
ValueError: no
rank 0 never joined all_reduce #1 ([1, 1, 1, 1] uint8, min); rank 1 is waiting in it.
    rank 1: is waiting in all_reduce #1 ([1, 1, 1, 1] uint8, min), called at {HOUSE}observing.py line 9"""
    *lines, voter = readable_report(report).splitlines()
    assert lines == [
        "rank 1 failed:",
        '  File "/home/me/mine.py", line 4, in forward',
        "    return nothing",
        "ValueError: no",
    ]
    assert re.match(saying("    rank 1: ", "returned"), voter)
