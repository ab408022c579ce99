"""Chapter 13: messages between pipeline stages, sent in a way that can't deadlock.

A schedule that works on paper must not hang because of the way its messages are sent. Four rules prevent that:

    sends don't block           `isend` returns immediately, and the tensor is kept alive until it has arrived
    one channel per direction   messages to higher and to lower ranks use different process groups, so an activation and
                                a gradient between the same two ranks never wait for each other
    connections open first      NCCL opens a connection with its first message, and blocks the CPUs of both ranks until
                                both have posted it. So every connection is used once before a schedule starts
    the sender sets the order   NCCL has no tags, so messages in a channel arrive in the order in which they are sent.
                                The receiver takes that order from the sender's list and posts its `irecv`s in it

If a rank receives a result that was computed from one of its own messages, that message must have arrived. The schedule
determines which result confirms which message, so we need no acknowledgments and keep only a few tensors alive.
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tplab.collectives.by_hand import rank_and_size
from tplab.collectives.subgroups import split
from tplab.pipeline.schedules import Result, Schedule
from tplab.runtime import device


class Channels:
    """Process groups that the ranks of a pipeline use to send messages to each other.

    group    the ranks in the order of their stages; None means all ranks

    All ranks of the pipeline must create it together. Creating process groups is slow, so several pipelines over the
    same ranks should share one `Channels`.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self.rank, self.world_size = rank_and_size(group)
        self.ends: ProcessGroup | None = None  # of the first and the last rank, for a tied parameter
        self._groups: list[ProcessGroup] = []  # for messages to lower ranks, for messages to higher ranks
        if self.world_size > 1:
            last = self.world_size - 1
            self._groups = [split(group, [range(self.world_size)]) for _ in range(2)]
            # torch derives a group's name from how many groups the rank already has. So the inner ranks also get a
            # group here. Otherwise, the next group of all these ranks would get two names, and creating it would hang.
            ends = split(group, [[0, last], *([rank] for rank in range(1, last))])
            self.ends = ends if self.rank in (0, last) else None
            if dist.get_backend(self._groups[0]) == "nccl":
                self.open_connections(device())

    def open_connections(self, on: torch.device) -> None:
        """Send one element over every connection that a schedule can use, in the same order on all ranks.

        on    the device of the element
        """
        for sender, receiver in connections(self.world_size):
            element = torch.zeros(1, device=on)
            if self.rank == sender:
                self.send(element, receiver).wait()
            elif self.rank == receiver:
                self.receive(element, sender).wait()

    def send(self, tensor: Tensor, receiver: int) -> dist.Work:
        work = dist.isend(tensor, group=self._groups[receiver > self.rank], group_dst=receiver)
        assert work is not None
        return work

    def receive(self, tensor: Tensor, sender: int) -> dist.Work:
        work = dist.irecv(tensor, group=self._groups[self.rank > sender], group_src=sender)
        assert work is not None
        return work


def connections(p: int) -> list[tuple[int, int]]:
    """Return all (sender, receiver) pairs of p ranks: neighbors and, because of interleaving, the first and last."""
    pairs = [(rank, (rank + 1) % p) for rank in range(p if p > 2 else p - 1)]
    return [connection for a, b in pairs for connection in ((a, b), (b, a))]


class Messages:
    """The messages that a rank sends and receives while it runs a schedule once.

    shape, dtype, device    the shape, dtype and device of every message
    """

    def __init__(
        self, channels: Channels, schedule: Schedule, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._channels, self._schedule = channels, schedule
        self._shape, self._dtype, self._device = shape, dtype, device
        self._made: dict[Result, tuple[int, int]] = {}  # the rank that computes it, the index of its action
        self._used: dict[Result, int] = {}  # the index of the receiver's action that uses it
        for rank, row in enumerate(schedule.actions):
            for place, action in enumerate(row):
                if (given := schedule.gives(rank, action)) is not None:
                    self._made[given] = rank, place
                if (needed := schedule.needs(rank, action)) is not None:
                    self._used[needed] = place
        self._coming = {sender: self._from(sender) for sender in range(channels.world_size)}
        self._here: dict[Result, Tensor] = {}  # results that this rank computed for itself
        self._posted: dict[Result, tuple[dist.Work, Tensor]] = {}
        self._sent: list[tuple[Result, dist.Work, Tensor]] = []

    def check(self, tensor: Tensor, of: str) -> None:
        """Raise ValueError if a tensor doesn't have the shape and dtype of the messages."""
        if tensor.shape != self._shape or tensor.dtype != self._dtype:
            raise ValueError(
                f"{of} gives {list(tensor.shape)} {tensor.dtype}; the pipeline was told that "
                f"{list(self._shape)} {self._dtype} goes from stage to stage"
            )

    def send(self, result: Result, tensor: Tensor) -> None:
        """Send a result to the rank that needs it, without waiting."""
        receiver = self._schedule.receiver(result)
        if receiver == self._channels.rank:
            self._here[result] = tensor
        else:
            tensor = tensor.contiguous()
            self._sent.append((result, self._channels.send(tensor, receiver), tensor))

    def expect(self, result: Result) -> None:
        """Post all receives up to this result, so that its message can arrive while the rank computes."""
        sender, _ = self._made[result]
        while sender != self._channels.rank and result not in self._posted:
            coming = next(self._coming[sender])
            tensor = torch.empty(self._shape, dtype=self._dtype, device=self._device)
            self._posted[coming] = self._channels.receive(tensor, sender), tensor

    def receive(self, result: Result) -> Tensor:
        """Wait for a result that this rank needs, and return it."""
        sender, place = self._made[result]
        if sender == self._channels.rank:
            return self._here.pop(result)
        self.expect(result)
        work, tensor = self._posted.pop(result)
        work.wait()
        self._finish(lambda sent: self._schedule.receiver(sent) == sender and self._used[sent] <= place)
        return tensor

    def close(self) -> None:
        """Wait until all messages that this rank sent have arrived."""
        self._finish(lambda sent: True)

    def _finish(self, has_arrived: Callable[[Result], bool]) -> None:
        for result, work, _ in self._sent:
            if has_arrived(result):
                work.wait()
        self._sent = [sent for sent in self._sent if not has_arrived(sent[0])]

    def _from(self, sender: int) -> Iterator[Result]:
        """Yield the results that `sender` sends to this rank, in the order in which it sends them."""
        for action in self._schedule.actions[sender]:
            result = self._schedule.gives(sender, action)
            if result is not None and self._schedule.receiver(result) == self._channels.rank:
                yield result
