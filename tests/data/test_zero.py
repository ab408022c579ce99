"""ZeRO 1, 2 and 3 train like one process, and hold and send what the paper says."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests import saying
from tests.data.small_net import HIDDEN, Net, batch, loss_of, plain_training, weights_of, whole_batch
from tests.reference import assert_close, random
from tests.tensor.on_ranks import own_group
from tplab import launch, record
from tplab.data.flat_parameters import Flat, broadcast, in_buckets
from tplab.data.grad_norm import clip, grad_norm_of_pieces
from tplab.data.zero import ELEMENTWISE, ZeRO1, ZeRO2, check_elementwise
from tplab.data.zero3 import ZeRO3
from tplab.data.zero_state import FullOptimizer

ADAMW = {"optimizer_class": torch.optim.AdamW, "lr": 0.02, "weight_decay": 0.1}
SGD = {"optimizer_class": torch.optim.SGD, "lr": 0.3, "momentum": 0.9}
BUCKET = 500
STAGES = (1, 2, 3)


def make_zero(stage, model, group=None, **options):
    options = ADAMW | options
    broadcast(model.buffers(), group)
    if stage == 3:
        return ZeRO3(model, model.blocks, group=group, **options)
    return {1: ZeRO1, 2: ZeRO2}[stage](model.parameters(), bucket_bytes=BUCKET, group=group, **options)


def steps(model, optimizer, batches, after_backward=lambda: None, after_step=lambda: None):
    for rows in batches:
        optimizer.zero_grad()
        loss_of(model, rows, spare=True).backward()
        after_backward()
        optimizer.step()
        after_step()


def own_batches():
    return [batch(dist.get_rank() if dist.is_initialized() else 0, 10 * step) for step in range(3)]


# A vector and its shards


@pytest.mark.parametrize("p", [1, 3, 7])
def test_shards_and_pieces_of_a_vector_are_all_of_it_once(p):
    parameters = [nn.Parameter(random(shape, shape)) for shape in [(3, 2), (), (5,), (0,), (2, 2, 2)]]
    flat = Flat(parameters)
    flat.world_size, flat.shard_numel = p, -(-flat.numel // p)
    vector = flat.flatten([None if p.dim() == 1 else p.detach() for p in parameters])
    assert len(vector) == p * flat.shard_numel >= flat.numel == 20
    assert not vector[flat.numel :].any()
    for view, parameter in zip(flat.views(vector), parameters, strict=True):
        assert_close(view, parameter.detach() * (parameter.dim() != 1))
    assert torch.cat(flat.parts(vector)).equal(vector)
    found = {parameter: torch.zeros(parameter.numel(), dtype=torch.float64) for parameter in parameters}
    for flat.rank in range(p):
        for parameter, shape, start, values in flat.pieces(flat.shard(vector)):
            assert shape == parameter.shape
            found[parameter][start : start + len(values)] += values
    for view, values in zip(flat.views(vector), found.values(), strict=True):
        assert_close(values, view.flatten())


# Steps


def _train(stage, micro_batches=1, max_norm=None, group=None, steps=3, spare=True, again=False, **options):
    """What comes out, and what the last step sent and held."""
    rank = dist.get_rank(group)
    model = Net(rank)  # the constructor of ZeRO has to make them alike
    zero, norms, peak = make_zero(stage, model, group, **options), [], []
    if stage == 3:
        for block in model.blocks:  # they run inside the hooks that gather them
            block.register_forward_pre_hook(lambda *_: peak.append(sum(unit.gathered_bytes for unit in zero.units)))
    for step in range(steps):
        zero.zero_grad()
        with record() as sent:
            for k in range(micro_batches):
                (loss_of(model, batch(rank, 10 * step + k), spare=spare, again=again) / micro_batches).backward()
            held = zero.memory()
            if max_norm is not None:
                zero.finish()
                norms.append(_clip(zero, max_norm, group))
            zero.step()
    return {
        "weights": weights_of(zero, model),
        "norms": norms,
        "sent": sent.totals(),
        "held": held,
        "peak": max(peak, default=0),
    }


def _clip(zero, max_norm, group):
    """Shorten the whole gradient, of which each rank holds pieces; returns its norm."""
    square = grad_norm_of_pieces(zero.pieces()) ** 2
    dist.all_reduce(square, group=group)
    clip([piece.values for piece in zero.pieces()], square.sqrt(), max_norm)
    return float(square.sqrt())


CASES = {
    "AdamW": {},
    "SGD": SGD,
    "three backwards": {"micro_batches": 3},
    "clipped": {"max_norm": 0.05},
    "a sum": {**SGD, "average": False, "lr": 0.05, "weight_decay": 0.0},
    "a layer that is not used": {"spare": False},
}


def _with_groups():
    """Parameter groups with options of their own, and a learning rate that changes."""
    found = []
    for zero_class in (ZeRO1, ZeRO2):
        model = Net()
        zero = zero_class(_groups(model), torch.optim.AdamW, lr=0.02, bucket_bytes=BUCKET)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(zero.optimizer, 0.5)
        steps(model, zero, own_batches(), after_step=scheduler.step)
        found.append(weights_of(zero, model))
    return found


def _groups(model):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.3},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0, "betas": (0.5, 0.6)},
    ]


def _in_groups():
    group = own_group()
    return [_train(stage, group=group)["weights"] for stage in STAGES]


def _everything():
    runs = {(stage, name): _train(stage, **case) for stage in STAGES for name, case in CASES.items()}
    runs[3, "AdamW", "again"] = _train(3, again=True)
    return runs, _with_groups(), _in_groups()


@pytest.fixture(scope="module")
def runs():
    """The four ranks: together in two ways, and in two groups side by side."""
    results = launch(_everything, 4, timeout=250)
    assert len(results) == 4
    return results


def plain(p, micro_batches=1, max_norm=None, average=True, spare=True, **options):
    options = ADAMW | options
    optimizer_class = options.pop("optimizer_class")
    if not average:
        options["lr"] *= p  # of SGD, where a sum in place of the mean is a p times larger step
    return plain_training(
        range(p), 3, lambda model: optimizer_class(model.parameters(), **options), micro_batches, max_norm, spare=spare
    )


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_the_plain_optimizer(runs, name):
    weights, norms = plain(len(runs), **CASES[name])
    for result in runs:
        for found in [found for (_, case, *_), found in result[0].items() if case == name]:
            assert found["norms"] == pytest.approx(norms)
            for parameter, weight in weights.items():
                if CASES[name].get("spare", True) or "spare" not in parameter:
                    assert_close(found["weights"][parameter], weight)


def test_groups_of_parameters_and_schedulers_do_as_with_a_plain_optimizer(runs):
    model = Net()
    optimizer = torch.optim.AdamW(_groups(model), lr=0.02)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    batches = [whole_batch(range(len(runs)), 10 * step) for step in range(3)]
    steps(model, optimizer, batches, after_step=scheduler.step)
    for result in runs:
        for found in result[1]:
            for name, parameter in model.named_parameters():
                assert_close(found[name], parameter.detach())


# What is held, and what is sent


def unit_sizes(stage):
    """The numbers of each unit: of buckets, or of the blocks and the rest."""
    model = Net()
    if stage < 3:
        return [sum(p.numel() for p in bucket) for bucket in in_buckets(model.parameters(), BUCKET)]
    block = HIDDEN * HIDDEN + HIDDEN + 2 * HIDDEN
    whole = sum(p.numel() for p in model.parameters() if p.requires_grad)
    blocks = [block - HIDDEN, block, block - HIDDEN]  # two of them share a bias, which so belongs to the rest
    return [whole - sum(blocks), *blocks]


def padded(sizes, p):
    return sum(-(-size // p) * p for size in sizes)


def on_paper(stage, sizes, p):
    """The bytes on each rank by category, in float64, as in section 3 of the paper."""
    numbers, mine = padded(sizes, p), padded(sizes, p) // p
    return {
        "weights": 8 * (mine if stage == 3 else numbers),
        "gradients": 8 * (sum(sizes) if stage == 1 else mine),  # with stage 1, there is no padding yet
        "optimizer": 16 * mine + 4 * len(sizes),  # torch counts the steps of each unit
    }


def expected(stage, parameters, m):
    """The elements that a step with m backward passes sends, as in section 7 of the paper for m = 1."""
    return {
        1: {"reduce_scatter": parameters, "all_gather": parameters},
        2: {"reduce_scatter": m * parameters, "all_gather": parameters},
        3: {"reduce_scatter": m * parameters, "all_gather": 2 * m * parameters},
    }[stage]


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_holds_and_sends_what_the_paper_says(runs, stage):
    sizes, p = unit_sizes(stage), len(runs)
    for result in runs:
        for name, m in (("AdamW", 1), ("SGD", 1), ("three backwards", 3)):
            found = result[0][stage, name]
            assert name == "SGD" or found["held"] == on_paper(stage, sizes, p)
            numbers = {kind: of_kind.bytes / 8 for kind, of_kind in found["sent"].items()}
            assert numbers == expected(stage, padded(sizes, p), m)
            assert found["sent"]["all_gather"].calls == len(sizes) * (2 * m if stage == 3 else 1)


def test_zero_3_has_one_layer_whole_besides_the_rest(runs):
    p = len(runs)
    rest, *blocks = (padded([size], p) for size in unit_sizes(3))
    for result in runs:
        for found in (result[0][3, "AdamW"], result[0][3, "AdamW", "again"]):
            assert found["peak"] == 8 * (rest + max(blocks))


# Other groups, one process, and what can't be


def test_two_groups_side_by_side_do_not_mix(runs):
    weights, _ = plain(2)
    for trained in (result[2] for result in runs):
        for found in trained:
            for name, weight in weights.items():
                assert_close(found[name], weight)


@pytest.mark.parametrize("stage", STAGES)
def test_one_process_needs_no_group(stage):
    model = Net()
    zero = make_zero(stage, model)
    with record() as sent:
        steps(model, zero, own_batches())
    assert not sent
    for name, weight in plain(1)[0].items():
        assert_close(weights_of(zero, model)[name], weight)


def test_weights_that_are_changed_while_they_are_whole_are_kept():
    model = Net()
    zero = make_zero(3, model)
    assert all(not p.numel() for p in model.parameters() if p.requires_grad)
    x, _ = batch(0, 0)
    with zero.gathered(), torch.no_grad():
        model.load_state_dict(Net("others").state_dict())
        assert_close(model(x), Net("others")(x))
        assert_close(model.last.bias.detach(), Net("others").last.bias.detach())
    with torch.no_grad():
        assert_close(model(x), Net("others")(x))
    assert zero.memory()["weights"] == 8 * sum(unit_sizes(3))


# Which optimizers can update shards


class Declared(torch.optim.Optimizer):
    elementwise = True


class OfDeclared(Declared):
    pass


def test_a_parameter_that_is_given_twice_is_refused():
    model = Net()
    twice = [*model.parameters(), model.last.bias]
    with pytest.raises(ValueError, match=saying("1 ", f"{len(twice)} parameters")):
        ZeRO1(twice, torch.optim.SGD, lr=0.1)


def test_optimizers_that_are_not_known_have_to_declare_themselves():
    check_elementwise(partial(torch.optim.AdamW, weight_decay=0.1))
    check_elementwise(Declared)
    model = Net()
    for unknown in (torch.optim.LBFGS, OfDeclared):  # a subclass may have another step
        says = saying("ZeRO", unknown.__name__, "`elementwise = True`")
        with pytest.raises(ValueError, match=says):
            ZeRO1(model.parameters(), unknown)
        with pytest.raises(ValueError, match=says):
            ZeRO3(model, model.blocks, unknown)
    make_zero(1, model)  # a refusal leaves the model as it was


# The optimizer's state. tests/capstone/training/test_loop.py goes on from its checkpoints on other grids


def test_zeros_state_is_that_of_the_plain_optimizer_and_can_be_loaded_into_it():
    def trained(make):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        optimizer = make(model.parameters())
        for x in torch.randn(3, 5, 3, generator=torch.Generator().manual_seed(1)):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        return model, optimizer

    _, plain = trained(lambda parameters: torch.optim.AdamW(parameters, lr=0.1))
    _, zero = trained(lambda parameters: ZeRO1(parameters, torch.optim.AdamW, lr=0.1, bucket_bytes=1000))
    full = FullOptimizer(zero)
    full.gather()
    theirs, ours = plain.state_dict(), full.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for number, state in theirs["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(ours["state"][number][key], value)

    theirs["state"][0]["step"] += 1
    with pytest.raises(ValueError, match=saying("step", "[3.0, 4.0]")):
        full.load_state_dict(theirs)


def _updated(optimizer_class, weights, gradients):
    weights = nn.Parameter(weights.clone())
    optimizer = optimizer_class([weights], lr=0.1)
    for gradient in gradients:
        weights.grad = gradient.clone()
        optimizer.step()
    return weights.detach()


@pytest.mark.parametrize("optimizer_class", ELEMENTWISE)
def test_each_known_optimizer_does_with_a_part_what_it_does_with_the_whole(optimizer_class):
    weights, *gradients = random((7, 6))
    whole = _updated(optimizer_class, weights, gradients)
    for part in (slice(2), slice(2, 6)):
        assert_close(_updated(optimizer_class, weights[part], [each[part] for each in gradients]), whole[part])
