"""The form of a check that compares a parallel layer with the same layer in a single process."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tplab import launch
from tplab.course.checks.cases import Place, random_tensor
from tplab.course.checks.differences import compare_ranks
from tplab.course.checks.forms import layers
from tplab.course.checks.forms.layers import ZERO, Built, Layer, Weight
from tplab.tensor import copy_to_region, reduce_from_region
from tplab.tensor.sharding import Sharding


class TwoInputs(nn.Module):
    """(x + memory where it isn't hidden) A, with A split by rows. It has no bias."""

    f = staticmethod(copy_to_region)

    def __init__(self, size, *, group=None, device=None, dtype=None):
        super().__init__()
        self.rank = torch.distributed.get_rank(group)
        self.weight = nn.Parameter(torch.ones(size, size // 2, device=device, dtype=dtype))
        self.weight.tensor_parallel = Sharding(1)

    def forward(self, x, memory, hidden):
        added = self.f(x) + self.f(memory).masked_fill(hidden, 0)
        return reduce_from_region(added.chunk(2, -1)[self.rank] @ self.weight.T)


class WithoutF(TwoInputs):
    f = staticmethod(lambda x: x)


LAYER = Layer(
    of="TwoInputs", sizes=(4,), width=4, weights={"weight": Weight("W", (4, 4), Sharding(1), scale=0.01)},
    formula=lambda case, x, w: (x + w["memory"].masked_fill(w["hidden"], 0)) @ w["W"].T,
    more=lambda case, generator, width: {
        "memory": random_tensor(generator, *case.leading, width), "hidden": torch.arange(width) == 1
    },
    forward_traffic=lambda case, x, out: [("all_reduce", out.numel())],
    backward_traffic=lambda case, x, out: [("all_reduce", x.numel())] * 2,
)  # fmt: skip


def wrong_names(*pairs: tuple[Layer, type]) -> list[set[str]]:
    """What is wrong with each answer on two ranks, which all share a launch."""
    case, places = Built(), [Place(rank, (0, 1), 2) for rank in range(2)]
    problems = [layer._draw(case, torch.Generator().manual_seed(0), 2) for layer, _ in pairs]
    given = [
        [layer._give(case, problem, place) for place in places]
        for (layer, _), problem in zip(pairs, problems, strict=True)
    ]
    run = layers._run

    def on_rank():
        rank = torch.distributed.get_rank()
        return [run(*pair, case, each[rank], None) for pair, each in zip(pairs, given, strict=True)]

    ranks, found = launch(on_rank, 2), []
    for number, ((layer, _), problem) in enumerate(zip(pairs, problems, strict=True)):
        expected = [layer._right(case, problem, place) for place in places]
        found.append(set(compare_ranks(2, [rank[number] for rank in ranks], expected)[0].names))
    return found


class Biased(nn.Linear):
    def __init__(self, i, o, *, bias=True, group=None, device=None, dtype=None):
        super().__init__(i, o, bias, device, dtype)


BIASED = Layer(
    of="Biased", sizes=(4, 3), width=4, weights={"weight": Weight("W", (3, 4)), "bias": Weight("b", (3,))},
    formula=lambda case, x, w: x @ w["W"].T + w["b"],
)  # fmt: skip


def test_a_layer_may_have_more_inputs_and_no_bias_and_only_its_own_bias_has_to_start_at_zero():
    assert wrong_names(
        (LAYER, TwoInputs), (LAYER, WithoutF), (BIASED, Biased), (replace(BIASED, bias_at_zero=False), Biased)
    ) == [set(), {"dx", "dmemory", "backward traffic"}, {ZERO}, set()]
    assert LAYER._draw(Built(), torch.Generator(), 2).weights["weight"].abs().max() < 0.1


@pytest.mark.parametrize(
    ("counts", "more"),
    [
        ([5, 5, 5, 5, 5], 0),
        ([5, 25, 25, 25, 25], 0),  # created once and for all
        ([5, 6, 7, 8, 9], 1),
        ([5, 7, 7, 8, 9, 11, 11], 1),  # some are freed a step later
        ([5, 4, 6, 5, 5], 0),
        ([50, 53, 56, 59, 62], 3),
    ],
)
def test_what_piles_up_grows_with_nearly_every_step(counts, more):
    assert layers.growth(counts) == more
