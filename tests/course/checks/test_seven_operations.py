"""Exercise 10.1: of all orders of the seven operations, only one is right, as the text of chapter 10 says."""

from itertools import permutations

import pytest
import torch
from torch.nn import functional as F

from tplab.course.exercises.ch10.checks import HIDDEN, NAMES, SHARDED, Order, draw_block, plain_block

RANKS = 2


class Copy(torch.autograd.Function):
    """f on all ranks at once: each rank gets what it had, and backward, each rank gets the sum of the gradients."""

    @staticmethod
    def forward(ctx, *of_ranks):
        return tuple(each.clone() for each in of_ranks)

    @staticmethod
    def backward(ctx, *gradients):
        return tuple(sum(gradients) for _ in gradients)


class Reduce(torch.autograd.Function):
    """g on all ranks at once: the other way around."""

    @staticmethod
    def forward(ctx, *of_ranks):
        return tuple(sum(of_ranks) for _ in of_ranks)

    @staticmethod
    def backward(ctx, *gradients):
        return tuple(each.clone() for each in gradients)


@pytest.fixture(scope="module")
def block():
    return draw_block(Order(), torch.Generator().manual_seed(1), RANKS)


def run(order, block):
    """The output and all gradients on each rank, if all ranks run in this process."""
    names = ["x", *block.weights]
    leaves = []
    for rank in range(RANKS):
        full = {"x": block.x, **block.weights}
        mine = {
            name: each.chunk(RANKS, SHARDED[name])[rank] if name in SHARDED else each for name, each in full.items()
        }
        leaves.append({name: each.clone().requires_grad_() for name, each in mine.items()})
    steps = {
        "norm": lambda y, w: F.layer_norm(y, [HIDDEN], w["norm weight"], w["norm bias"]),
        "block": lambda y, w: F.gelu(y @ w["A"]) @ w["B"],
        "bias": lambda y, w: y + w["bias"],
        "dropout": lambda y, w: y * block.mask,
        "add": lambda y, w: y + w["x"],
    }
    values = [w["x"] for w in leaves]
    for name in order:
        if name in ("f", "g"):
            values = list((Copy if name == "f" else Reduce).apply(*values))
        else:
            values = [steps[name](y, w) for y, w in zip(values, leaves, strict=True)]
    torch.autograd.backward(values, [block.dy] * RANKS)
    return [{"out": y.detach(), **{name: w[name].grad for name in names}} for y, w in zip(values, leaves, strict=True)]


def test_seven_orders_give_the_right_output_and_one_the_right_gradients(block):
    leaves = {name: each.clone().requires_grad_() for name, each in {"x": block.x, **block.weights}.items()}
    out = plain_block(leaves["x"], leaves, block.mask)
    out.backward(block.dy)
    right = []
    for rank in range(RANKS):
        grads = {name: leaf.grad for name, leaf in leaves.items()}
        mine = {
            name: each.chunk(RANKS, SHARDED[name])[rank] if name in SHARDED else each for name, each in grads.items()
        }
        right.append({"out": out.detach(), **mine})
    wrong = {}
    for order in permutations(NAMES):
        seen = run(order, block)
        if all(torch.allclose(seen[rank]["out"], out) for rank in range(RANKS)):
            same = [
                {name: torch.allclose(mine[name], full[name]) for name in full}
                for mine, full in zip(seen, right, strict=True)
            ]
            wrong[order] = {name for rank in same for name in rank if not rank[name]}
    assert len(wrong) == 7
    assert [order for order in wrong if not wrong[order]] == [NAMES]
    assert wrong[("f", "norm", *NAMES[2:])] == {"norm weight", "norm bias"}
