"""`capstone.model.dtensor_gpt`: torch's own tensor parallelism, and what a training step needs from it."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial

from tests.capstone.a_few_steps import SMALL, batch, few_steps, finish_gradients, gradients, make, variant
from tests.reference import assert_close
from tplab import launch, record
from tplab.capstone.model.plain_gpt import PlainGPT
from tplab.capstone.training.build_model import (
    backward,
    copy_shards,
    hooks_of,
    local,
    training_step,
)
from tplab.capstone.training.optimizer import adamw_options
from tplab.checkpoint.sharded import load_sharded, save_sharded
from tplab.data.grad_norm import clip

pytestmark = pytest.mark.share(4)


def _one_step(sequence_parallel):
    settings = variant(layers="dtensor", tp=2, sequence_parallel=sequence_parallel)
    model, grid = make(settings)
    right, _ = make(variant(layers="tplab", tp=2, sequence_parallel=sequence_parallel))
    told = {"kinds": {type(parameter) for parameter in model.parameters()}}
    for name, one in (("theirs", model), ("ours", right)):
        with record() as sent:
            backward(one, one(*batch(0)))
        if one is model:
            told["partial"] = {
                n for n, p in model.named_parameters() if any(isinstance(way, Partial) for way in p.grad.placements)
            }
        finish_gradients(one)
        told[name] = {n: local(p.grad).clone() for n, p in one.named_parameters()}
        told[f"traffic of {name}"] = dict(sent.totals())
    before = [local(parameter.grad).clone() for parameter in model.parameters()]
    norm = hooks_of(model).norm(grid)
    clip(gradients(model), norm, 0.5)
    after = [local(parameter.grad) for parameter in model.parameters()]
    told["shorter by"] = [(a / b).nanmedian().item() for a, b in zip(after, before, strict=True)], 0.5 / norm.item()
    return told


def _logits(vocab_size):
    """How many logits on this rank are -inf, and the shape of all of them, for two tokens."""
    model, _ = make(variant(layers="dtensor", tp=2, vocab_size=vocab_size))
    with torch.no_grad():
        logits = model.logits(torch.ones(1, 2, SMALL.hidden_size, dtype=torch.float64))
    return logits.to_local().isinf().sum().item(), list(logits.shape)


def _fused():
    """How far apart the weights are after a step of the fused optimizer and one of the other, and that it was fused."""
    held = []
    for fused in (True, False):
        model, _ = make(variant(layers="dtensor", tp=2))
        options = adamw_options(model, variant(layers="dtensor", tp=2))
        optimizer = torch.optim.AdamW(options.pop("parameters"), **options)
        was = {group["fused"] for group in optimizer.param_groups}
        for group in optimizer.param_groups:
            group["fused"] = fused
        backward(model, model(*batch(0)))
        finish_gradients(model)
        optimizer.step()
        held.append([local(parameter).detach().clone() for parameter in model.parameters()])
    return was, max((a - b).abs().max().item() for a, b in zip(*held, strict=True))


def _everything():
    return _one_step(False), _one_step(True), _logits(512), _logits(300), _fused()


@pytest.fixture(scope="module")
def two():
    """What two ranks tell: a step, one with the sequence cut, logits without and with padding."""
    return list(zip(*launch(_everything, 2), strict=True))


def test_its_optimizer_is_fused_as_that_of_tplabs_layers(two):
    for kinds, apart in two[4]:
        assert kinds == {True}
        assert apart < 1e-12


@pytest.fixture(params=[False, True], ids=["whole sequence", "cut sequence"])
def step(request, two):
    return request.param, two[int(request.param)]


def test_every_parameter_is_a_dtensor_and_its_gradient_is_that_of_parallel_gpt(step):
    for told in step[1]:
        assert told["kinds"] == {DTensor}
        assert told["theirs"].keys() == told["ours"].keys()
        for name, gradient in told["theirs"].items():
            assert_close(gradient, told["ours"][name])


def test_summands_of_the_sequence_are_added_up_once_and_shards_are_no_summands(step):
    cut, told = step
    summands = {name for name in told[0]["ours"] if "norm" in name or name == "positions.weight"}
    assert told[0]["partial"] >= (summands if cut else set())
    assert not any("qkv" in name or "up" in name for name in told[0]["partial"])


def test_it_sends_what_parallel_gpt_sends_but_for_the_loss(step):
    for told in step[1]:
        theirs, ours = told["traffic of theirs"], told["traffic of ours"]
        sums = theirs.pop("all_reduce"), ours.pop("all_reduce")
        assert theirs == ours
        assert (list(theirs) != []) == step[0]
        assert abs(sums[0].bytes - sums[1].bytes) <= 8 * 4 * SMALL.seq_length  # a number for each token


def test_clipping_shortens_the_dtensors_themselves(step):
    for told in step[1]:
        factors, wanted = told["shorter by"]
        assert factors == pytest.approx([wanted] * len(factors), rel=1e-5)


def test_padding_of_the_vocabulary_takes_no_part(two):
    assert list(two[2]) == [(0, [1, 2, 512])] * 2
    assert list(two[3]) == [(0, [1, 2, 512]), (2 * (512 - 300), [1, 2, 512])]


def _go_on(layers, folder, first, last, tp):
    """Losses of some steps, from what another one has saved behind the step before, with the optimizer's state."""
    model, grid = make(variant(layers=layers, tp=tp))
    training = training_step(model, torch.optim.AdamW, grid, max_norm=1.0, lr=1e-2)
    group = grid.get_group("tp") if grid else None
    if first:
        load_sharded(folder / str(first), model, optimizer=training.optimizer, group=group)
    losses = []
    for step in range(first, last):
        with training.micro_batch():
            losses.append(model(*batch(step)))
            backward(model, losses[-1])
        training.update()
    save_sharded(folder / str(last), model, optimizer=training.optimizer, group=group)
    return [loss.item() for loss in losses]


def test_a_run_goes_on_with_other_layers_on_another_number_of_ranks(tmp_path):
    """Also where rows are padded, and sorted by rank: the checkpoint holds the whole tensors of ParallelGPT."""
    right = [loss for loss, _ in few_steps(variant(layers="plain"), count=6)]
    told = _go_on("plain", tmp_path, 0, 2, 1)
    told += launch(_go_on, 2, args=("dtensor", tmp_path, 2, 4, 2))[0]
    told += _go_on("tplab", tmp_path, 4, 6, 1)
    assert told == pytest.approx(right, rel=1e-12)


def test_models_of_other_names_or_shapes_are_refused():
    model = PlainGPT(SMALL.model)
    with pytest.raises(ValueError, match=r"shape of embedding.weight is \[300, 32\] instead of \[384"):
        copy_shards(make(variant())[0], model)
    del model.final_norm
    with pytest.raises(ValueError, match=r"it lacks \['final_norm.bias', 'final_norm.weight'\]"):
        copy_shards(make(variant())[0], model)
