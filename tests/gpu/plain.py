"""The layers in plain torch, as functions of a dict of whole weights with the names that tplab's layers have."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

Weights = dict[str, Tensor]


def linear(x: Tensor, weights: Weights, name: str) -> Tensor:
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def mlp(weights: Weights, x: Tensor, gated: bool = False, name: str = "") -> Tensor:
    y = linear(x, weights, f"{name}up")
    if gated:
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    else:
        y = F.gelu(y)
    return linear(y, weights, f"{name}down")


def attention(
    weights: Weights, x: Tensor, heads: int, kv_heads: int, rotary_base: float | None = None, name: str = ""
) -> Tensor:
    """Causal; scores and softmax written out, K and V repeated for the heads that share them."""
    b, s, h = x.shape
    d = h // heads
    q, k, v = linear(x, weights, f"{name}qkv").split([heads * d, kv_heads * d, kv_heads * d], -1)
    q, k, v = (part.unflatten(-1, (-1, d)).transpose(1, 2) for part in (q, k, v))  # [b, n, s, d]
    if rotary_base is not None:
        q, k = turned(q, rotary_base), turned(k, rotary_base)
    k, v = (part.repeat_interleave(heads // kv_heads, 1) for part in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(d)  # [b, n, s, s]
    later = torch.ones(s, s, dtype=torch.bool, device=x.device).triu(1)
    y = scores.masked_fill(later, -math.inf).softmax(-1) @ v  # [b, n, s, d]
    return linear(y.transpose(1, 2).reshape(b, s, h), weights, f"{name}out")


def turned(x: Tensor, base: float) -> Tensor:
    """Rotary positions: the pairs (i, i + d/2) as complex numbers, times e^(i angle), in float64."""
    s, d = x.shape[-2:]
    positions = torch.arange(s, device=x.device, dtype=torch.float64)[:, None]
    powers = torch.arange(0, d, 2, device=x.device, dtype=torch.float64) / d
    angles = positions / base**powers  # [s, d/2]
    first, second = x.double().chunk(2, -1)
    pairs = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([pairs.real, pairs.imag], -1).to(x.dtype)


def norm(x: Tensor, weights: Weights, name: str, rms: bool = False) -> Tensor:
    weight, shape = weights[f"{name}.weight"], x.shape[-1:]
    return F.rms_norm(x, shape, weight, 1e-5) if rms else F.layer_norm(x, shape, weight, weights[f"{name}.bias"], 1e-5)


def transformer_layer(
    weights: Weights, x: Tensor, heads: int, kv_heads: int, *, llama: bool = False, base: float | None = None,
    name: str = "",
) -> Tensor:  # fmt: skip
    """llama: RMSNorm and SwiGLU, rotary positions with this `base`; else LayerNorm and GELU."""
    y = norm(x, weights, f"{name}attention_norm", llama)
    x = x + attention(weights, y, heads, kv_heads, base, f"{name}attention.")
    return x + mlp(weights, norm(x, weights, f"{name}mlp_norm", llama), llama, f"{name}mlp.")


def gpt(weights: Weights, ids: Tensor, layers: int, heads: int, kv_heads: int, llama: bool = False) -> Tensor:
    """Logits [b, s, v]. llama: as above, with an output layer of its own; else learned positions, a tied table."""
    x = F.embedding(ids, weights["embedding.weight"])
    if not llama:
        x = x + weights["positions.weight"][: ids.shape[1]]
    for number in range(layers):
        base = 10_000.0 if llama else None
        x = transformer_layer(weights, x, heads, kv_heads, llama=llama, base=base, name=f"layers.{number}.")
    table = weights["head.weight" if llama else "embedding.weight"]
    return F.linear(norm(x, weights, "final_norm", llama), table)
