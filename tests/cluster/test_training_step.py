"""The order of a training step: what is refused in a different order, and what an update does and leaves alone.

tests/cluster/test_three_dimensions.py compares its results with plain PyTorch for every kind of parallelism.
"""

import gc
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests import saying
from tests.reference import random
from tests.tensor.on_ranks import assert_refused, refusals
from tplab import launch
from tplab.cluster.training_step import TrainingStep
from tplab.data.data_parallel import DataParallel
from tplab.data.grad_norm import clip_grad_norm
from tplab.data.grid import mesh
from tplab.data.zero import ZeRO1, ZeRO2
from tplab.data.zero3 import ZeRO3
from tplab.gpt.model import ParallelGPT
from tplab.memory.config import GPTConfig
from tplab.pipeline.executor import Pipeline
from tplab.pipeline.p2p import Channels
from tplab.pipeline.schedules import one_f_one_b
from tplab.pipeline.stages import gpt_stages
from tplab.sequence.gpt import SequenceParallelGPT, allreduce_sequence_parallel_gradients
from tplab.tensor.rng import seed_all

CONFIG = GPTConfig(num_layers=2, hidden_size=8, num_heads=2, vocab_size=37, seq_length=6, dropout=0.0)
SGD = torch.optim.SGD
ZEROS = [{"zero": 1}, {"zero": 2}, {"zero": 3, "layers": ()}]


def batch(rows=2):
    return torch.randint(0, CONFIG.vocab_size, (2, rows, 6), generator=torch.Generator().manual_seed(3))


def stage_and_pipeline(grid, frozen=False):
    seed_all(5)
    stage = gpt_stages(ParallelGPT(CONFIG, group=grid.get_group("tp")), grid.size(1))[grid.get_local_rank("pp")]
    if frozen:
        stage.tied.requires_grad_(False)
    pipeline = Pipeline(
        [stage], one_f_one_b(grid.size(1), 1), shape=(2, 6, 8), loss_sum=stage.loss_sum, tied=stage.tied,
        channels=Channels(grid.get_group("pp")),
    )  # fmt: skip
    return stage, pipeline


# Programs for ranks


def _sequence_parallel(reducer):
    """Sum the gradients of norms and biases after data parallelism has taken them in backward."""
    grid = mesh(dp=2, tp=2)
    dp, tp = grid.get_group("dp"), grid.get_group("tp")
    model = SequenceParallelGPT(CONFIG, group=tp)
    if reducer is ZeRO3:
        ZeRO3(model, list(model.layers), SGD, group=dp)
    elif reducer is ZeRO2:
        ZeRO2(model.parameters(), SGD, group=dp)
    else:
        DataParallel(model, group=dp)
    before = refusals(lambda: allreduce_sequence_parallel_gradients(model, tp))
    model(*batch()).backward()
    return before + refusals(
        lambda: allreduce_sequence_parallel_gradients(model, tp),
        lambda: clip_grad_norm(model.parameters(), 1.0, grid),
    )


def _tied():
    """A pipeline that sums its tied table itself, after data parallelism has taken the gradient."""
    grid, found = mesh(dp=2, pp=2), []
    ids, targets = batch()
    for wrap in (
        lambda stage: DataParallel(stage, group=grid.get_group("dp")),
        lambda stage: ZeRO2(stage.parameters(), SGD, group=grid.get_group("dp")),
        lambda stage: ZeRO3(stage, list(stage.layers.values()), SGD, group=grid.get_group("dp")),
    ):
        stage, pipeline = stage_and_pipeline(grid)
        wrap(stage)
        found += refusals(lambda pipeline=pipeline: pipeline.step([ids], [targets]))
    return found


