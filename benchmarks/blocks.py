"""Ways to compute an MLP and causal self-attention on p ranks, which `benchmarks.layers` runs in turns.

    core(x · first + first_bias) · last + last_bias

An MLP's core is GELU. Attention's core runs the heads on [q, k, v], with torch's `scaled_dot_product_attention` in all
ways. That includes Megatron-Core's, because on a CPU, its own attention writes all s s scores into memory. So the ways
differ only in how the two matmuls are split, and in what they send.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import ways
from benchmarks.ways import Problem, Way

HEADS = 16
SMALL = {"tokens": 256, "hidden": 128}  # for the tests, and for a quick try


@dataclass
class Block(Problem):
    """An MLP or attention.

    core     what happens between the two matmuls
    parts    how many matrices lie below each other in `first`: 3 for q, k and v
    """

    core: Callable[[Tensor], Tensor]
    parts: int

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's shard: its rows of each part of `first`, and the matching columns of `last`."""
        p, rank = dist.get_world_size(), dist.get_rank()
        if name.startswith("first"):
            return whole.unflatten(0, (self.parts, p, -1))[:, rank].flatten(0, 1)
        return whole.chunk(p, 1)[rank].contiguous() if name == "last" else whole


def mlp(tokens: int = 2048, hidden: int = 1024) -> Block:
    """Return an MLP with x [1, n, h], first [4 h, h] and last [h, 4 h]. (Weights are [out, in], as in torch.)"""
    title = f"MLP {hidden}→{4 * hidden}→{hidden}, {tokens:,} tokens"
    return _block(title, F.gelu, parts=1, x=(1, tokens, hidden), first=4 * hidden, last=4 * hidden)


