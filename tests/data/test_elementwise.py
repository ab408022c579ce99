"""Which optimizers may update shards: the ones that give the same result on parts, which a trial finds out.

The right answers here come from each optimizer's formula, not from a trial.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.tensor.on_ranks import refusals
from tplab import launch
from tplab.cluster.three_dimensions import Training3D
from tplab.cluster.training_step import TrainingStep
from tplab.data.elementwise import check_flat_shards, check_mesh_shards
from tplab.data.grid import Grid, mesh
from tplab.data.zero import ZeRO1, as_groups
from tplab.data.zero3 import ZeRO3
from tplab.gpt.model import ParallelGPT
from tplab.memory.config import GPTConfig
from tplab.tensor.linear import ColumnParallelLinear
from tplab.tensor.sharding import Sharding

optim = torch.optim
TENSOR_PARALLEL = SimpleNamespace(mesh_dim_names=("dp", "pp", "tp"), shape=(1, 1, 2))
PIPELINE = SimpleNamespace(mesh_dim_names=("dp", "pp", "tp"), shape=(1, 2, 1))
IDS = torch.arange(12).view(2, 6)
CONFIG = GPTConfig(num_layers=2, hidden_size=8, num_heads=2, vocab_size=37, seq_length=6, dropout=0.0)


class Step(optim.Optimizer):
    """Subclasses compute `direction(p)`; p.grad is there."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * self.direction(p)


class Signs(Step):
    def direction(self, p):
        return p.grad.sign()


class Lars(Step):  # the trust ratio of You et al. 2017
    def direction(self, p):
        return p.grad * p.norm() / p.grad.norm()


class Centered(Step):  # gradient centralization: minus the mean of a row
    def direction(self, p):
        return p.grad - p.grad.mean(-1, keepdim=True) if p.dim() > 1 else p.grad


class GlobalNorm(Step):  # as Prodigy does, a number from all parameters
    def direction(self, p):
        return p.grad / sum(q.grad.square().sum() for group in self.param_groups for q in group["params"]).sqrt()


class OnlyMatricesDecay(Step):
    def direction(self, p):
        return p.grad + 0.5 * p if p.dim() > 1 else p.grad


class SecondStep(Step):  # behaves like SGD at first
    def direction(self, p):
        seen = self.state[p]["step"] = self.state[p].get("step", 0) + 1
        return p.grad if seen == 1 else p.grad / p.grad.norm()


class Noisy(Step):
    def direction(self, p):
        return p.grad + torch.randn_like(p)


class Vouched(Noisy):
    elementwise = True


class Replaces(optim.SGD):
    def __init__(self, params, **options):
        super().__init__([nn.Parameter(p.detach().clone()) for group in params for p in group["params"]], **options)


