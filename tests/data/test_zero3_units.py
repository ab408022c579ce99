"""What can be a unit of ZeRO-3: modules that share parameters, return them, or are small.

The reference is the same model on one process, trained by plain torch in float64.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests import saying
from tests.reference import assert_close, random
from tplab import launch
from tplab.cluster.training_step import TrainingStep
from tplab.data.grid import mesh
from tplab.data.zero3 import ZeRO3
from tplab.gpt.model import ParallelGPT
from tplab.memory.config import GPTConfig
from tplab.sequence.gpt import SequenceParallelGPT
from tplab.tensor.rng import seed_all

N = 6


class Block(nn.Module):
    def __init__(self, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(N), nn.Linear(N, N)
        self.shared = shared or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shared(torch.tanh(self.linear(self.norm(x))))


class Net(nn.Module):
    """Runs its layers in the `order` of a step, then `last`."""

    def __init__(self, *layers: nn.Module, order: Callable | None = None, last: nn.Module | None = None) -> None:
        super().__init__()
        self.layers, self.out = nn.ModuleList(layers), nn.Linear(N, 3)
        self.order, self.last = order or (lambda step: range(len(layers))), last or nn.Identity()

    def forward(self, x: Tensor, step: int) -> Tensor:
        for number in self.order(step):
            x = self.layers[number](x)
        return self.out(self.last(x))


def shared_module():
    shared = nn.Sequential(nn.Linear(N, N), nn.Tanh())
    return Net(Block(shared), Block(shared), Block())


def shared_parameter():
    net = Net(Block(), Block())
    net.layers[1].linear.weight = net.layers[0].linear.weight
    return net


def same_layer_twice():
    layer = Block()
    return Net(layer, layer, Block())


def shared_inside_one_layer():
    net = Net(Block(), Block())
    net.layers[0].shared = net.layers[0].linear
    return net


def shared_with_the_model():
    net = Net(Block(), Block())
    net.last = net.layers[0].norm
    return net


NETS = {
    make.__name__: make
    for make in (shared_module, shared_parameter, same_layer_twice, shared_inside_one_layer, shared_with_the_model)
} | {
    "called twice in a step": lambda: Net(Block(), Block(), order=lambda step: (0, 1, 0, 1)),
    "not called in some steps": lambda: Net(Block(), Block(), Block(), order=lambda step: (0, 2, 1)[: 2 + step % 2]),
}


def made(name):
    torch.manual_seed(1)
    return NETS[name]().double()


def _shared(grid):
    found = {}
    for name in NETS:
        net = made(name)
        training = TrainingStep(net, torch.optim.AdamW, mesh=grid, zero=3, layers=list(net.layers), lr=0.05)
        for k in range(4):
            with training.micro_batch():
                net(random((4, N), "x", k).chunk(2)[grid.get_local_rank("dp")], k).square().mean().backward()
            training.update()
        with training.optimizer.gathered():
            found[name] = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    return found


# Units that return their parameters


class Returns(nn.Linear):
    def __init__(self, output: Callable) -> None:
        super().__init__(N, N)
        self.output = output

    def forward(self, x: Tensor) -> object:
        return self.output(nn.functional.linear(x, self.weight), self)


UNSAFE = {
    "bias": lambda y, m: (y, m.bias),
    "weight, row": lambda y, m: [y, {"row": m.weight[2]}],
}
SAFE = {
    "a copy": lambda y, m: (y, m.bias.clone()),
    "an empty view": lambda y, m: (y, m.bias[:0], None, 1),
}


class Takes(nn.Module):
    def __init__(self, unit: nn.Module) -> None:
        super().__init__()
        self.unit = unit

    def forward(self, x: Tensor) -> object:
        return self.unit(x)


@pytest.mark.parametrize("name", UNSAFE)
def test_a_unit_that_returns_a_parameter_or_a_view_of_one_is_refused(name):
    net = Takes(Returns(UNSAFE[name]))
    zero = ZeRO3(net, [net.unit], torch.optim.SGD)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            with pytest.raises(ValueError, match=saying("Returns", "[6]", "ZeRO-3", "clone()", "`layers`")):
                net(torch.ones(2, N))
            with zero.gathered():  # they stay
                net(torch.ones(2, N))


@pytest.mark.parametrize("name", SAFE)
def test_a_unit_may_return_anything_else(name):
    net = Takes(Returns(SAFE[name]))
    zero = ZeRO3(net, [net.unit], torch.optim.SGD)
    y, *_ = net(torch.ones(2, N))
    assert zero.memory()["weights"] == 4 * (N * N + N)  # only the shard
    y.sum().backward()


# Units smaller than a transformer layer, whose blocks return a bias

CONFIG = GPTConfig(num_layers=2, hidden_size=16, num_heads=4, vocab_size=40, seq_length=8, dropout=0.0)
UNITS = {
    "blocks": lambda model: [block for layer in model.layers for block in (layer.attention, layer.mlp)],
    "linear layers": lambda model: [
        linear for layer in model.layers for linear in (layer.attention.out, layer.mlp.down)
    ],
    "layers": lambda model: list(model.layers),
}


def ids_and_targets():
    return torch.randint(0, 40, (2, 4, 8), generator=torch.Generator().manual_seed(1))


def _small_units(grid):
    found = {}
    ids, targets = (t.chunk(2)[grid.get_local_rank("dp")] for t in ids_and_targets())
    for kind in (ParallelGPT, SequenceParallelGPT):
        for name, units in UNITS.items():
            seed_all(0, tp := grid.get_group("tp"))
            model = kind(CONFIG, group=tp, dtype=torch.float64)
            training = TrainingStep(model, torch.optim.AdamW, mesh=grid, zero=3, layers=units(model), lr=0.01)
            for _ in range(3):
                with training.micro_batch():
                    model(ids, targets).mean().backward()
                training.update()
            found[kind.__name__, name] = float(model(*ids_and_targets()).mean().detach())
    return found


def _everything():
    grid = mesh(dp=2, tp=2)
    return _shared(grid), _small_units(grid)


@pytest.fixture(scope="module")
def ranks():
    return launch(_everything, 4, timeout=250)


def test_layers_may_share_modules_and_parameters_and_run_any_number_of_times(ranks):
    for name in NETS:
        net = made(name)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
        for k in range(4):
            optimizer.zero_grad()
            net(random((4, N), "x", k), k).square().mean().backward()
            optimizer.step()
        for found, _ in ranks:
            for parameter_name, parameter in net.named_parameters():
                assert_close(found[name][parameter_name], parameter.detach())


def test_what_is_shared_is_gathered_with_the_model_and_a_layer_inside_another_is_refused():
    net = made("shared_module")
    zero = ZeRO3(net, list(net.layers), torch.optim.SGD)
    sizes = [N * N + N + 2 * N] * 3  # of a layer
    assert sorted(unit.flat.numel for unit in zero.units) == sorted([*sizes, 3 * N + 3 + N * N + N])
    net = Net(outer := Block(inner := Block()), inner)
    with pytest.raises(ValueError, match=saying("layers.0.shared", "layers.0", "`layers`")):
        ZeRO3(net, [outer, inner], torch.optim.SGD)
    with pytest.raises(ValueError, match=saying("layers.0", "model", "`layers`")):
        ZeRO3(net, [net, outer], torch.optim.SGD)


def test_blocks_and_linear_layers_can_be_units(ranks):
    seed_all(0)
    model = ParallelGPT(CONFIG, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model(*ids_and_targets()).mean().backward()
        optimizer.step()
    expected = float(model(*ids_and_targets()).mean().detach())
    for _, found in ranks:
        assert len(found) == 6
        assert found == pytest.approx(dict.fromkeys(found, expected), rel=1e-10)


def test_a_unit_whose_output_might_hide_tensors_is_refused():
    net = Takes(Returns(lambda y, m: (y, type("Result", (), {"y": y})())))
    ZeRO3(net, [net.unit], torch.optim.SGD)
    with pytest.raises(TypeError, match=saying("Returns", "Result", "ZeRO-3")):
        net(torch.ones(2, N))