def _groups():
    grid = mesh(dp=2, tp=2)
    dp, tp = grid.get_group("dp"), grid.get_group("tp")
    model = ParallelGPT(CONFIG, group=tp)
    before = model.layers[0].mlp.up.weight.detach().clone()
    model(*batch()).backward()
    refused = refusals(
        lambda: DataParallel(model),
        lambda: ZeRO1(model.parameters(), SGD),
        lambda: ZeRO3(model, list(model.layers), SGD, group=tp),
        lambda: clip_grad_norm(model.parameters(), 1.0),
        lambda: TrainingStep(model, SGD),
        lambda: DataParallel(nn.Linear(3, 2 + grid.get_local_rank("dp")), group=dp),
    )
    other = mesh(dp=1, pp=2, tp=2)
    swapped = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    clip_grad_norm(model.parameters(), 1.0, other)
    refused += refusals(
        lambda: clip_grad_norm(model.parameters(), 1.0, swapped),
        lambda: TrainingStep(model, torch.optim.Adafactor, mesh=grid),
    )
    TrainingStep(nn.Linear(3, 2), torch.optim.Adafactor, mesh=mesh(dp=4))  # each rank updates the full model
    DataParallel(model, group=dp)
    DataParallel(ParallelGPT(CONFIG, group=dist.new_subgroups(1)[0]))  # each rank has the full model
    return refused, torch.equal(model.layers[0].mlp.up.weight, before)


def _on_four():
    return {
        "orders": [_sequence_parallel(reducer) for reducer in (DataParallel, ZeRO2, ZeRO3)],
        "tied": _tied(),
        "groups": _groups(),
    }


def _overlap():
    """For each unit, when the first layer's backward begins: has it been reduced, and is the reduction over?"""
    found = []
    for stage in (2, 3):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        zero = ZeRO2(model.parameters(), SGD, bucket_bytes=80) if stage == 2 else ZeRO3(model, list(model), SGD)
        seen = []

        def look(gradient, units=zero.units, seen=seen):
            seen.append([(unit.gradient is not None, unit._reducing is not None) for unit in units])

        z = model[0](random((2, 4), "x", dtype=torch.float32))
        z.register_hook(look)
        model[3](model[2](model[1](z))).sum().backward()
        found.append((sorted(seen[0]), all(unit.gradient is not None for unit in zero.units)))
    return found


def _of_replicas():
    """Replicas that use other layers, an uncounted gradient that isn't finite, two last micro-batches."""
    grid, found = mesh(dp=2), []
    for stage in (1, 2, 3):
        model = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])
        training = TrainingStep(model, SGD, mesh=grid, zero=stage, layers=list(model), bucket_bytes=50)
        with training.micro_batch():
            model[dist.get_rank()](model[2](torch.ones(1, 3))).sum().backward()
        found += refusals(training.update)
    training = TrainingStep(model := nn.Linear(3, 3), SGD, mesh=grid)
    for _ in range(2):
        found += refusals(lambda training=training, model=model: _one_micro_batch(training, model))
    idle = TrainingStep(model := nn.Linear(3, 3), SGD, mesh=grid, zero=1)
    _one_micro_batch(idle, model if dist.get_rank() == 0 else nn.Linear(3, 3))  # one replica has no gradient at all
    return found + refusals(idle.update)


def _one_micro_batch(training, model):
    with training.micro_batch():
        model(torch.ones(1, 3)).sum().backward()


def _nan_on_one_tensor_parallel_rank():
    grid = mesh(tp=2)
    training = TrainingStep(model := nn.Linear(3, 3), SGD, mesh=grid, check=False)
    with training.micro_batch():
        (model(torch.ones(1, 3)).sum() * (torch.nan if dist.get_rank() == 1 else 1)).backward()
    return float(training.update())


def _tied_table_that_one_rank_froze():
    grid = mesh(pp=2)
    return refusals(lambda: stage_and_pipeline(grid, frozen=dist.get_rank() == 0))[0]


def _on_two():
    return {
        "frozen": _tied_table_that_one_rank_froze(),
        "overlap": _overlap(),
        "replicas": _of_replicas(),
        "nan": _nan_on_one_tensor_parallel_rank(),
    }


@pytest.fixture(scope="module")
def two():
    return launch(_on_two, 2, timeout=200)


@pytest.fixture(scope="module")
def four():
    return launch(_on_four, 4, timeout=200)


# Parts that are used in a different order


def test_sums_over_tp_and_of_a_tied_table_and_norms_refuse_gradients_that_data_parallelism_has_taken(four):
    advices = ["finish()", "zero.pieces()", "zero.pieces()"]
    for on_rank in four:
        for (before, the_sum, the_norm), advice in zip(on_rank["orders"], advices, strict=True):
            assert re.search(saying("sequence-parallel", "zero_grad()"), before)
            assert re.search(saying("sequence-parallel", ".grad", advice), the_sum)
            assert re.search(saying("norm", ".grad", advice), the_norm)
    assert_refused([on_rank["tied"] for on_rank in four], "tied", "tied", "tied")