def attention(tokens: int = 2048, hidden: int = 1024) -> Block:
    """Return attention with x [2, n/2, h], first = [Wq; Wk; Wv] [3 h, h] and last [h, h]."""
    title = f"attention, {HEADS} heads, h = {hidden:,}, 2 texts of {tokens // 2:,} tokens"
    core = partial(_heads, size=hidden // HEADS)
    return _block(title, core, parts=3, x=(2, tokens // 2, hidden), first=3 * hidden, last=hidden)


def _block(title: str, core: Callable[[Tensor], Tensor], parts: int, x: tuple, first: int, last: int) -> Block:
    generator, hidden = torch.Generator().manual_seed(0), x[-1]

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    inputs = {
        "x": draw(*x),
        "first": draw(first, hidden) / hidden**0.5,
        "first_bias": draw(first),
        "last": draw(hidden, last) / last**0.5,
        "last_bias": draw(hidden),
    }

    def forward(x: Tensor, first: Tensor, first_bias: Tensor, last: Tensor, last_bias: Tensor) -> Tensor:
        return F.linear(core(F.linear(x, first, first_bias)), last, last_bias)

    return Block(title, inputs, draw(*x), forward, core, parts)


def _heads(qkv: Tensor, size: int) -> Tensor:
    """Run n attention heads on qkv [b, s, 3 n d], which contains all of q, then k, then v. Returns [b, s, n d]."""
    q, k, v = (part.unflatten(-1, (-1, size)).transpose(1, 2) for part in qkv.chunk(3, -1))  # [b, n, s, d]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def tplab(block: Block) -> Way:
    from tplab.tensor import ParallelAttention, ParallelMLP

    hidden = block.inputs["x"].shape[-1]
    module = ParallelMLP(hidden) if block.parts == 1 else ParallelAttention(hidden, HEADS, causal=True)
    names = _names("up", "down") if block.parts == 1 else _names("qkv", "out")
    return Way(module, ways.fill(module, names, block, block.cut), block.cut)


def _names(first: str, last: str) -> dict[str, str]:
    """Return the names of a module's parameters, given those of its two layers."""
    return {
        "first": f"{first}.weight", "first_bias": f"{first}.bias", "last": f"{last}.weight", "last_bias": f"{last}.bias"
    }  # fmt: skip


def by_hand(block: Block) -> Way:
    mine = ways.parameters(block, block.cut)

    def forward(x: Tensor) -> Tensor:
        y = block.core(F.linear(ways.CopyIn.apply(x), mine["first"], mine["first_bias"]))  # [b, s, last/p]
        return ways.SumUp.apply(F.linear(y, mine["last"])) + mine["last_bias"]

    return Way(forward, mine, block.cut)


class CausalCore(nn.Module):
    """The attention within a head, with Megatron-Core's interface: q, k, v [s, b, n, d] -> [s, b, n d]."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
        q, k, v = (part.permute(1, 2, 0, 3) for part in (q, k, v))  # [b, n, s, d]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).flatten(2)


def megatron_core(block: Block) -> Way:
    """Use Megatron-Core's MLP or attention with its own linear layers."""
    ways.start_megatron()
    return _megatron_mlp(block) if block.parts == 1 else _megatron_attention(block)


def _megatron_mlp(block: Block) -> Way:
    """It takes [s, b, h], but with a single sequence, that's the same memory."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLP, MLPSubmodules

    hidden = block.inputs["x"].shape[-1]
    config = ways.megatron_config(hidden, ffn_hidden_size=4 * hidden)
    parts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    mlp = MLP(config, parts, ffn_hidden_size=4 * hidden)
    mine = ways.fill(mlp, _names("linear_fc1", "linear_fc2"), block, block.cut)
    return Way(lambda x: _with_bias(*mlp(x)), mine, block.cut)


def _megatron_attention(block: Block) -> Way:
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType

    def cut(name: str, whole: Tensor) -> Tensor:
        """The rows of its `first` are in the order q0 k0 v0, q1 k1 v1, .., and its x is [s, b, h]."""
        if name.startswith("first"):
            by_head = whole.unflatten(0, (3, HEADS, -1)).transpose(0, 1)  # [n, 3, d, ..]
            return by_head.chunk(dist.get_world_size())[dist.get_rank()].flatten(0, 2)
        return whole.transpose(0, 1).contiguous() if name in ("x", "output") else block.cut(name, whole)

    config = ways.megatron_config(block.inputs["x"].shape[-1], HEADS, attention_dropout=0.0)
    parts = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear, core_attention=CausalCore, linear_proj=RowParallelLinear
    )
    attention = SelfAttention(config, parts, layer_number=1, attn_mask_type=AttnMaskType.causal)
    mine = ways.fill(attention, _names("linear_qkv", "linear_proj"), block, cut)
    return Way(lambda x: _with_bias(*attention(x, None)), mine, cut)


def _with_bias(y: Tensor, bias: Tensor) -> Tensor:
    return y + bias


class _Core(nn.Module):
    def __init__(self, core: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.forward = core


def torch_dtensor(block: Block) -> Way:
    """DTensor shards contiguously, so the rows of `first` are sorted by rank before."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    p, shapes = dist.get_world_size(), {name: tensor.shape for name, tensor in block.inputs.items()}
    first, last = (nn.Linear(*reversed(shapes[name])) for name in ("first", "last"))
    module = nn.Sequential(first, _Core(block.core), last)

    def by_rank(name: str, whole: Tensor) -> Tensor:
        if not name.startswith("first"):
            return whole
        return whole.unflatten(0, (block.parts, p, -1)).transpose(0, 1).flatten(0, 2)

    names = _names("0", "2")
    ways.fill(module, names, block, by_rank)
    ways.parallelize(module, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    found = dict(module.named_parameters())
    return Way(module, {name: found[theirs] for name, theirs in names.items()}, block.cut)


WAYS: dict[str, Callable[[Block], Way]] = {
    "tplab": tplab,
    "hand-written minimum": by_hand,
    "Megatron-Core": megatron_core,
    "torch DTensor": torch_dtensor,
    "one process, as many threads": ways.one_process,
}
