"""`capstone.training.build_model`: all kinds of layers train the same model as plain PyTorch in one process."""

import pytest
import torch

from tests import ROOT
from tests.capstone.a_few_steps import batch, few_steps, few_steps_of_each, make, variant
from tests.reference import assert_close
from tplab import launch
from tplab.capstone.own_layers.find import find_answers
from tplab.capstone.training.build_model import for_generation
from tplab.gpt.generation import generate
from tplab.tensor.full_state import full_state_dict

KINDS = ("tplab", "mine")


@pytest.fixture(scope="module")
def answers():
    return find_answers(ROOT / "solutions", missing="tplab")


@pytest.fixture(scope="module")
def right():
    """Losses and norms of plain PyTorch on one process."""
    return few_steps(variant(layers="plain"))


def assert_same(found, right):
    for rank, told in enumerate(found):
        for name, steps in told.items():
            assert len(steps) == len(right)
            for step, (mine, theirs) in enumerate(zip(steps, right, strict=True)):
                assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-9), (rank, name, step)


def _everything(answers):
    """What two ranks tell of each kind: its steps, its weights, and its text."""
    steps = few_steps_of_each({kind: variant(tp=2, layers=kind) for kind in KINDS}, answers)
    return steps, {kind: _weights_and_text(kind, answers) for kind in KINDS}


@pytest.fixture(scope="module")
def two(answers):
    return list(zip(*launch(_everything, 2, args=(answers,), timeout=300), strict=True))


def test_all_layers_have_the_losses_and_norms_of_plain_pytorch(two, answers, right):
    assert_same(two[0], right)
    assert_same(launch(few_steps_of_each, 1, args=({"mine": variant(layers="mine")}, answers), timeout=300), right)
    again = {name: variant(recompute=name) for name in ("nothing", "layers", "attention")}
    assert_same([few_steps_of_each(again, None)], right)
    variants = {"mine": variant(layers="mine", tp=4)}
    variants["groups"] = variant(layers="mine", tp=2, dp=2, batch_size=8)
    assert_same(launch(few_steps_of_each, 4, args=(variants, answers), timeout=300), right)


# What comes of a model


def _weights_and_text(kind, answers=None, tp=2):
    """The marks of the parameters, full weights after an update, and what the model's writer continues."""
    model, _ = make(variant(tp=tp, layers=kind), answers)
    model(*batch(0)).backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    marks = {name: getattr(parameter, "tensor_parallel", None) for name, parameter in model.named_parameters()}
    writer = for_generation(model)
    return marks, full_state_dict(writer, writer.group), generate(writer, batch(1)[0][:1, :3], 4)


def test_every_model_has_the_marks_of_parallel_gpt_and_writes_with_its_own_weights(two):
    _, whole, text = _weights_and_text("plain", tp=1)
    for told in two[1]:
        for name in KINDS:
            marks, weights, writes = told[name]
            assert marks == told["tplab"][0], name
            assert weights.keys() == whole.keys()
            for key, value in weights.items():
                assert_close(value, whole[key], 1e-10)
            assert torch.equal(writes, text), name


def test_the_first_weights_depend_on_the_seed_alone_and_nothing_else_is_drawn():
    state = torch.get_rng_state()
    one, two = (make(variant(layers=layers, precision="float32"))[0] for layers in ("tplab", "plain"))
    exact, other = make(variant(layers="plain"))[0], make(variant(layers="plain", seed=1))[0]
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in full_state_dict(one).items():
        assert torch.equal(value, two.get_parameter(name)), name
        assert torch.equal(value.double(), exact.get_parameter(name)), name
    assert not torch.equal(exact.embedding.weight, other.embedding.weight)
