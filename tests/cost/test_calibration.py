"""Measured kernels: all of them are there, for every kind of model, and the number of operations is right."""

import dataclasses

from torch.utils.flop_counter import FlopCounterMode

from tplab import launch
from tplab.cost.calibration import Kernels, Line, measure_kernels
from tplab.cost.flops import layer_products, logits
from tplab.memory.config import GPTConfig

SMALL = GPTConfig(num_layers=2, hidden_size=32, num_heads=4, vocab_size=64, seq_length=16, dropout=0.0)
LLAMA = dataclasses.replace(SMALL, gated=True, bias=False, num_kv_heads=2, ffn_hidden_size=48)
CONFIGS = [SMALL, dataclasses.replace(SMALL, dropout=0.1), LLAMA]


def measure(config: GPTConfig, p: int) -> Kernels:
    return measure_kernels(config, 2, p, rounds=1, parameters=100)


def test_each_kernel_takes_time_and_only_several_ranks_send():
    alone = [(1, measure(config, 1)) for config in CONFIGS]
    for p, found in (*alone, *((2, found) for found in launch(measure, 2, args=(LLAMA, 2)))):
        times = [*found.matmuls, *found.elementwise, *found.attention, found.output, found.optimizer]
        assert min(times) > 0
        assert (found.summed == found.beside == Line()) == (p == 1)
        assert min(found.summed.call, found.summed.byte, found.beside.call, found.beside.byte) >= 0


def test_the_measured_matmuls_are_those_of_one_rank():
    for config in (SMALL, LLAMA):
        for tp in (1, 2):
            with FlopCounterMode(display=False) as counter:
                measure_kernels(config, 2, tp, rounds=1, parameters=100)  # after a warm-up
            tokens, layer = 2 * 16, layer_products(config) + logits(config)  # torch doesn't count the scores on a CPU
            assert counter.get_total_flops() == 2 * 3 * tokens * layer / tp