class Mixed(optim.Optimizer):
    """Orthogonal matrices where a group asks for it, and SGD elsewhere, as Muon is used in practice."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "orthogonal": False})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * (torch.linalg.qr(p.grad)[0] if group["orthogonal"] else p.grad)


ELEMENTWISE = {
    "SGD": partial(optim.SGD, lr=0.1),
    "SGD, momentum": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, maximize=True),
    "SGD, foreach": partial(optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "SGD, fused": partial(optim.SGD, lr=0.1, fused=True),
    "Adam": optim.Adam,
    "Adam, amsgrad": partial(optim.Adam, amsgrad=True, weight_decay=0.1, foreach=True),
    "AdamW": optim.AdamW,
    "AdamW, fused": partial(optim.AdamW, fused=True),
    "AdamW, foreach": partial(optim.AdamW, foreach=True),
    "AdamW, a rate that is a tensor": partial(optim.AdamW, lr=torch.tensor(1e-3), foreach=False),
    "AdamW, a rate of 0": partial(optim.AdamW, lr=0.0),
    "AdamW, a function": lambda params, **options: optim.AdamW(params, **options),
    **{kind.__name__: kind for kind in (optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop)},
    **{kind.__name__: kind for kind in (optim.Adagrad, optim.Adadelta, optim.ASGD, Signs, Vouched)},
    "RMSprop, centered": partial(optim.RMSprop, centered=True, momentum=0.9),
}
NEEDS_WHOLE_MATRICES = {
    "Adafactor": optim.Adafactor,
    "Adafactor, a rate of 0": partial(optim.Adafactor, lr=0.0),
    "Lars": Lars,
    "Lars, a tiny rate": partial(Lars, lr=1e-12),
    "SecondStep": SecondStep,
    "GlobalNorm": GlobalNorm,
}
CAN_NOT_BE_TRIED = [
    (optim.LBFGS, "closure"), (optim.SparseAdam, "dense gradients"), (partial(Replaces, lr=0.1), "other parameters"),
]  # fmt: skip


def parameters(dtype=torch.float64):
    """Sharded by rows and by columns, and replicated."""
    layer = nn.ParameterList(nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in [(6, 4), (4, 3), (5,), (3, 2)])
    layer[0].tensor_parallel, layer[1].tensor_parallel = Sharding(0, ranks=(0, 1)), Sharding(1)
    layer[2].tensor_parallel = Sharding(0, ranks=(0, 1))
    return list(layer)


def check_everywhere(optimizer_class, given=None, **options):
    groups = as_groups(parameters() if given is None else given)
    return refusals(
        lambda: check_flat_shards(optimizer_class, groups, options),
        lambda: check_mesh_shards(optimizer_class, groups, options, TENSOR_PARALLEL),
    )


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_are_accepted_with_all_their_options(name):
    assert check_everywhere(ELEMENTWISE[name]) == ["no error", "no error"]
    check_mesh_shards(ELEMENTWISE[name], as_groups(parameters()), {}, PIPELINE)


def test_weights_of_low_precision_are_judged_in_float32():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert check_everywhere(optim.AdamW, parameters(dtype)) == ["no error", "no error"]
        assert "no error" not in check_everywhere(optim.Adafactor, parameters(dtype))


@pytest.mark.parametrize("name", NEEDS_WHOLE_MATRICES)
def test_optimizers_that_need_whole_matrices_are_refused(name):
    kind = NEEDS_WHOLE_MATRICES[name]
    flat, tensor_parallel = check_everywhere(kind)
    for message in (flat, tensor_parallel):
        assert f"{getattr(kind, 'func', kind).__name__} doesn't update each element independently" in message
        assert "AdamW" in message
    assert "zero=0" in flat
    assert "over 2 ranks splits 3 of these parameters, such as the one that is [6, 4]" in tensor_parallel


def test_optimizers_that_can_not_be_tried_are_refused_with_their_own_words():
    for kind, words in CAN_NOT_BE_TRIED:
        for message in check_everywhere(kind):
            assert words in message
            assert "`elementwise = True`" in message
    assert check_everywhere(optim.AdamW, lr=-1.0) == ["Invalid learning rate: -1.0"] * 2
    matrices = [p for p in parameters() if p.dim() == 2]
    flat, tensor_parallel = check_everywhere(optim.Muon, matrices)
    assert "Muon only supports 2D parameters" in flat
    assert "Muon doesn't update each element independently" in tensor_parallel
    assert all("Noisy doesn't update each element" in message for message in check_everywhere(Noisy))


def test_it_matters_what_is_split():
    """Rows that stay whole, the number of dimensions, groups, and replicated or frozen parameters."""
    by_rows, by_columns, vector, replicated = parameters()
    assert check_everywhere(Centered, [by_rows, vector])[1] == "no error"
    assert "Centered doesn't" in check_everywhere(Centered, [by_columns])[1]
    flat, tensor_parallel = check_everywhere(OnlyMatricesDecay)
    assert "OnlyMatricesDecay doesn't" in flat
    assert tensor_parallel == "no error"
    assert check_everywhere(optim.Adafactor, [replicated])[1] == "no error"
    groups = [{"params": [replicated], "orthogonal": True}, {"params": [by_rows, vector]}, {"params": []}]
    assert check_everywhere(Mixed, groups)[1] == "no error"
    groups[1]["orthogonal"] = True
    assert "Mixed" in check_everywhere(Mixed, groups)[1]
    assert check_everywhere(optim.Adafactor, [by_rows.requires_grad_(False), replicated])[1] == "no error"
    for whole in (None, SimpleNamespace(mesh_dim_names=("dp", "pp", "tp"), shape=(4, 1, 1))):
        for kind in (optim.Adafactor, optim.LBFGS, GlobalNorm):
            check_mesh_shards(kind, as_groups(parameters()), {}, whole)


def test_stages_need_an_optimizer_that_looks_at_one_parameter_at_a_time():
    groups = as_groups(parameters())
    for kind in (optim.Adafactor, Lars, SecondStep):
        check_mesh_shards(kind, groups, {}, PIPELINE)
    (message,) = refusals(lambda: check_mesh_shards(GlobalNorm, groups, {}, PIPELINE))
    assert "each of 2 stages has an optimizer of its own, but GlobalNorm doesn't" in message


def test_odd_shapes_can_be_tried():
    for shapes in ([()], [(1,)], [(0,)], [(1, 1)], [(3, 1, 2, 2)], [(100, 70), ()]):
        given = [nn.Parameter(torch.ones(shape)) for shape in shapes]
        assert check_everywhere(optim.AdamW, given) == ["no error", "no error"]
        assert "Adafactor" in check_everywhere(optim.Adafactor, given)[0]


def test_a_trial_leaves_no_trace():
    given, made = parameters(), []

    def factory(params, **options):
        made.append(Vouched(params, **options))
        return made[-1]

    before, state = [p.detach().clone() for p in given], torch.get_rng_state()
    assert "Vouched doesn't" in check_everywhere(factory, given)[0]  # the factory isn't marked
    assert len(made) > 2
    assert torch.equal(torch.get_rng_state(), state)
    for parameter, old in zip(given, before, strict=True):
        assert torch.equal(parameter, old)
        assert parameter.grad is None


# In a training step


def _refused_and_accepted():
    grid = mesh(dp=2, tp=2)
    model = ParallelGPT(CONFIG, group=grid.get_group("tp"), dtype=torch.float64)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    refused = refusals(
        lambda: TrainingStep(model, optim.Adafactor, mesh=grid),
        lambda: TrainingStep(model, optim.Muon, mesh=grid, parameters=iter(matrices)),
        *[lambda zero=zero: TrainingStep(model, optim.Adafactor, mesh=grid, zero=zero) for zero in (1, 2, 3)],
        lambda: ZeRO1(model.parameters(), Lars, group=grid.get_group("dp")),
        lambda: ZeRO3(model, list(model.layers), Lars, group=grid.get_group("dp")),
        lambda: Training3D(CONFIG, Grid(dp=2, pp=2), GlobalNorm, micro_batches=2, micro_batch_size=1),
        lambda: Training3D(CONFIG, Grid(dp=2, pp=2), Lars, zero=1, micro_batches=2, micro_batch_size=1),
    )
    Training3D(CONFIG, Grid(dp=2, pp=2), optim.Adafactor, micro_batches=2, micro_batch_size=1)  # which stages may use
    # a refusal leaves the model as it was, so the next optimizer can have it; norms are replicated, so Adafactor may
    groups = [{"params": (p for name, p in model.named_parameters() if "norm" in name)}]
    training = TrainingStep(model, optim.Adafactor, mesh=grid, parameters=groups, lr=0.1)
    before = model.final_norm.weight.detach().clone()
    with training.micro_batch():
        model(IDS, IDS).backward()
    training.update()
    return refused, (model.final_norm.weight != before).any()


def test_a_training_step_refuses_what_depends_on_the_ranks_and_trains_the_rest():
    for refused, trained in launch(_refused_and_accepted, 4, timeout=120):
        assert all("doesn't update each element independently" in message for message in refused)
        assert trained


def test_one_process_without_zero_accepts_every_optimizer():
    for kind in (optim.Adafactor, optim.LBFGS, Lars, GlobalNorm):
        assert type(TrainingStep(ColumnParallelLinear(4, 4), kind).optimizer) is kind
        with pytest.raises(ValueError, match="ZeRO splits"):
            TrainingStep(ColumnParallelLinear(4, 4), kind, zero=1)
