"""Cases: rings, linear layers, MLP, attention, embedding, losses."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.gpu.subject import SINGLE, Case, Place, Tensors, layer, of_weights, shapes_of
from tplab import plain
from tplab.collectives.by_hand import ring_all_gather, ring_all_reduce, ring_reduce_scatter, tree_all_reduce
from tplab.tensor.attention import ParallelAttention
from tplab.tensor.cross_entropy import vocab_parallel_cross_entropy
from tplab.tensor.embedding import VocabParallelEmbedding, parallel_logits
from tplab.tensor.linear import ColumnParallelLinear, RowParallelLinear
from tplab.tensor.linear_cross_entropy import parallel_linear_cross_entropy
from tplab.tensor.mlp import ParallelMLP

B, S, H, HEADS, FFN, VOCAB = 2, 8, 64, 8, 128, 150
X = {"x": (B, S, H)}


def _of_all(place: Place) -> list[Tensor]:
    """One tensor for each rank. On the CPU, without ranks, the same: their number is that of the run."""
    return [place.random((8, 3), "summand", rank) for rank in range(dist.get_world_size())]


def _rings(place: Place) -> Tensors:
    mine, p = _of_all(place)[dist.get_rank()], dist.get_world_size()
    part = place.random((8, 3), "whole").tensor_split(p)[dist.get_rank()]
    scattered = ring_all_gather(ring_reduce_scatter(mine), size=8)
    return {
        "ring": ring_all_reduce(mine), "tree": tree_all_reduce(mine), "gathered": ring_all_gather(part, size=8),
        "scattered": scattered,
    }  # fmt: skip


def _rings_plainly(place: Place) -> Tensors:
    total = torch.stack(_of_all(place)).sum(0)
    return {"ring": total, "tree": total, "gathered": place.random((8, 3), "whole"), "scattered": total}


# Layers


def _linear(weights: Tensors, x: Tensor) -> Tensor:
    return F.linear(x, weights["weight"], weights["bias"])


def _column(place: Place) -> nn.Module:
    return ColumnParallelLinear(H, FFN, gather_output=True, **place.options)


def _column_async(place: Place) -> nn.Module:
    return ColumnParallelLinear(H, FFN, gather_output=True, async_grad_allreduce=True, **place.options)


def _row(place: Place) -> nn.Module:
    return RowParallelLinear(FFN, H, input_is_parallel=False, **place.options)


def _attention(kv_heads: int, rotary_base: float | None = None) -> Case:
    options: dict[str, Any] = {"causal": True, "rotary_base": rotary_base}
    theirs = plain.Attention(H, HEADS, kv_heads, **options, device="meta")

    def make(place: Place) -> nn.Module:
        return ParallelAttention(H, HEADS, kv_heads, **options, **place.options)

    rounds = None if rotary_base is None else SINGLE  # the angles, as in Llama
    return layer(shapes_of(theirs), X, make, of_weights(theirs), rounds=rounds)


def _mlp(activation: str) -> Case:
    theirs = plain.MLP(H, FFN, activation, device="meta")
    return layer(
        shapes_of(theirs), X, lambda place: ParallelMLP(H, FFN, activation, **place.options), of_weights(theirs)
    )


# The output layer: each starts from the table, whose rows the ranks share


def _table(place: Place) -> nn.Module:
    return VocabParallelEmbedding(VOCAB, H, **place.options)


def _targets(ids: Tensor) -> Tensor:
    """Some of them don't count."""
    return ids.masked_fill(ids % 7 == 3, -100)


def _loss(table: VocabParallelEmbedding, x: Tensor, ids: Tensor) -> Tensor:
    logits = parallel_logits(x, table.weight)  # [b, s, v/p]
    return vocab_parallel_cross_entropy(logits, _targets(ids), vocab_size=VOCAB)


def _fused_loss(table: VocabParallelEmbedding, x: Tensor, ids: Tensor) -> Tensor:
    return parallel_linear_cross_entropy(x, table.weight, _targets(ids), tokens_at_once=5, vocab_size=VOCAB)


def _plain_loss(weights: Tensors, x: Tensor, ids: Tensor) -> Tensor:
    logits = F.linear(x, weights["weight"]).flatten(0, 1)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(dtype), _targets(ids).flatten())


TABLE = {"weight": (VOCAB, H)}
IDS = {"ids": (VOCAB, (B, S))}

CASES: dict[str, Case] = {
    "rings and trees": Case(_rings, _rings_plainly, messages=True),
    "column linear": layer({"weight": (FFN, H), "bias": (FFN,)}, X, _column, _linear),
    "column linear, async": layer({"weight": (FFN, H), "bias": (FFN,)}, X, _column_async, _linear),
    "row linear": layer({"weight": (H, FFN), "bias": (H,)}, {"x": (B, S, FFN)}, _row, _linear),
    "mlp": _mlp("gelu"),
    "mlp, swiglu": _mlp("swiglu"),
    "attention": _attention(HEADS),
    "attention, rotary, 2 heads of K and V": _attention(2, 10_000.0),
    "attention, 1 head of K and V": _attention(1),
    "embedding": layer(TABLE, {}, _table, lambda weights, ids: F.embedding(ids, weights["weight"]), ids=IDS),
    "logits": layer(
        TABLE, X, _table, lambda weights, x: F.linear(x, weights["weight"]),
        call=lambda table, x: parallel_logits(x, table.weight, gather=True, vocab_size=VOCAB),
    ),
    "cross entropy": layer(TABLE, X, _table, _plain_loss, call=_loss, ids=IDS),
    "linear cross entropy": layer(TABLE, X, _table, _plain_loss, call=_fused_loss, ids=IDS),
}  # fmt: skip
