"""NCCL's rules for messages, for ranks that are threads of this process: what a GPU would do, without one.

    a connection blocks the CPU     the first message from one rank to another returns only when both have posted it
    messages run in order           a rank's messages in one direction start in the order in which it posted them
    wait() waits                    for the message. On a GPU it only holds up what the rank posts later, so a run that
                                    gets through here gets through there, too

A run in which all ranks are blocked is stuck. Both rules are read from source code, and neither was checked on a GPU:

    PyTorch 2.11, ProcessGroupNCCL.cpp, pointToPoint()    a group with a `device_id`, as `launch` sets it, has a single
                                                          communicator and stream for all messages outside a batch
    NCCL, group.cc, ncclGroupEnd()                        the first message to a peer waits for a thread that sets up
                                                          the transport together with the peer
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from tplab.pipeline.p2p import Channels

Connection = tuple[int, int]  # sender, receiver: the direction is part of it


class StuckError(Exception):
    """All ranks that haven't returned are blocked."""


@dataclass
class Message:
    """One side of a message, as a rank has posted it; the `Work` that the rank gets."""

    network: "Network"
    connection: Connection
    sends: bool
    tensor: Tensor
    done: bool = False

    def wait(self) -> None:
        self.network.block_until(lambda: self.done)


@dataclass
class Network:
    """The connections among ranks 0 .. p - 1, and the messages that each rank has posted."""

    p: int
    knocking: set[tuple[Connection, bool]] = field(default_factory=set)
    posted: dict[tuple[int, bool], list[Message]] = field(default_factory=dict)  # by rank and direction
    blocked: int = 0  # ranks that have looked since the last change, and wait
    left: int = 0
    changes: int = 0
    stuck: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)

    def post(self, rank: int, connection: Connection, sends: bool, tensor: Tensor) -> Message:
        """Post one side of a message. The first one of a connection waits for the other side."""
        with self.changed:
            self.knocking.add((connection, sends))
            self._announce()
        self.block_until(lambda: (connection, not sends) in self.knocking)
        message = Message(self, connection, sends, tensor)
        with self.changed:
            upward = connection[1] > connection[0]
            self.posted.setdefault((rank, upward), []).append(message)
            self._deliver()
        return message

    def block_until(self, ready: Callable[[], bool]) -> None:
        with self.changed:
            while not ready():
                seen = self.changes
                self.blocked += 1
                self._check()
                self.changed.wait_for(lambda seen=seen: self.changes != seen or self.stuck)
                self._check()

    def leave(self) -> None:
        """A rank has returned, so the others can't wait for it."""
        with self.changed:
            self.left += 1
            with suppress(StuckError):
                self._check()

    def _check(self) -> None:
        if self.blocked and self.blocked + self.left == self.p:
            self.stuck = True
            self.changed.notify_all()
        if self.stuck:
            raise StuckError

    def _announce(self) -> None:
        """Have every blocked rank look again."""
        self.changes += 1
        self.blocked = 0
        self.changed.notify_all()

    def _deliver(self) -> None:
        """Carry every message whose two sides are both the next in their queues."""
        moved = True
        while moved:
            moved = False
            for queue in list(self.posted.values()):
                first = queue[0] if queue else None
                if first is None or not first.sends:
                    continue
                sender, receiver = first.connection
                theirs = self.posted.get((receiver, receiver > sender), [])
                if theirs and not theirs[0].sends and theirs[0].connection == first.connection:
                    theirs[0].tensor.copy_(first.tensor)
                    first.done = theirs[0].done = moved = True
                    queue.pop(0), theirs.pop(0)
                    self._announce()


class SimulatedChannels(Channels):
    """The channels of one simulated rank."""

    def __init__(self, network: Network, rank: int) -> None:
        self.network, self.rank, self.world_size, self.ends = network, rank, network.p, None

    def send(self, tensor: Tensor, receiver: int) -> dist.Work:
        return self.network.post(self.rank, (self.rank, receiver), True, tensor)

    def receive(self, tensor: Tensor, sender: int) -> dist.Work:
        return self.network.post(self.rank, (sender, self.rank), False, tensor)


def run(p: int, program: Callable[[SimulatedChannels], None]) -> bool:
    """Run the program on p simulated ranks. Returns whether all of them got through; raises what one of them raised."""
    network, stuck, errors = Network(p), [], []

    def rank(number: int) -> None:
        try:
            program(SimulatedChannels(network, number))
        except StuckError:
            stuck.append(number)
            return
        except Exception as error:
            errors.append(error)
        network.leave()

    threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(p)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return not stuck
