"""Chapter 06: rotary positions: rotate each pair of elements of a query or key by an angle that grows with position.

A head's vector [d] is d/2 pairs. Pair i of the token at position m is rotated by the angle m w_i, w_i = base^(-2i/d):

    [ a' ]   [ cos m w_i   -sin m w_i ] [ a ]          the first pair rotates fastest, one radian per token;
    [ b' ] = [ sin m w_i    cos m w_i ] [ b ]          the last one hardly moves

The product of a rotated query at m and a rotated key at n depends only on m - n, so a score knows how far apart two
tokens are. Llama pairs element i with element i + d/2 (half-split), as we do; the paper pairs 2i with 2i + 1, so their
weights aren't interchangeable. Each head is rotated separately by the same angles, so nothing here knows about ranks.
(Su et al. 2021, "RoFormer", arXiv 2104.09864, section 3.2; transformers, models/llama/modeling_llama.py.)
"""

import torch
from torch import Tensor


def rotary_angles(positions: Tensor, head_dim: int, base: float = 10_000.0) -> Tensor:
    """The angles [.., d/2] of integer positions [..], in float32 whatever the model's dtype is, as in Llama.

    Raises ValueError if head_dim is odd.
    """
    if head_dim % 2:
        raise ValueError(f"head_dim={head_dim} is odd: rotary positions turn pairs of numbers")
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim  # [d/2]
    return positions[..., None].float() * (1.0 / base**exponents)  # [.., d/2]


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate every pair of x [b, heads, s, d] by its angle, [s, d/2] or [b, s, d/2]. Lengths stay the same."""
    if angles.dim() == 3:
        angles = angles[:, None]  # [b, 1, s, d/2], the same for all heads
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)  # [b, heads, s, d/2] each
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)  # [b, heads, s, d]
