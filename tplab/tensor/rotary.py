"""Chapter 06: rotary position embeddings, which rotate pairs of query and key elements depending on the position.

A head's vector [d] has d/2 pairs. Pair i of the token at position m is rotated by the angle m w_i, w_i = base^(-2i/d):

    [ a' ]   [ cos m w_i   -sin m w_i ] [ a ]          the first pair rotates fastest, one radian per token;
    [ b' ] = [ sin m w_i    cos m w_i ] [ b ]          the last one hardly moves

The dot product of a rotated query at m and a rotated key at n depends on the positions only through m - n, so a score
encodes the distance between two tokens. Like Llama, we pair element i with element i + d/2 (half-split). The paper
pairs 2i with 2i + 1, so weights aren't interchangeable. All heads use the same angles, so ranks don't matter here. (Su
et al. 2021, "RoFormer", arXiv 2104.09864, section 3.2; transformers, models/llama/modeling_llama.py.)
"""

import torch
from torch import Tensor


def rotary_angles(positions: Tensor, head_dim: int, base: float = 10_000.0) -> Tensor:
    """Return the angles [.., d/2] for integer positions [..]. As in Llama, they are float32 whatever the model's dtype.

    Raises ValueError if head_dim is odd.
    """
    if head_dim % 2:
        raise ValueError(f"head_dim={head_dim} is odd: rotary positions turn pairs of numbers")
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim  # [d/2]
    return positions[..., None].float() * (1.0 / base**exponents)  # [.., d/2]


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate each pair of x [b, heads, s, d] by its angle, [s, d/2] or [b, s, d/2]. Norms are preserved."""
    if angles.dim() == 3:
        angles = angles[:, None]  # [b, 1, s, d/2], the same for all heads
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)  # [b, heads, s, d/2] each
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)  # [b, heads, s, d]