# Groups that don't fit the model


def test_data_parallelism_and_norms_refuse_groups_that_do_not_fit_a_sharded_model(four):
    replicas = 'group=mesh.get_group("dp")'
    for rank, on_rank in enumerate(four):
        messages, unchanged = on_rank["groups"]
        row, column = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        assert unchanged
        for message in messages[:3]:
            assert re.search(saying(f"ranks {row}", replicas), message)
        assert re.search(saying(f"ranks {row}", "no mesh"), messages[3])
        assert re.search(saying("4 ranks", "mesh"), messages[4])
        assert re.search(saying(f"ranks {column}", "dtype", replicas), messages[5])
        assert re.search(saying(f"ranks {row}", "tp", f"{column}"), messages[6])
        assert re.search(saying("mesh", "Adafactor", "`elementwise = True`"), messages[7])


# Updates


@pytest.mark.parametrize("options", [{}, *ZEROS])
@pytest.mark.parametrize("check", [True, False])
def test_a_norm_that_is_not_finite_changes_neither_weights_nor_optimizer(options, check):
    model = nn.Linear(3, 2)
    training = TrainingStep(model, torch.optim.AdamW, check=check, max_norm=1.0, lr=0.1, **options)
    x = random((4, 3), "x", dtype=torch.float32)

    def step(scale):
        with training.micro_batch():
            (model(x).square().sum() * scale).backward()
        return float(training.update())

    step(1.0)
    inner = getattr(training.optimizer, "optimizer", training.optimizer)
    held = [shard.detach().clone() for group in inner.param_groups for shard in group["params"]]
    average = [state["exp_avg"].clone() for state in inner.state.values()]
    for scale in (torch.nan, torch.inf):
        if check:
            with pytest.raises(FloatingPointError, match=r"norm.* (nan|inf)\b"):
                step(scale)
        else:
            assert not torch.tensor(step(scale)).isfinite()
    for shard, before in zip((s for group in inner.param_groups for s in group["params"]), held, strict=True):
        assert torch.equal(shard, before)
    for state, before in zip(inner.state.values(), average, strict=True):
        assert torch.equal(state["exp_avg"], before)
    step(1.0)  # the next step has nothing left of the one that was skipped
    assert not torch.equal(held[0], next(iter(inner.param_groups[0]["params"])))


def test_the_next_step_starts_without_gradients_even_of_parameters_that_are_not_in_the_optimizer():
    model = nn.Linear(3, 2)
    training = TrainingStep(model, SGD, parameters=[model.weight], lr=0.1)
    norms = []
    for _ in range(2):
        with training.micro_batch():
            model(torch.ones(4, 3)).sum().backward()  # 4 for each weight and bias
        norms.append(float(training.update()))
    assert norms == pytest.approx([96**0.5, 96**0.5])  # of the six weights
    assert model.weight.grad is not None  # to be looked at until the next step


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"zero": 3}, saying("zero=3", "`layers`")),
        ({"zero": 1, "norm": print}, saying("norm", ".grad", "zero=1")),
        ({"max_norm": -1.0}, saying("max_norm=-1.0")),
    ],
)
def test_options_that_do_not_fit_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        TrainingStep(nn.Linear(3, 2), SGD, **options)


# ZeRO 2 and 3


def test_a_bucket_is_under_way_while_backward_computes_the_next_one(two):
    for on_rank in two:
        for during, after in on_rank["overlap"]:
            # of four layers' buckets: the first layer's isn't there yet, the second's is under way, the others are done
            assert during == [(False, False), (False, True), (True, False), (True, False)]
            assert after


# Changes and mistakes after the step was made


