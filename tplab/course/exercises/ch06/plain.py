"""Attention in a single process, from which the checks of chapter 06 take the right values.

It uses none of tplab's layers. q has the shape [b, n, s, d], and k and v have the shape [b, n, t, d].
"""

import math

import torch
from torch import Tensor


def heads(y: Tensor, head_dim: int) -> Tensor:
    return torch.stack(y.split(head_dim, dim=-1), dim=1)  # [b, s, n d] -> [b, n, s, d]


def columns(y: Tensor) -> Tensor:
    return torch.cat(y.unbind(1), dim=-1)  # [b, n, s, d] -> [b, s, n d]


def allowed(s: int, t: int, causal: bool = False, padding: Tensor | None = None) -> Tensor:
    """Return which keys a query may attend to, [b or 1, 1, s, t]. The queries belong to the last s of t tokens."""
    token = torch.arange(t)
    mask = (token <= token[t - s :, None]) | torch.tensor(not causal)  # [s, t]
    return mask[None, None] if padding is None else mask & padding.logical_not().reshape(-1, 1, 1, t)


def weights(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """Return the softmax of q kᵀ / √d over the allowed keys, [b, n, s, t]. A query without any key gets zeros."""
    scores = torch.einsum("bnid,bnjd->bnij", q, k) / math.sqrt(q.shape[-1])
    largest = torch.where(mask, scores, -math.inf).amax(-1, keepdim=True).detach()
    above = torch.where(largest.isinf(), 0.0, largest)
    exponentials = torch.where(mask, scores - above, -math.inf).exp()
    total = exponentials.sum(-1, keepdim=True)
    return exponentials / torch.where(total == 0, 1.0, total)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Return the heads' outputs side by side, [b, s, n d]. A head of k and v may serve several heads of q."""
    k, v = (part[:, torch.arange(q.shape[1]) * part.shape[1] // q.shape[1]] for part in (k, v))
    return columns(torch.einsum("bnij,bnjd->bnid", weights(q, k, mask), v))


def turn(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Apply rotary positions. Pair i becomes the complex number x_i + j x_(i + d/2), which a multiplication rotates."""
    half = x.shape[-1] // 2
    speeds = 1.0 / base ** (torch.arange(0, 2 * half, 2, dtype=torch.float32) / (2 * half))
    angles = positions[:, None].float() * speeds  # in float32, as in Llama
    turns = torch.complex(angles.cos().double(), angles.sin().double())  # [s, d/2]
    pairs = torch.complex(x[..., :half], x[..., half:]) * turns
    return torch.cat([pairs.real, pairs.imag], -1)
