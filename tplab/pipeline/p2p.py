"""Chapter 13: the messages of a schedule, sent so that nobody waits for ever.

A schedule that can run must not hang because of how it is sent. Three rules see to that:

    sends wait for nobody       isend; the tensor is kept until it has surely arrived
    one lane for each direction a process group for messages to higher ranks, another one for those to lower ranks, so
                                that an activation and a gradient between the same two ranks never wait for each other
    in the sender's order       messages of a lane arrive in the order in which they are sent (NCCL knows no tags). The
                                receiver reads that order in the sender's list, and posts its irecv in it

A message has surely arrived once its receiver sends something that it did later. So few tensors are kept, and no
confirmation is needed: the schedule says which message proves which.
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tplab.collectives.by_hand import rank_and_size
from tplab.pipeline.schedules import Result, Schedule


class Lanes:
    """The ranks of a pipeline, in the order of the stages, and the process groups among them.

    All ranks of `group` make it at the same time, once: groups are slow to make. Nobody else needs to take part.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self.rank, self.world_size = rank_and_size(group)
        self.ends: ProcessGroup | None = None  # the first and the last rank, for what they share
        self._groups: list[ProcessGroup] = []  # for messages to lower ranks, to higher ranks
        if self.world_size > 1:
            ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
            self._groups = [dist.new_group(ranks, use_local_synchronization=True) for _ in range(2)]
            if self.rank in (0, self.world_size - 1):
                self.ends = dist.new_group([ranks[0], ranks[-1]], use_local_synchronization=True)

    def send(self, tensor: Tensor, receiver: int) -> dist.Work:
        work = dist.isend(tensor, group=self._groups[receiver > self.rank], group_dst=receiver)
        assert work is not None
        return work

    def receive(self, tensor: Tensor, sender: int) -> dist.Work:
        work = dist.irecv(tensor, group=self._groups[self.rank > sender], group_src=sender)
        assert work is not None
        return work


class Wires:
    """What one rank sends and receives during one run of a schedule.

    shape, dtype, device    of every message
    """

    def __init__(
        self, lanes: Lanes, schedule: Schedule, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._lanes, self._schedule = lanes, schedule
        self._shape, self._dtype, self._device = shape, dtype, device
        self._made: dict[Result, tuple[int, int]] = {}  # by which rank, as which of its actions
        self._used: dict[Result, int] = {}  # as which action of its receiver
        for rank, row in enumerate(schedule.actions):
            for place, action in enumerate(row):
                if (given := schedule.gives(rank, action)) is not None:
                    self._made[given] = rank, place
                if (needed := schedule.needs(rank, action)) is not None:
                    self._used[needed] = place
        self._coming = {sender: self._from(sender) for sender in range(lanes.world_size)}
        self._here: dict[Result, Tensor] = {}  # made by this rank for itself
        self._posted: dict[Result, tuple[dist.Work, Tensor]] = {}
        self._sent: list[tuple[Result, dist.Work, Tensor]] = []

    def check(self, tensor: Tensor, of: str) -> None:
        """Raise ValueError for a tensor that is no message of these wires."""
        if tensor.shape != self._shape or tensor.dtype != self._dtype:
            raise ValueError(
                f"{of} gives {list(tensor.shape)} {tensor.dtype}; the pipeline was told that "
                f"{list(self._shape)} {self._dtype} goes from stage to stage"
            )

    def send(self, result: Result, tensor: Tensor) -> None:
        """Give a result to the rank that needs it; returns at once."""
        receiver = self._schedule.receiver(result)
        if receiver == self._lanes.rank:
            self._here[result] = tensor
        else:
            tensor = tensor.contiguous()
            self._sent.append((result, self._lanes.send(tensor, receiver), tensor))

    def expect(self, result: Result) -> None:
        """Post the receives up to this one, so that it travels while the rank computes."""
        sender, _ = self._made[result]
        while sender != self._lanes.rank and result not in self._posted:
            coming = next(self._coming[sender])
            tensor = torch.empty(self._shape, dtype=self._dtype, device=self._device)
            self._posted[coming] = self._lanes.receive(tensor, sender), tensor

    def receive(self, result: Result) -> Tensor:
        """A result that this rank needs, as soon as it is there."""
        sender, place = self._made[result]
        if sender == self._lanes.rank:
            return self._here.pop(result)
        self.expect(result)
        work, tensor = self._posted.pop(result)
        work.wait()
        self._finish(lambda sent: self._schedule.receiver(sent) == sender and self._used[sent] <= place)
        return tensor

    def close(self) -> None:
        """Wait until all that was sent has arrived."""
        self._finish(lambda sent: True)

    def _finish(self, has_arrived: Callable[[Result], bool]) -> None:
        for result, work, _ in self._sent:
            if has_arrived(result):
                work.wait()
        self._sent = [sent for sent in self._sent if not has_arrived(sent[0])]

    def _from(self, sender: int) -> Iterator[Result]:
        """What the sender sends to this rank, in its order."""
        for action in self._schedule.actions[sender]:
            result = self._schedule.gives(sender, action)
            if result is not None and self._schedule.receiver(result) == self._lanes.rank:
                yield result
