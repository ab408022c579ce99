"""How long the stream of a GPU stands still for collectives, told by marks on it.

On a GPU a rank hands out work and goes on; it is the stream that waits, and this process's clock does not see it. So a
mark (`torch.cuda.Event`) is put on the stream before and after both places in which a collective may hold it up:

    stream   ── products ──|── all_reduce ──|── products ──            blocking: it may run on this very stream
    stream   ── products ──||── products ──|── waits ──|── products ── async: NCCL has a stream of its own, and this one
                                                                       stands still in Work.wait() for what is left

The times between these pairs of marks add up. What travels beside computation is not in them; what the stream stands
still for since another rank is late is.
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
        """A mark where the stream's work ends by now."""
        mark = self._mark(enable_timing=True)
        mark.record()
        return mark

    def held_since(self, mark: Any) -> None:
        """What the stream was given between `mark` and now was a collective, or waiting for one."""
        self._pairs.append((mark, self.mark()))

    @property
    def is_over(self) -> bool:
        """Whether the GPU has come to the end of the block. Nobody is waited for."""
        return self._ended is not None and self._ended.query()

    @property
    def share(self) -> float:
        """Of the time from begin to end, the part in which the stream stood still. Only where `is_over`."""
        whole = self._begun.elapsed_time(self._ended)
        held = sum(since.elapsed_time(until) for since, until in self._pairs)
        return min(1.0, held / whole) if whole else 0.0  # each of these times is rounded, to about half a microsecond
