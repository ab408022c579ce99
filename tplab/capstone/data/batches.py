"""Batches of training tokens. A batch depends only on the step number, so no position in the data has to be saved.

    tokens      [ . . . . . . . . . . . . . . . . . . . . . ]
    windows       [   0   ][   1   ][   2   ][   3   ]           seq_length tokens each, from a random offset
    epoch 0     2 0 3 1        epoch 1, from another offset    1 2 0 3
    batch(0)    2 0            batch(1)  3 1       batch(2)  1 2                              batch_size 2

The targets of a window are its tokens shifted by one position. Each epoch contains every window once. The next epoch
has new windows in a new order, and a batch may contain the last windows of one epoch and the first of the next.

The order of millions of windows is computed by a formula instead of being stored. A Feistel network splits the bits
of a position in that order into two halves and repeatedly mixes one half into the other. Each round can be undone, so
every position gets a different window. (Black and Rogaway 2002, "Ciphers with arbitrary finite domains".)
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tplab.tensor.sharding import divide

_ROUNDS = 8


class Batches:
    """The batches of `tokens`, a vector of ids such as `TokenFiles.train`. The same arguments give the same batches.

    `windows` is the number of sequences per epoch. Raises ValueError if there are none, or if a size is below 1.
    """

    def __init__(self, tokens: NDArray[np.unsignedinteger], seq_length: int, batch_size: int, seed: int) -> None:
        if not isinstance(tokens, np.ndarray):
            raise TypeError(f"tokens should be the vector .train or .validation of TokenFiles, not {type(tokens)}")
        for name, size in (("seq_length", seq_length), ("batch_size", batch_size)):
            if size < 1:
                raise ValueError(f"{name}={size} should be 1 or more")
        if len(tokens) < seq_length + 1:
            raise ValueError(
                f"{len(tokens):,} tokens are too few, because a sequence of seq_length={seq_length} and its last "
                f"target need {seq_length + 1:,}"
            )
        self.tokens, self.seq_length, self.batch_size, self.seed = tokens, seq_length, batch_size, seed
        self.windows = max(1, (len(tokens) - seq_length) // seq_length)  # the same number for every offset
        self._places = len(tokens) - self.windows * seq_length  # possible offsets: 0, 1, ...

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the (ids, targets) of all replicas for a step 0, 1, 2, ...: [batch_size, seq_length] int64 each."""
        return self.own(step, 0, 1)

    def own(self, step: int, replica: int, replicas: int) -> tuple[Tensor, Tensor]:
        """Return the rows of `batch(step)` that one replica trains on: [batch_size / replicas, seq_length] each."""
        if not 0 <= replica < replicas:
            raise ValueError(f"replica={replica} should be between 0 and {replicas - 1}")
        if step < 0:
            raise ValueError(f"step={step} should be 0 or more")
        count = divide(self.batch_size, replicas)
        begins = self._begins(step * self.batch_size + replica * count, count)
        rows = [self.tokens[begin : begin + self.seq_length + 1] for begin in begins]
        windows = torch.from_numpy(np.stack(rows).astype(np.int64))  # [count, s + 1]
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def _begins(self, first: int, count: int) -> list[int]:
        """Return the offsets in `tokens` of windows first, first + 1, ..., counted across all epochs."""
        begins: list[int] = []
        while len(begins) < count:
            epoch, place = divmod(first + len(begins), self.windows)
            places = range(place, min(self.windows, place + count - len(begins)))
            keys = _keys(self.seed, epoch)
            offset = int(keys[-1]) % self._places
            begins += (offset + shuffled(places, self.windows, keys[:-1]) * self.seq_length).tolist()
        return begins


def shuffled(places: Sequence[int], size: int, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the elements at positions `places` of the permutation of 0 .. size - 1 that `keys` determines."""
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))  # bits; the network's numbers are below 4 · size
    low = (np.uint64(1) << half) - np.uint64(1)
    numbers = np.asarray(places, dtype=np.uint64)
    outside = np.ones(len(numbers), dtype=bool)
    while outside.any():  # numbers outside 0 .. size - 1 are permuted again until they're inside ("cycle walking")
        left, right = numbers[outside] >> half, numbers[outside] & low
        for key in keys:
            left, right = right, left ^ (_mixed(right + key) & low)
        numbers[outside] = (left << half) | right
        outside = numbers >= size
    return numbers.astype(np.int64)


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash the numbers so that every input bit affects every output bit (Appleby 2011, finalizer of MurmurHash3)."""
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        numbers = (numbers ^ (numbers >> np.uint64(33))) * np.uint64(factor)
    return numbers ^ (numbers >> np.uint64(33))


def _keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    """Return one key per round, plus one for the offset of the first window."""
    digest = hashlib.shake_256(f"{seed} {epoch}".encode()).digest(8 * (_ROUNDS + 1))
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)
