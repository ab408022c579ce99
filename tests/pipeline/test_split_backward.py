"""A backward in two halves gives what one whole backward gives, and each half does its own part only."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.flop_counter import FlopCounterMode

from tests.reference import assert_close, random
from tplab.gpt.model import ParallelGPT
from tplab.memory.config import GPTConfig
from tplab.pipeline.split_backward import backward_of_input

GPT = GPTConfig(num_layers=2, hidden_size=16, num_heads=4, vocab_size=37, seq_length=12, dropout=0.0)


class Twice(nn.Module):
    """A weight that is used twice, and a parameter that is a summand."""

    def __init__(self):
        super().__init__()
        self.layer, self.shift = nn.Linear(16, 16), nn.Parameter(torch.zeros(16))

    def forward(self, x):
        return self.layer(self.layer(x).tanh() + self.shift.exp()) * x


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = ParallelGPT(GPT).layers

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


MODULES = {
    "linear": lambda: nn.Linear(16, 16),
    "mlp": lambda: nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 16, bias=False)),
    "a weight used twice": Twice,
    "two layers of a GPT": Layers,
}


@pytest.mark.parametrize("name", MODULES)
def test_both_halves_together_are_the_whole_backward(name):
    torch.manual_seed(0)
    module = MODULES[name]().double()
    reference = copy.deepcopy(module)
    x, dy = random((2, 5, 16), "x").requires_grad_(), random((2, 5, 16), "dy")
    other = x.detach().clone().requires_grad_()
    reference(other).backward(dy)

    y = module(x)
    dx, weights = backward_of_input(get_gradient_edge(y), dy, x)
    assert all(parameter.grad is None for parameter in module.parameters())
    assert x.grad is None
    assert_close(dx, other.grad)
    weights()
    assert x.grad is None
    for mine, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        assert_close(mine.grad, theirs.grad)


def test_without_an_input_that_has_a_gradient_the_second_half_does_all():
    embedding = nn.Embedding(5, 3)
    dx, weights = backward_of_input(get_gradient_edge(embedding(torch.tensor([1, 1, 4]))), torch.ones(3, 3), None)
    assert dx is None
    assert embedding.weight.grad is None
    weights()
    assert embedding.weight.grad[:, 0].tolist() == [0, 2, 0, 0, 1]


def test_each_half_does_half_of_the_products():
    module = MODULES["mlp"]()
    x = torch.randn(8, 16, requires_grad=True)
    y = module(x)
    products = 2 * 2 * 8 * 16 * 64
    with FlopCounterMode(display=False) as counter:
        _, weights = backward_of_input(get_gradient_edge(y), torch.ones_like(y), x)
    assert counter.get_total_flops() == products
    with FlopCounterMode(display=False) as counter:
        weights()
    assert counter.get_total_flops() == products
