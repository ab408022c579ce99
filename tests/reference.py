"""What the tests of the modules compare with: plain torch and none of tplab's own slicing."""

import hashlib

import torch
from torch import Tensor

TOLERANCE = 1e-10  # for float64: processors round sums differently, and training steps amplify that


def cut(tensor: Tensor, dim: int, rank: int, p: int, stride: int = 1) -> Tensor:
    """Rank's part of each of `stride` blocks, side by side."""
    return torch.cat([block.chunk(p, dim)[rank] for block in tensor.chunk(stride, dim)], dim)


def random(shape: tuple[int, ...], *key: object, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random numbers that depend on the key alone: random((2, 3), "x", rank) is another tensor on each rank."""
    seed = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:7], "big")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def assert_close(actual: object, expected: object, tolerance: float = TOLERANCE) -> None:
    """Equal in shape and dtype, and in every number up to `tolerance` times the largest expected one (or 1)."""
    assert isinstance(actual, Tensor)
    assert isinstance(expected, Tensor)
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * scale)
