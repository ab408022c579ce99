"""What `observe` sees on each rank, and that it neither misses nor disturbs anything."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tplab import launch
from tplab.course.checks.describe import Foreign
from tplab.course.checks.observation import Changed, NotRun, Snapshot, observe, portable
from tplab.course.checks.recorded_traffic import CollectiveCall, Traffic, traffic
from tplab.course.feedback.tracebacks import HOUSE, readable_report, readable_traceback
from tplab.runtime import Collective


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        dy = dy.contiguous()
        parts = [torch.empty_like(dy) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, dy)
        return parts[dist.get_rank()]


def observed_sum() -> dict:
    x = torch.arange(6.0, dtype=torch.float64).reshape(2, 3) + dist.get_rank()
    return observe(Sum.apply, torch.full((2, 3), 2.0, dtype=torch.float64), inputs={"x": x})


def cut_off_on_rank_1() -> dict:
    return observe(lambda x: Sum.apply(x.detach() if dist.get_rank() else x), None, inputs={"x": torch.ones(1)})


def test_everything_is_noted_on_every_rank_and_none_goes_backward_alone() -> None:
    ranks = launch(lambda: (observed_sum(), cut_off_on_rank_1()), 2)
    for seen, _ in ranks:
        assert torch.equal(seen["out"], 2 * torch.arange(6.0, dtype=torch.float64).reshape(2, 3) + 1)
        assert torch.equal(seen["dx"], torch.full((2, 3), 2.0, dtype=torch.float64))
        assert seen["forward traffic"] == Traffic.expected(2, ("all_reduce", 6))
        assert seen["backward traffic"] == Traffic.expected(2, ("all_gather", 12))
        assert seen["inputs unchanged"] == Changed()
    (_, first), (_, second) = ranks
    assert isinstance(first["dx"], NotRun)
    assert second["dx"] is None
    assert second["backward traffic"] == Traffic()


def test_without_upstream_the_gradient_is_that_of_the_sum_and_expanded() -> None:
    strides = []

    class Notes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx, dy: Tensor) -> Tensor:
            strides.append(dy.stride())
            return dy

    seen = observe(Notes.apply, None, inputs={"x": torch.ones(2, 3)})
    assert torch.equal(seen["dx"], torch.ones(2, 3))
    assert strides == [(0, 0)]


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(3, 4).T,
        torch.randn(4, 6)[:, ::2],
        torch.randn(3, 1).expand(3, 5),
        torch.randn(2, 3, 4).transpose(0, 2),
        torch.randn(0, 3),
        torch.tensor(2.0),
    ],
    ids=["transposed", "a slice", "expanded", "three dimensions", "empty", "a scalar"],
)
def test_inputs_arrive_with_their_values_and_strides(x) -> None:
    met = []

    def run(x: Tensor) -> Tensor:
        met.append((x.detach().clone(), x.stride(), x.requires_grad))
        return x * 2

    seen = observe(run, None, inputs={"x": x})
    values, strides, requires_grad = met[0]
    assert torch.equal(values, x)
    assert strides == x.stride()
    assert requires_grad
    assert torch.equal(seen["dx"], torch.full(x.shape, 2.0))
    assert not x.requires_grad


def test_token_ids_get_no_gradient_and_parameters_fresh_ones() -> None:
    w = torch.ones(3, 2, requires_grad=True)
    w.grad = torch.full((3, 2), 7.0)
    seen = observe(lambda ids: w[ids], None, inputs={"ids": torch.tensor([1, 1])}, parameters={"W": w, "b": None})
    assert seen["dids"] is seen["db"] is None
    assert torch.equal(seen["dW"], torch.tensor([[0.0, 0], [2, 2], [0, 0]]))


def test_a_pair_with_a_gradient_for_one_of_them() -> None:
    seen = observe(lambda x: (x * 2, x * 3), [None, torch.ones(2)], inputs={"x": torch.ones(2)})
    assert torch.equal(seen["dx"], torch.full((2,), 3.0))
    wrong = observe(lambda x: x * 2, [None, torch.ones(2)], inputs={"x": torch.ones(2)})
    assert wrong["dx"] == NotRun("the output isn't a tuple of 2")


def test_an_output_that_was_overwritten_later_is_noted_as_it_was() -> None:
    kept = []

    class Reuses(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            out = x * 1
            kept.append(out)
            return out

        @staticmethod
        def backward(ctx, dy: Tensor) -> Tensor:
            kept[0].data.zero_()
            return dy

    assert torch.equal(observe(Reuses.apply, None, inputs={"x": torch.ones(2)})["out"], torch.ones(2))


@pytest.mark.parametrize("victim", ["x", "W", "the upstream gradient"])
def test_writing_into_a_tensor_of_the_caller_is_seen(victim) -> None:
    x, w, dy = torch.ones(2), torch.ones(2, requires_grad=True), torch.ones(2)

    def run(given: Tensor) -> Tensor:
        {"x": given, "W": w, "the upstream gradient": dy}[victim].data.add_(1)
        return given * w

    seen = observe(run, dy, inputs={"x": x}, parameters={"W": w})
    assert seen["inputs unchanged"] == (victim,)
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


def collective(kind: str, shape: tuple[int, ...], size: int, group=(0, 1), end=1.0, dtype="float32") -> Collective:
    return Collective(0, kind, group, 1, shape, dtype, size, None, None, "file:1:f", 0.0, end)


def test_traffic_counts_elements_of_the_message_and_forgets_order_and_groups_of_one() -> None:
    gathered, summed = collective("all_gather", (3,), 24), collective("all_reduce", (3,), 12)
    seen = traffic([gathered, summed, collective("all_reduce", (9,), 36, (0,))])
    assert seen == Traffic.expected(2, ("all_reduce", 3), ("all_gather", 6), dtype="float32")
    assert seen != Traffic.expected(2, ("all_reduce", 3), ("all_gather", 6), dtype="float64")
    assert seen != Traffic.expected(2, ("all_reduce", 3), dtype="float32")
    assert seen != Traffic.expected(4, ("all_reduce", 3), ("all_gather", 6), dtype="float32", group=(0, 2))
    assert Traffic.expected(1, ("all_reduce", 3)) == Traffic()
    assert traffic([collective("barrier", (), 0, dtype="")]) == Traffic([CollectiveCall("barrier", 0, "", (0, 1))])
    assert traffic([collective("all_reduce", (3,), 12, end=None)]) != traffic([summed])


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
    assert readable_report(report).splitlines() == [
        "rank 1 failed:",
        '  File "/home/me/mine.py", line 4, in forward',
        "    return nothing",
        "ValueError: no",
        "    rank 1: has returned from your code",
    ]


def test_a_traceback_has_no_frame_of_torch() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.nn.Linear(2, 3)(torch.ones(4, 5))
    told = readable_traceback(caught.value)
    assert "torch.nn.Linear(2, 3)(torch.ones(4, 5))" in told
    assert "site-packages" not in told
    assert "cannot be multiplied" in told
