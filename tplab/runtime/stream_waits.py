"""Measure how long a GPU's stream waits for collectives, using marks on the stream.

On a GPU, a rank queues work and continues. Only the stream waits, so this process can't time the wait with its clock.
We therefore put a mark (`torch.cuda.Event`) on the stream before and after each place where a collective may delay it:

    stream   ── matmuls ──|── all_reduce ──|── matmuls ──              blocking: may run on this very stream
    stream   ── matmuls ──||── matmuls ──|── waits ──|── matmuls ──    async: NCCL has its own stream, and this one
                                                                       waits in Work.wait() for the rest

The result is the sum of the times between these pairs of marks. Communication that overlaps with computation isn't
included, but waiting for a slower rank is.
"""

from typing import Any

import torch


class StreamWaits:
    """Puts marks on the current stream of this rank's GPU while a block of the program runs, from `begin` to `end`."""

    def __init__(self, mark: type = torch.cuda.Event) -> None:
        self._mark = mark
        self._pairs: list[tuple[Any, Any]] = []
        self._begun: Any = None
        self._ended: Any = None

    def begin(self) -> None:
        self._begun = self.mark()

    def end(self) -> None:
        self._ended = self.mark()

    def mark(self) -> Any:
        """Record a new mark after all work that has been queued on the stream so far, and return it."""
        mark = self._mark(enable_timing=True)
        mark.record()
        return mark

    def held_since(self, mark: Any) -> None:
        """Count the time from `mark` until now as time in a collective or waiting for one."""
        self._pairs.append((mark, self.mark()))

    @property
    def is_over(self) -> bool:
        """True if the GPU has reached the end of the block. Doesn't wait for the GPU."""
        return self._ended is not None and self._ended.query()

    @property
    def share(self) -> float:
        """The fraction of the time from begin to end that the stream spent waiting. Only valid once `is_over`."""
        whole = self._begun.elapsed_time(self._ended)
        held = sum(since.elapsed_time(until) for since, until in self._pairs)
        return min(1.0, held / whole) if whole else 0.0  # each of these times is rounded to about half a microsecond