def linear_step(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    return model, TrainingStep(model, torch.optim.AdamW, lr=0.1, **options)


@pytest.mark.parametrize("options", ZEROS)
def test_a_second_owner_of_the_gradients_is_refused(options):
    model, _ = linear_step(**options)
    with pytest.raises(ValueError, match=saying("ZeRO", "gradients", "ZeRO")):
        TrainingStep(model, SGD, zero=1)
    other = nn.Linear(2, 2)
    DataParallel(other)
    with pytest.raises(ValueError, match=saying("DataParallel", "gradients", "ZeRO")):
        ZeRO2(other.parameters(), SGD)


def replace(parameter):
    parameter.data = parameter.data.clone()


@pytest.mark.parametrize(
    ("options", "change", "says"),
    [
        *(
            (zero, lambda model: model[0].weight.requires_grad_(False), saying("frozen", "TrainingStep"))
            for zero in [{}, *ZEROS]
        ),
        ({"zero": 1}, lambda model: model.double(), saying("parameter [", "cast", "ZeRO")),
        ({"zero": 1}, lambda model: replace(model[0].weight), saying("parameter [3, 3]", "cast", "ZeRO")),
    ],
)
def test_weights_that_are_frozen_replaced_or_cast_later_are_refused(options, change, says):
    model, training = linear_step(**options)
    change(model)
    with training.micro_batch():
        model(torch.ones(1, 3, dtype=model[0].weight.dtype)).sum().backward()
    with pytest.raises(ValueError, match=says):
        training.update()


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_the_optimizers_own_step_is_refused_also_by_a_scheduler_and_changes_nothing(zero):
    model = SequenceParallelGPT(CONFIG)
    training = TrainingStep(model, torch.optim.AdamW, zero=zero, lr=0.1)
    inner = training.optimizer.optimizer if zero else training.optimizer
    torch.optim.lr_scheduler.ConstantLR(inner)  # which wraps its step
    ids, targets = batch()
    with training.micro_batch():
        model(ids, targets).mean().backward()
    with pytest.raises(RuntimeError, match=saying("optimizer.step()", "update()", "TrainingStep")):
        training.optimizer.step()
    assert not inner.state
    assert training.update() > 0
    assert inner.state


@pytest.mark.parametrize("options", [{}, *ZEROS])
def test_a_backward_outside_of_micro_batch_is_refused_and_the_step_abandoned(options):
    def trained(*, strays):
        model, training = linear_step(**options)
        for _ in range(2):
            with training.micro_batch(last=False):
                model(torch.ones(1, 3)).sum().backward()
            if strays:
                with pytest.raises(RuntimeError, match=saying("`with training.micro_batch():`", "torch.autograd.grad")):
                    model(torch.ones(1, 3)).sum().backward()
                with pytest.raises(ValueError, match=saying("`with training.micro_batch():`")):
                    training.update()
                with training.micro_batch(last=False):
                    model(torch.ones(1, 3)).sum().backward()
            (dx,) = torch.autograd.grad(model(x := torch.ones(1, 3, requires_grad=True)).sum(), x)
            assert dx.any()
            with training.micro_batch():
                model(torch.ones(1, 3)).sum().backward()
            norm = training.update()
        return float(norm)

    assert trained(strays=True) == trained(strays=False)
    model, training = linear_step(**options)
    del training
    gc.collect()
    if not options:  # ZeRO's own hooks outlive it
        model(torch.ones(1, 3)).sum().backward()


@pytest.mark.parametrize("options", [{}, *ZEROS])
def test_an_error_in_a_micro_batch_abandons_the_step(options):
    model, training = linear_step(max_norm=1e9, **options)
    x = random((4, 3), "x", dtype=torch.float32)

    def run(fails):
        with training.micro_batch(last=False):
            model(x).sum().backward()
            if fails:
                raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        run(True)
    run(False)
    norm = float(training.update())
    twin = linear_step()[0]
    twin(x).sum().backward()
    assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(twin.parameters(), 1e9)), rel=1e-6)


def test_replicas_that_use_different_layers_and_a_second_last_micro_batch_are_refused(two):
    refused = [on_rank["replicas"] for on_rank in two]
    assert_refused(refused, "layers", "layers", "layers", "no error", "last=k == m - 1", "layers")


def test_a_nan_that_only_another_rank_counts_is_noticed_on_all_ranks(two):
    assert all(on_rank["nan"] != on_rank["nan"] for on_rank in two)


def test_a_tied_table_that_only_one_rank_froze_is_refused(two):
    for on_rank in two:
        assert re.search(saying("tied", "frozen"), on_rank["frozen"])
