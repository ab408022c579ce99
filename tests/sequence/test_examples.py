"""The layers that chapter 12 takes apart: their gradients are parts exactly where the chapter says so."""

import torch
import torch.distributed as dist
from torch import Tensor

from tplab import device, launch
from tplab.sequence.examples import MLP, Attention, TensorParallelBlock
from tplab.tensor import load_full_state_dict

HIDDEN, HEADS, TOKENS = 8, 4, 6


def gradients() -> dict[str, dict[str, Tensor]]:
    """Run a block of each kind, with the same full weights on any number of ranks, and return its gradients."""
    found = {}
    x, dy = torch.randn(2, 2, TOKENS, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    options = {"device": device(), "dtype": torch.float64}
    for inner in (Attention(HIDDEN, HEADS, qk_norm=True, **options), MLP(HIDDEN, **options)):
        block = TensorParallelBlock(HIDDEN, inner, **options)
        generator, state = torch.Generator().manual_seed(1), {}
        for name, param in block.named_parameters():
            split, shape = getattr(param, "tensor_parallel", None), list(param.shape)
            if split:
                shape[split.dim] *= dist.get_world_size()
            state[name] = torch.randn(shape, dtype=torch.float64, generator=generator)
        load_full_state_dict(block, state)
        block(x.to(device())).backward(dy.to(device()))
        found[type(inner).__name__] = {name: param.grad.cpu() for name, param in block.named_parameters()}
    return found


def test_norms_of_queries_and_keys_have_partial_gradients_even_without_sequence_parallelism():
    (plain,), ranks = launch(gradients, 1), launch(gradients, 2)
    replicated = ["norm.weight", "norm.bias", "bias"]
    for kind, names in (("Attention", replicated), ("MLP", replicated)):
        for name in names:
            assert all(torch.allclose(rank[kind][name], plain[kind][name], atol=1e-9) for rank in ranks)
    for name in ("inner.q_norm.weight", "inner.k_norm.weight"):
        parts, full = [rank["Attention"][name] for rank in ranks], plain["Attention"][name]
        assert torch.allclose(sum(parts), full, atol=1e-9)
        assert not any(torch.allclose(part, full, atol=1e-3) for part in parts)
