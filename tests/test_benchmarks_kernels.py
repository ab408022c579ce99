"""`benchmarks.kernels`: at p = 1, a layer runs the kernels of plain PyTorch.

tests/emulated_gpu counts a whole step on a GPU.
"""

import pytest
import torch
from torch.nn import functional as F

from benchmarks.kernels import Count, count
from tplab import plain
from tplab.gpt.transformer import ParallelTransformerLayer
from tplab.memory.config import GPTConfig
from tplab.memory.meter import saved_for_backward

CONFIG = GPTConfig(
    num_layers=2, hidden_size=32, num_heads=4, seq_length=16, vocab_size=512, dropout=0.0, flash_attention=True
)


def counted(run, dtype=torch.float32) -> Count:
    """What a forward and a backward pass count under autocast to the given dtype."""

    def both_passes():
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            y = run()
        y.backward(torch.empty_like(y))

    return count(both_passes)


def test_it_counts_kernels_with_their_bytes_but_no_views():
    a, b = torch.ones(4, 8), torch.ones(8)
    added = count(lambda: (a.view(8, 4).T + b[:4, None]).unsqueeze(0))
    assert (added.kernels, added.bytes) == (1, 4 * (32 + 4 + 32))
    assert count(lambda: a.add_(b)).bytes == 4 * (32 + 8 + 32)
    ids, table = torch.tensor([1, 2]), torch.ones(100, 8)
    assert count(lambda: F.embedding(ids, table)).bytes == 4 * 16 + 8 * 2 + 4 * 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_runs_the_kernels_of_plain_pytorch_and_moves_and_saves_the_same_bytes(dtype):
    counts, saved = [], []
    for layer in (plain.Layer(CONFIG), ParallelTransformerLayer(32, 4)):
        x = torch.ones(2, 16, 32, requires_grad=True)
        with saved_for_backward() as kept:
            counts.append(counted(lambda layer=layer, x=x: layer(x), dtype))
        saved.append(kept.bytes)
    assert counts[0] == counts[1]
    assert saved[1] <= saved[0]
