"""`benchmarks.gpu` on the CPU: both ways take the same step, another loss is refused, the table says what it should."""

import re

import pytest

from benchmarks import gpu
from tests import saying
from tplab import launch
from tplab.capstone.training.build_model import build_model
from tplab.cost.flops import model_flops

SETTINGS = gpu.on_one_rank(**gpu.SMALL, precision="float32", compile=False)


def _another_model(settings, *args, **options):
    model = build_model(settings, *args, **options)
    if settings.layers == "tplab":
        model.embedding.weight.data *= 5
    return model


def _measured():
    outcomes = gpu.measure(SETTINGS, 2)
    gpu.build_model = _another_model
    try:
        gpu.measure(SETTINGS, 2)
    except ValueError as error:
        return outcomes, str(error)
    raise AssertionError("another loss was accepted")


def test_tplab_and_plain_pytorch_take_the_same_step_and_another_loss_is_refused():
    ((outcomes, refused),) = launch(_measured, 1, backend="gloo")
    assert list(outcomes) == ["plain PyTorch", "tplab"]
    assert outcomes["tplab"].loss == pytest.approx(outcomes["plain PyTorch"].loss, rel=1e-5)
    assert all(len(outcome.seconds) == 2 and outcome.peak > 0 for outcome in outcomes.values())
    assert re.match(saying("tplab", "loss", "plain PyTorch"), refused)


def test_the_table_has_ratios_of_medians_and_the_share_of_the_peak():
    outcomes = {
        "plain": gpu.Outcome(5.0, 2 * 10**9, [0.1, 0.1, 0.1, 0.1]),
        "ours": gpu.Outcome(5.0, 3 * 10**9, [0.11, 0.11, 0.11, 0.11]),
    }
    speed = model_flops(SETTINGS.model, SETTINGS.batch_size) / 0.11
    row = gpu.report(SETTINGS, outcomes, peak=2 * speed).splitlines()[-1]
    assert row.startswith("| ours | 110.0, **110.0** (110.0-110.0) | **1.100** (1.100-1.100) | ")
    assert row.endswith(", 50.0% | 3.00 |")
