"""Chapter 06: rotary positions: turn each pair of numbers of a query or key by an angle that grows with its position.

A head's vector [d] is d/2 pairs. Pair i of the token at position m is turned by the angle m w_i, w_i = base^(-2i/d):

    [ a' ]   [ cos m w_i   -sin m w_i ] [ a ]          the first pair turns fastest, one radian a token;
    [ b' ] = [ sin m w_i    cos m w_i ] [ b ]          the last one hardly moves

A turned query at m times a turned key at n depends on m - n alone, so a score knows how far apart two tokens are.
Llama pairs number i with number i + d/2 (half-split), as we do; the paper pairs 2i with 2i + 1. The weights of one
don't fit the other. Each head is turned by itself with the same angles, so nothing here knows about ranks.
(Su et al. 2021, "RoFormer", arXiv 2104.09864, section 3.2; transformers, models/llama/modeling_llama.py.)
"""

import torch
from torch import Tensor


def rotary_angles(positions: Tensor, head_dim: int, base: float = 10_000.0) -> Tensor:
    """The angles [.., d/2] of integer positions [..], in float32 whatever the model computes in, as in Llama.

    Raises ValueError if head_dim is odd.
    """
    if head_dim % 2:
        raise ValueError(f"head_dim={head_dim} is odd: rotary positions turn pairs of numbers")
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim  # [d/2]
    return positions[..., None].float() * (1.0 / base**exponents)  # [.., d/2]


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """x [b, heads, s, d] with every pair turned by its angle, [s, d/2] or [b, s, d/2]. Lengths stay as they are."""
    if angles.dim() == 3:
        angles = angles[:, None]  # [b, 1, s, d/2], the same for all heads
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)  # [b, heads, s, d/2] each
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)  # [b, heads, s, d]
