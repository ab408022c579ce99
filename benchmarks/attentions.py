"""Ways to compute causal self-attention on p ranks, which `benchmarks.layers` runs in turns.

Within a head, all of them use torch's `scaled_dot_product_attention`. That includes Megatron-Core, because on a CPU,
its own attention writes all s s scores into memory. So the ways differ only in how the heads get to the ranks and back.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import implementations
from benchmarks.implementations import Problem, Way

COUNT = 16  # number of heads


def problem(tokens: int = 2048, hidden: int = 1024) -> Problem:
    """Return an attention layer with 16 heads: x [2, n/2, h], `qkv` = [Wq; Wk; Wv] [3 h, h], and `out` = Wo^T [h, h].

    Both weights have a bias.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    inputs = {
        "x": draw(2, tokens // 2, hidden),
        "qkv": draw(3 * hidden, hidden) / hidden**0.5,
        "qkv_bias": draw(3 * hidden),
        "out": draw(hidden, hidden) / hidden**0.5,
        "out_bias": draw(hidden),
    }
    title = f"attention, {COUNT} heads, h = {hidden:,}, 2 texts of {tokens // 2:,} tokens"
    return Problem(title, inputs, draw(2, tokens // 2, hidden), _plain)


def _plain(x: Tensor, qkv: Tensor, qkv_bias: Tensor, out: Tensor, out_bias: Tensor) -> Tensor:
    return F.linear(_heads(F.linear(x, qkv, qkv_bias), COUNT), out, out_bias)


def _heads(qkv: Tensor, count: int) -> Tensor:
    """Run n attention heads on qkv [b, s, 3 n d], which contains all of q, then k, then v. Returns [b, s, n d]."""
    q, k, v = (part.unflatten(-1, (count, -1)).transpose(1, 2) for part in qkv.chunk(3, -1))  # [b, n, s, d]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def _cut(name: str, whole: Tensor) -> Tensor:
    """Return this rank's shard: its heads of q, then of k, then of v, and the matching columns of `out`."""
    rank, p = dist.get_rank(), dist.get_world_size()
    if name in ("qkv", "qkv_bias"):
        return torch.cat([part.chunk(p)[rank] for part in whole.chunk(3)])
    return implementations.chunks(out=1)(name, whole)


def _cut_megatron(name: str, whole: Tensor) -> Tensor:
    """Return this rank's shard in Megatron-Core's layout.

    The rows of `qkv` are in the order q0 k0 v0, q1 k1 v1, .., and x is [s, b, h].
    """
    if name in ("qkv", "qkv_bias"):
        by_head = whole.unflatten(0, (3, COUNT, -1)).transpose(0, 1)  # [n, 3, d, ..]
        return by_head.chunk(dist.get_world_size())[dist.get_rank()].flatten(0, 2)
    if name in ("x", "output"):
        return whole.transpose(0, 1).contiguous()
    return implementations.chunks(out=1)(name, whole)


def tplab(problem: Problem, async_grad_allreduce: bool = False) -> Way:
    from tplab.tensor.attention import ParallelAttention

    hidden = problem.inputs["x"].shape[-1]
    attention = ParallelAttention(hidden, COUNT, causal=True, async_grad_allreduce=async_grad_allreduce)
    names = {"qkv": "qkv.weight", "qkv_bias": "qkv.bias", "out": "out.weight", "out_bias": "out.bias"}
    return Way(attention, implementations.fill(attention, names, problem, _cut), _cut)


def tplab_async(problem: Problem) -> Way:
    return tplab(problem, async_grad_allreduce=True)


def by_hand(problem: Problem) -> Way:
    mine = implementations.parameters(problem, _cut)
    count = COUNT // dist.get_world_size()

    def forward(x: Tensor) -> Tensor:
        y = _heads(F.linear(implementations.CopyIn.apply(x), mine["qkv"], mine["qkv_bias"]), count)  # [b, s, h/p]
        return implementations.SumUp.apply(F.linear(y, mine["out"])) + mine["out_bias"]

    return Way(forward, mine, _cut)


class CausalCore(nn.Module):
    """The attention within a head, with Megatron-Core's interface: q, k, v [s, b, n, d] -> [s, b, n d]."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
        q, k, v = (part.permute(1, 2, 0, 3) for part in (q, k, v))  # [b, n, s, d]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).flatten(2)


def megatron_core(problem: Problem) -> Way:
    implementations.start_megatron()
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType

    config = implementations.megatron_config(problem.inputs["x"].shape[-1], COUNT, attention_dropout=0.0)
    parts = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear, core_attention=CausalCore, linear_proj=RowParallelLinear
    )
    attention = SelfAttention(config, parts, layer_number=1, attn_mask_type=AttnMaskType.causal)
    names = {"qkv": "linear_qkv.weight", "qkv_bias": "linear_qkv.bias"}
    names |= {"out": "linear_proj.weight", "out_bias": "linear_proj.bias"}

    def forward(x: Tensor) -> Tensor:
        y, bias = attention(x, None)
        return y + bias

    return Way(forward, implementations.fill(attention, names, problem, _cut_megatron), _cut_megatron)


class _Attention(nn.Module):
    """Attention with two linear layers of any library. The first one returns this rank's heads of q, k and v."""

    def __init__(self, qkv: nn.Module, out: nn.Module) -> None:
        super().__init__()
        self.qkv, self.out, self.count = qkv, out, COUNT // dist.get_world_size()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(_heads(self.qkv(x), self.count))


NAMES = {"qkv": "qkv.weight", "qkv_bias": "qkv.bias", "out": "out.weight", "out_bias": "out.bias"}


def fairscale(problem: Problem) -> Way:
    implementations.start_fairscale()
    from fairscale.nn.model_parallel.layers import ColumnParallelLinear, RowParallelLinear

    hidden = problem.inputs["x"].shape[-1]
    qkv = ColumnParallelLinear(hidden, 3 * hidden, gather_output=False)
    attention = _Attention(qkv, RowParallelLinear(hidden, hidden, input_is_parallel=True))
    return Way(attention, implementations.fill(attention, NAMES, problem, _cut), _cut)


def torch_dtensor(problem: Problem) -> Way:
    """Use one layer for q, k and v, whose rows are sorted by rank first, because DTensor shards contiguously."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    hidden, p = problem.inputs["x"].shape[-1], dist.get_world_size()
    attention = _Attention(nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden))

    def by_rank(name: str, whole: Tensor) -> Tensor:
        return whole.unflatten(0, (3, p, -1)).transpose(0, 1).flatten(0, 2) if name.startswith("qkv") else whole

    implementations.fill(attention, NAMES, problem, by_rank)
    implementations.parallelize(attention, {"qkv": ColwiseParallel(), "out": RowwiseParallel()})
    found = dict(attention.named_parameters())
    return Way(attention, {name: found[theirs] for name, theirs in NAMES.items()}, _cut)


SMALL = {"tokens": 256, "hidden": 128}  # for the tests, and for a quick try
WAYS: dict[str, Callable[[Problem], Way]] = {
    "tplab": tplab,
    "tplab, async_grad_allreduce": tplab_async,
    "hand-written minimum": by_hand,
    "Megatron-Core": megatron_core,
    "fairscale": fairscale,
    "torch DTensor": torch_dtensor,
    "one process, as many threads": implementations.one_process,
}
