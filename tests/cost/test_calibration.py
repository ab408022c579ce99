"""Measured kernels: all of them are there, for every kind of model, and the number of operations is right."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tplab import launch
from tplab.cost.calibration import Kernels, Line, measure_kernels
from tplab.cost.flops import layer_products, logits
from tplab.memory.config import GPTConfig

SMALL = GPTConfig(num_layers=2, hidden_size=32, num_heads=4, vocab_size=64, seq_length=16, dropout=0.0)
LLAMA = dataclasses.replace(SMALL, gated=True, bias=False, num_kv_heads=2, ffn_hidden_size=48)


@pytest.mark.parametrize("config", [SMALL, dataclasses.replace(SMALL, dropout=0.1), LLAMA])
@pytest.mark.parametrize("p", [1, 2])
def test_each_kernel_takes_time_and_only_several_ranks_send(config, p):
    for found in launch(lambda: measure_kernels(config, 2, p, rounds=1, parameters=100), p):
        times = [*found.matmuls, *found.elementwise, *found.attention, found.output, found.optimizer]
        assert min(times) > 0
        assert (found.summed == found.beside == Line()) == (p == 1)
        assert min(found.summed.call, found.summed.byte, found.beside.call, found.beside.byte) >= 0


def test_the_measured_matmuls_are_those_of_one_rank():
    def flops(config: GPTConfig, tp: int) -> int:
        with FlopCounterMode(display=False) as counter:
            measure_kernels(config, 2, tp, rounds=1, parameters=100)  # after a warm-up
        return counter.get_total_flops()

    for config in (SMALL, LLAMA):
        for tp in (1, 2):
            tokens, layer = 2 * 16, layer_products(config) + logits(config)  # torch doesn't count the scores on a CPU
            assert flops(config, tp) == 2 * 3 * tokens * layer / tp


def test_a_line_counts_calls_and_bytes():
    assert Line(2.0, 0.5).seconds(3, 10) == 11.0


def test_kernels_are_plain_numbers_that_a_rank_can_return():
    (found,) = launch(lambda: measure_kernels(SMALL, 1, 1, rounds=1, parameters=10), 1)
    assert isinstance(found, Kernels)
    assert torch.get_default_dtype() == torch.float32


def test_a_tp_that_doesnt_fit_is_refused():
    with pytest.raises(ValueError, match="num_heads=4 can't be divided over 3"):
        measure_kernels(SMALL, 1, 3)
