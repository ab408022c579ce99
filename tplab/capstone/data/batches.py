"""Which tokens a step trains on: a function of the step's number alone, so that no position has to be saved.

    tokens      [ . . . . . . . . . . . . . . . . . . . . . ]
    windows       [   0   ][   1   ][   2   ][   3   ]           each of seq_length, from a random place on
    epoch 0     2 0 3 1        epoch 1, from another place     1 2 0 3
    batch(0)    2 0            batch(1)  3 1       batch(2)  1 2                              batch_size 2

The targets of a window are its tokens one place further on. In an epoch each window comes once; then come others, in
another order, and a batch may hold the last of one epoch and the first of the next.

A run of 10^9 tokens has millions of windows. Their order is not a list but a formula: a Feistel network takes the
number of a place apart into two halves, and mixes one into the other, again and again. Each such round can be undone,
so no two places get the same window, and none is left out. It takes the memory of one batch.
(Black and Rogaway 2002, "Ciphers with arbitrary finite domains": the network, and walking on until the number is one
of ours.)
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
    """The batches of `tokens`, a vector of ids such as `TokenFiles.train`: the same ones for the same arguments.

    `windows` is how many sequences an epoch has. Raises ValueError where there is not one.
    """

    def __init__(self, tokens: NDArray[np.unsignedinteger], seq_length: int, batch_size: int, seed: int) -> None:
        if not isinstance(tokens, np.ndarray):
            raise TypeError(f"tokens should be the vector .train or .validation of TokenFiles, not {type(tokens)}")
        for name, size in (("seq_length", seq_length), ("batch_size", batch_size)):
            if size < 1:
                raise ValueError(f"{name}={size} should be 1 or more")
        if len(tokens) < seq_length + 1:
            raise ValueError(
                f"{len(tokens):,} tokens are too few for a sequence of seq_length={seq_length} and its last target: "
                f"that takes {seq_length + 1:,}"
            )
        self.tokens, self.seq_length, self.batch_size, self.seed = tokens, seq_length, batch_size, seed
        self.windows = max(1, (len(tokens) - seq_length) // seq_length)  # as many wherever the first one begins
        self._places = len(tokens) - self.windows * seq_length  # where it may begin: 0, 1, ...

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """(ids, targets) of a step 0, 1, 2, ...: [batch_size, seq_length] int64, of all replicas."""
        return self._rows(step * self.batch_size, self.batch_size)

    def own(self, step: int, replica: int, replicas: int) -> tuple[Tensor, Tensor]:
        """Those rows of `batch(step)` that one of the replicas trains on: [batch_size / replicas, seq_length]."""
        if not 0 <= replica < replicas:
            raise ValueError(f"there is no replica {replica} of {replicas}")
        each = divide(self.batch_size, replicas)
        return self._rows(step * self.batch_size + replica * each, each)

    def epoch(self, step: int) -> int:
        """How often all windows had come before the first row of this step's batch."""
        return step * self.batch_size // self.windows

    def _rows(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        if first < 0:
            raise ValueError(f"steps begin at 0: there is none {first // self.batch_size}")
        rows = [self.tokens[begin : begin + self.seq_length + 1] for begin in self._begins(first, count)]
        windows = torch.from_numpy(np.stack(rows).astype(np.int64))  # [count, s + 1]
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def _begins(self, first: int, count: int) -> list[int]:
        """Where the windows begin that come at places first, first + 1, ... of all that ever come."""
        begins: list[int] = []
        while len(begins) < count:
            epoch, place = divmod(first + len(begins), self.windows)
            places = range(place, min(self.windows, place + count - len(begins)))
            keys = _keys(self.seed, epoch)
            offset = int(keys[-1]) % self._places
            begins += (offset + shuffled(places, self.windows, keys[:-1]) * self.seq_length).tolist()
        return begins


def shuffled(places: Sequence[int], size: int, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """What stands at these places of a list with 0 .. size - 1 in an order that the keys decide."""
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))  # bits; the network's numbers are below 4 size
    numbers = np.asarray(places, dtype=np.uint64)
    outside = np.ones(len(numbers), dtype=bool)
    while outside.any():
        numbers[outside] = _network(numbers[outside], half, keys)
        outside = numbers >= size
    return numbers.astype(np.int64)


def _network(numbers: NDArray[np.uint64], half: np.uint64, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    low = (np.uint64(1) << half) - np.uint64(1)
    left, right = numbers >> half, numbers & low
    for key in keys:
        left, right = right, left ^ (_mixed(right + key) & low)
    return (left << half) | right


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Each bit of the result depends on each bit given (Appleby 2011, the end of MurmurHash3)."""
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        numbers = (numbers ^ (numbers >> np.uint64(33))) * np.uint64(factor)
    return numbers ^ (numbers >> np.uint64(33))


def _keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    """One for each round, and one for the place where the first window begins."""
    digest = hashlib.shake_256(f"{seed} {epoch}".encode()).digest(8 * (_ROUNDS + 1))
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)
