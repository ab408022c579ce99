"""Batches of training tokens. A batch depends only on the step number, so no position in the data has to be saved.

    tokens      [ . . . . . . . . . . . . . . . . . . . . . ]
    windows       [   0   ][   1   ][   2   ][   3   ]           seq_length tokens each, from a random offset
    epoch 0     2 0 3 1        epoch 1, from another offset    1 2 0 3
    batch(0)    2 0            batch(1)  3 1       batch(2)  1 2                              batch_size 2

The targets of a window are its tokens shifted by one position. Each epoch contains every window once. The next epoch
has new windows in a new order, and a batch may contain the last windows of one epoch and the first of the next.

The order of an epoch is drawn from the seed and the epoch's number, and takes 8 bytes of memory per window. We use
NumPy's `RandomState` for it, because its numbers will stay the same in all versions of NumPy. If you change the order,
also increase `FORMAT` in prepare.py, so that runs that were started with the old order aren't resumed with the new one.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tplab.tensor.sharding import divide


class Batches:
    """The batches of `tokens`, a vector of ids such as `TokenFiles.train`. The same arguments give the same batches.

    `windows` is the number of sequences per epoch. Raises ValueError, with the `name` of the text, if the text is too
    short for a sequence.
    """

    def __init__(
        self, tokens: NDArray[np.unsignedinteger], seq_length: int, batch_size: int, seed: int, name: str = "the text"
    ) -> None:
        if len(tokens) < seq_length + 1:
            raise ValueError(
                f"{name} has only {len(tokens):,} tokens, but a sequence of seq_length={seq_length} and its last "
                f"target need {seq_length + 1:,}. Use more text (data, data_limit) or a smaller seq_length"
            )
        self.tokens, self.seq_length, self.batch_size, self.seed = tokens, seq_length, batch_size, seed
        self.windows = max(1, (len(tokens) - seq_length) // seq_length)  # the same number for every offset
        self._epoch: int | None = None  # whose windows' offsets are in `_begins`

    def own(self, step: int, replica: int, replicas: int) -> tuple[Tensor, Tensor]:
        """Return a replica's (ids, targets) for a step 0, 1, 2, ...: [batch_size / replicas, seq_length] int64 each."""
        count = divide(self.batch_size, replicas)
        first = step * self.batch_size + replica * count
        begins = [self._begin(number) for number in range(first, first + count)]
        rows = [self.tokens[begin : begin + self.seq_length + 1] for begin in begins]
        windows = torch.from_numpy(np.stack(rows).astype(np.int64))  # [count, s + 1]
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def _begin(self, number: int) -> int:
        """Return the offset in `tokens` of a window, whose number is counted across all epochs."""
        epoch, place = divmod(number, self.windows)
        if epoch != self._epoch:
            chance = np.random.RandomState([self.seed, epoch])
            offset = chance.randint(len(self.tokens) - self.windows * self.seq_length)
            self._epoch, self._begins = epoch, offset + chance.permutation(self.windows) * self.seq_length
        return int(self._begins[place])
