"""`benchmarks.dtensor_gpt`: torch's own tensor parallelism computes and sends what ParallelGPT does."""

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from benchmarks.dtensor_gpt import DTensorGPT, clip_gradients
from tests.capstone.a_few_steps import SMALL, batch, make, variant
from tests.reference import assert_close
from tplab import launch, record
from tplab.data.grad_norm import grad_norm
from tplab.tensor.full_state import full_state_dict


def _made(**changes):
    settings = variant(tp=2, **changes)
    ours, grid = make(settings)
    model = DTensorGPT(settings.model, grid["tp"], dtype=torch.float64)
    model.load(full_state_dict(ours, ours.group))
    return model


def _backward(model):
    loss = model(*batch(0))
    with loss_parallel():
        loss.backward()
    return {name: parameter.grad.to_local() for name, parameter in model.named_parameters()}


def _one_step():
    model, (right, grid) = _made(), make(variant(tp=2))
    with record() as sent:
        theirs = _backward(model)
    told = {"kinds": {type(parameter) for parameter in model.parameters()}, "theirs": sent.totals()}
    with record() as sent:
        right(*batch(0)).backward()
    told["ours"] = sent.totals()
    ours = {name: parameter.grad for name, parameter in right.named_parameters()}
    told["gradients"] = {name: (gradient.clone(), ours[name]) for name, gradient in theirs.items()}
    norm = clip_gradients(model, 0.5).item()
    told["norms"] = norm, grad_norm(right.parameters(), grid).item()
    told["shorter by"] = [
        (theirs[n] / before).nanmedian().item() * norm for n, (before, _) in told["gradients"].items()
    ]
    return told


def _logits(vocab_size):
    """How many logits on this rank are -inf, and how many there are, for two tokens."""
    with torch.no_grad():
        logits = _made(vocab_size=vocab_size)(torch.ones(1, 2, dtype=torch.long))
    return logits.isinf().sum().item(), list(logits.shape)


STEP, WHOLE, PADDED = range(3)


def _everything():
    return _one_step(), _logits(512), _logits(300)


@pytest.fixture(scope="module")
def two():
    """What two ranks tell: a step, and logits without and with padding."""
    return list(zip(*launch(_everything, 2), strict=True))


def test_every_parameter_is_a_dtensor_and_its_gradient_is_that_of_parallel_gpt(two):
    for told in two[STEP]:
        assert told["kinds"] == {DTensor}
        for theirs, ours in told["gradients"].values():
            assert_close(theirs, ours)


def test_clipping_uses_the_norm_of_the_full_gradient_and_shortens_the_dtensors_themselves(two):
    for told in two[STEP]:
        norm, right = told["norms"]
        assert norm == pytest.approx(right, rel=1e-9)
        assert told["shorter by"] == pytest.approx([0.5] * len(told["shorter by"]), rel=1e-5)


def test_it_sends_what_parallel_gpt_sends_but_for_the_loss(two):
    for told in two[STEP]:
        theirs, ours = told["theirs"].pop("all_reduce"), told["ours"].pop("all_reduce")
        assert told["theirs"] == told["ours"] == {}
        assert abs(theirs.bytes - ours.bytes) <= 8 * 4 * SMALL.seq_length  # a number for each token


def test_padding_of_the_vocabulary_takes_no_part(two):
    assert list(two[WHOLE]) == [(0, [1, 2, 256])] * 2
    assert list(two[PADDED]) == [(0, [1, 2, 256]), (2 * (512 - 300), [1, 2, 256])]
