"""Chapter 06: the KV cache of text generation, so that no token's keys and values are computed twice.

Each new token has a new query, but the keys and values of all earlier tokens stay the same. The cache has room for all
of them from the start, and each step writes its own in place:

    keys [b, kv_heads/p, max_length, d]      | k0 | k1 | k2 | new |  .  |  .  |     length 3 -> 4

Each rank caches its own heads of K and V, and nothing is sent, so p ranks share the memory among them.

    bytes of one layer on one rank  =  2 b max_length d (kv_heads/p) times the element size

With fewer heads of K and V than ranks, each rank caches one, so more ranks don't make the cache smaller.
"""

import torch
from torch import Tensor


class KVCache:
    """The keys and values [b, heads, max_length, d] of one layer on this rank, of which the first `length` are filled.

    Created by `ParallelAttention.new_cache`. For generation only, without gradients.
    """

    def __init__(
        self,
        batch_size: int,
        num_heads: int,
        max_length: int,
        head_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        shape = (batch_size, num_heads, max_length, head_dim)
        self._keys = torch.zeros(shape, device=device, dtype=dtype)  # zeros, because masked values must not be NaN
        self._values = torch.zeros_like(self._keys)
        self.max_length, self.length = max_length, 0

    @property
    def keys(self) -> Tensor:
        """The keys so far, [b, heads, length, d]: a read-only view."""
        return self._keys[:, :, : self.length]

    @property
    def values(self) -> Tensor:
        """The values so far, [b, heads, length, d]: a read-only view."""
        return self._values[:, :, : self.length]

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write the keys and values [b, heads, s, d] of s new tokens, in place; return all so far, as views.

        Raises ValueError if they don't fit, RuntimeError if they need a gradient, which the next write would spoil.
        """
        if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            raise RuntimeError(
                "a KV cache is overwritten in place, so it has no gradient: use it under torch.no_grad()"
            )
        wanted = (*self._keys.shape[:2], keys.shape[2], self._keys.shape[3])
        if keys.shape != wanted or values.shape != wanted:
            raise ValueError(
                f"this cache takes keys and values {list(wanted)}, got {list(keys.shape)} and {list(values.shape)}"
            )
        stop = self.length + keys.shape[2]
        if stop > self.max_length:
            raise ValueError(
                f"{self.length} tokens are cached, and {keys.shape[2]} more don't fit into "
                f"max_length={self.max_length}: make the cache with max_length={stop} or more"
            )
        self._keys[:, :, self.length : stop] = keys
        self._values[:, :, self.length : stop] = values
        self.length = stop
        return self.keys, self.values

    def truncate(self, length: int = 0) -> None:
        """Drop all but the first `length` tokens, to overwrite the rest. Raises ValueError if there are fewer."""
        if not 0 <= length <= self.length:
            raise ValueError(f"can't keep {length} of {self.length} cached tokens")
        self.length = length

    @property
    def nbytes(self) -> int:
        """Bytes that the cache takes on this rank."""
        return self._keys.nbytes + self._values.nbytes
