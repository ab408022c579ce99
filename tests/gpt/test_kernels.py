"""At p = 1, a layer runs the kernels of plain PyTorch, and the fused loss moves fewer bytes, as GPU.md says.

On a GPU, most kernels other than matmuls take as long as it takes to read their inputs and to write their outputs.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tplab import plain
from tplab.gpt.transformer import ParallelTransformerLayer
from tplab.memory.config import GPTConfig
from tplab.memory.meter import saved_for_backward
from tplab.tensor.linear_cross_entropy import parallel_linear_cross_entropy

CONFIG = GPTConfig(
    num_layers=2, hidden_size=32, num_heads=4, seq_length=16, vocab_size=512, dropout=0.0, flash_attention=True
)
FREE = ("empty", "new_empty", "_unsafe_view")  # besides views, what computes and copies nothing


class Kernels(TorchDispatchMode):
    """Context manager that notes each kernel's name and the bytes of its inputs and outputs, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if not (func.is_view or name.startswith(FREE)):
            tensors = {id(leaf): leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)}
            self.noted.append((name, sum(tensor.nbytes for tensor in tensors.values())))
        return result


def kernels_of(run: Callable[[], Tensor], dtype: torch.dtype = torch.float32) -> list[tuple[str, int]]:
    """The kernels of a forward and a backward pass under autocast to the given dtype."""
    with Kernels() as kernels:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            y = run()
        y.backward(torch.ones_like(y))
    return kernels.noted


def test_it_notes_kernels_with_their_bytes_but_no_views():
    a, b = torch.ones(4, 8, requires_grad=True), torch.ones(8)
    with Kernels() as kernels:
        (a.detach().view(8, 4).T + b[:4, None]).unsqueeze(0)
    assert kernels.noted == [("add", 4 * (32 + 4 + 32))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_runs_the_kernels_of_plain_pytorch_and_moves_and_saves_the_same_bytes(dtype):
    noted, saved = [], []
    for layer in (plain.Layer(CONFIG), ParallelTransformerLayer(32, 4)):
        x = torch.ones(2, 16, 32, requires_grad=True)
        with saved_for_backward() as kept:
            noted.append(sorted(kernels_of(lambda layer=layer, x=x: layer(x), dtype)))
        saved.append(kept.bytes)
    assert len(noted[0]) >= 30
    assert noted[0] == noted[1]
    assert saved[1] <= saved[0]


def test_the_fused_output_layer_and_loss_move_fewer_bytes_than_plain_pytorch():
    x, weight = torch.randn(512, 64, requires_grad=True), torch.randn(4096, 64, requires_grad=True)
    target = torch.arange(512)

    def moved(run: Callable[[], Tensor]) -> int:
        return sum(size for _, size in kernels_of(run, torch.bfloat16))

    plainly = moved(lambda: F.cross_entropy(F.linear(x, weight).float(), target))
    assert moved(lambda: parallel_linear_cross_entropy(x, weight, target, tokens_at_once=128)) < 0.95 * plainly
