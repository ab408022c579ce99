"""Chapter 06: rotary position embeddings, which rotate pairs of query and key elements depending on the position.

A head's vector [d] has d/2 pairs. Pair i of the token at position m is rotated by m w_i, where w_i = base^(-2i/d):

    [ a' ]   [ cos m w_i   -sin m w_i ] [ a ]          the first pair rotates fastest, one radian per token;
    [ b' ] = [ sin m w_i    cos m w_i ] [ b ]          the last one hardly moves

The dot product of a rotated query at m and a rotated key at n depends on the positions only through m - n, so a score
encodes the distance between two tokens. Like Llama, we pair element i with element i + d/2 (half-split). The paper
pairs 2i with 2i + 1, so weights trained with one pairing don't work with the other. All heads use the same angles, so
nothing here depends on the rank. (Su et al. 2021, "RoFormer", arXiv 2104.09864, section 3.2; transformers,
models/llama/modeling_llama.py and, for Llama 3.1, modeling_rope_utils.py.)
"""

import math

import torch
from torch import Tensor

from tplab.memory.config import RotaryScaling


def rotary_angles(
    positions: Tensor, head_dim: int, base: float = 10_000.0, scaling: RotaryScaling | None = None
) -> Tensor:
    """Return the angles [.., d/2] for integer positions [..]. As in Llama, they are float32 whatever the model's dtype.

    scaling    changes the frequencies w_i, as in Llama 3.1
    Raises ValueError if head_dim is odd.
    """
    if head_dim % 2:
        raise ValueError(f"head_dim={head_dim} is odd: rotary positions turn pairs of numbers")
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim  # [d/2]
    frequencies = 1.0 / base**exponents
    if scaling is not None:
        frequencies = scaled(frequencies, scaling)
    return positions[..., None].float() * frequencies  # [.., d/2]


def scaled(frequencies: Tensor, scaling: RotaryScaling) -> Tensor:
    """Divide low frequencies [d/2] by the factor, keep high ones, and interpolate in between, as Llama 3.1 does."""
    turns = scaling.original_seq_length / (2 * math.pi / frequencies)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate each pair of x [b, heads, s, d] by its angle [s, d/2]. Norms are preserved."""
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)  # [b, heads, s, d/2] each
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)  # [b, heads, s, d]
