"""A GPT in stages: what they compute is what the whole model computes, with tensor parallelism inside each, too.

tests/cluster/test_three_dimensions.py and tests/capstone/training/test_loop.py train such stages.
"""

import dataclasses

import pytest
import torch

from tests.reference import assert_close
from tests.tensor.on_ranks import assert_refuses
from tplab import launch
from tplab.data.grid import mesh
from tplab.gpt.model import ParallelGPT
from tplab.memory.config import GPTConfig
from tplab.pipeline.stages import gpt_stages
from tplab.sequence.gpt import SequenceParallelGPT
from tplab.tensor.rng import seed_all

DTYPE = torch.float64
GPT = GPTConfig(num_layers=4, hidden_size=8, num_heads=2, vocab_size=37, seq_length=6, dropout=0.0)


def _parts_of_a_sequence(tp):
    """Loss and gradients of a sequence-parallel GPT, and of its stages, which exchange only this rank's tokens."""
    found = []
    ids, target = torch.randint(0, GPT.vocab_size, (2, 2, 6), generator=torch.Generator().manual_seed(3))

    def made():
        seed_all(5, tp)
        return SequenceParallelGPT(dataclasses.replace(GPT, dropout=0.3), dtype=DTYPE, group=tp)

    for cuts in ([4], [3, 1]):
        stages, x, shapes = gpt_stages(made(), cuts, rng=seed_all(7, tp)), ids, []
        for stage in stages:
            x = stage(x)
            shapes.append(list(x.shape))
        loss = stages[-1].loss_sum(x, target) / target.numel()
        loss.backward()
        named: dict = {}
        for stage in stages:
            for name, parameter in stage.named_parameters():
                named[name] = named.get(name, 0) + parameter.grad
        found.append((loss.detach(), named, shapes))
    model = made()
    loss = model(ids, target, rng=seed_all(7, tp))
    loss.backward()
    return found, (loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()})


def _everything():
    return _parts_of_a_sequence(mesh(pp=2, tp=2).get_group("tp"))


@pytest.fixture(scope="module")
def ranks():
    return launch(_everything, 4, timeout=250)


def test_the_last_stage_has_a_copy_of_a_tied_table_and_no_other_stage_has_one():
    first, middle, last = gpt_stages(ParallelGPT(dataclasses.replace(GPT, num_layers=3)), 3)
    assert torch.equal(first.tied, last.tied)
    assert first.tied.data_ptr() != last.tied.data_ptr()
    assert middle.tied is None
    (alone,) = gpt_stages(ParallelGPT(GPT), 1)
    assert alone.tied is None


@pytest.mark.parametrize("recompute", ["nothing", "layers"])  # with layers, dropout is drawn again
def test_stages_one_after_the_other_are_the_whole_model(recompute):
    model = ParallelGPT(dataclasses.replace(GPT, dropout=0.3), dtype=DTYPE, recompute=recompute)
    ids = torch.randint(0, GPT.vocab_size, (4, 5), generator=torch.Generator().manual_seed(3))
    whole = model(ids, rng=seed_all(7))
    x = ids
    for stage in gpt_stages(model, 2, rng=seed_all(7)):
        x = stage(x)
    assert torch.equal(x, whole)


def test_stages_of_a_sequence_parallel_model_drop_and_compute_the_same_as_all_of_it(ranks):
    for of_stages, (loss, gradients) in ranks:
        for own_loss, own_gradients, _ in of_stages:
            assert_close(own_loss, loss)
            assert own_gradients.keys() == gradients.keys()
            for name, gradient in gradients.items():
                assert_close(own_gradients[name], gradient)
        assert of_stages[1][2] == [[2, 3, 8], [2, 6, 128]]


def test_layers_that_cannot_be_divided_are_refused():
    assert_refuses(
        (lambda: gpt_stages(ParallelGPT(GPT), 3), "4 layers", "3 stages"),
        (lambda: gpt_stages(ParallelGPT(GPT), [3, 2]), "[3, 2]", " 5 ", " 4"),
    )
