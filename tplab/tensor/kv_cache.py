"""Chapter 06: the KV cache for text generation, which avoids computing any token's keys and values twice.

Each new token has a new query, but the keys and values of all earlier tokens stay the same. The cache is allocated for
all tokens at the start, and each step writes its keys and values in place:

    keys [b, kv_heads/p, max_length, d]      | k0 | k1 | k2 | new |  .  |  .  |     length 3 -> 4

Each rank caches its own K and V heads, so the memory is divided over the p ranks, and there is no communication.

    bytes of one layer on one rank  =  2 b max_length d (kv_heads/p) times the element size

If there are fewer K and V heads than ranks, each rank caches one head, so adding ranks doesn't make the cache smaller.
"""

import torch
from torch import Tensor


class KVCache:
    """Cache of one layer's keys and values on this rank, [b, heads, max_length, d], filled up to `length`.

    Create it with `ParallelAttention.new_cache`. It supports only generation, without gradients.
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
        """The cached keys, [b, heads, length, d], as a read-only view."""
        return self._keys[:, :, : self.length]

    @property
    def values(self) -> Tensor:
        """The cached values, [b, heads, length, d], as a read-only view."""
        return self._values[:, :, : self.length]

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values [b, heads, s, d] of s tokens in place. Return views of all cached keys and values.

        Raises ValueError if the new tokens don't fit into the cache. Raises RuntimeError if they require a gradient,
        because later writes to the cache would invalidate the gradient.
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
