"""The time that a GPU's stream waits for collectives, measured with marks on the stream.

On a GPU, a rank issues work and goes on. It's the stream that waits, and this process's clock doesn't see it. So we put
a mark (`torch.cuda.Event`) on the stream before and after both places where a collective may hold it up:

    stream   ── matmuls ──|── all_reduce ──|── matmuls ──              blocking: it may run on this very stream
    stream   ── matmuls ──||── matmuls ──|── waits ──|── matmuls ──    async: NCCL has its own stream, and this one
                                                                       waits in Work.wait() for the rest

The times between these pairs of marks add up. They don't include communication that overlaps with computation, but they
do include waiting for another rank that is late.
"""

from typing import Any

import torch


class StreamWaits:
    """The marks of one block of a program on the current stream of this rank's GPU, from `begin` to `end`."""

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
        """A new mark at the current end of the stream's work."""
        mark = self._mark(enable_timing=True)
        mark.record()
        return mark

    def held_since(self, mark: Any) -> None:
        """Count the time from `mark` until now as a collective, or as waiting for one."""
        self._pairs.append((mark, self.mark()))

    @property
    def is_over(self) -> bool:
        """True if the GPU has reached the end of the block. Doesn't wait for it."""
        return self._ended is not None and self._ended.query()

    @property
    def share(self) -> float:
        """The share of the time from begin to end in which the stream waited. Only valid if `is_over`."""
        whole = self._begun.elapsed_time(self._ended)
        held = sum(since.elapsed_time(until) for since, until in self._pairs)
        return min(1.0, held / whole) if whole else 0.0  # each of these times is rounded, to about half a microsecond
