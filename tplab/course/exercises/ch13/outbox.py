"""The check of exercise 13.4, an outbox that sends from one buffer.

The check gives the outbox an `Adversary` in place of its channels. The adversary sends a copy of each tensor, and when
the outbox waits for the send, the adversary compares the tensor with this copy, as `late` does. But `late` raises an
error, while the adversary delivers the right message anyway, so every rank gets to the end and the check can tell when
the buffer was touched. This finds an outbox that writes too early on every machine, even if the message had already
left.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tplab.course.checks.cases import Case, Place, random_tensor
from tplab.course.checks.observation import Claim, Observed
from tplab.course.checks.recorded_traffic import CollectiveCall, Traffic, traffic
from tplab.course.checks.run_answer import called_as
from tplab.course.checks.trials import OnRanks, exercise
from tplab.pipeline.p2p import Channels
from tplab.runtime import device, record

EARLY = "the buffer stays as it is while it's being sent"
TIDY = "send leaves the buffer alone once it has started to send"
CALLER = "the caller may overwrite a message after send returns"
ONE_BUFFER = "every message leaves from the buffer"
WAITED = "after wait(), everything has been sent"
COUNT, SIZE = 3, 6


@dataclass
class Request:
    """What `Adversary.send` returns: the backend's request, the tensor, and a copy of its values at the start."""

    work: Any
    tensor: Tensor
    copy: Tensor
    waited: bool = False
    changed: bool = False

    def look(self) -> bool:
        """Return whether the tensor has changed since the send was started."""
        self.changed = self.changed or not torch.equal(self.tensor, self.copy)
        return self.changed

    def wait(self, *options: Any) -> bool:
        if not self.waited:
            self.look()
            self.work.wait(*options)
            self.waited = True
        return True

    def is_completed(self) -> bool:
        return self.waited


@dataclass
class Adversary:
    """Channels that notice if a tensor changes before the sender has waited for its request."""

    channels: Channels
    requests: list[Request] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return self.channels.rank

    @property
    def world_size(self) -> int:
        return self.channels.world_size

    def send(self, tensor: Tensor, receiver: int) -> Request:
        copy = tensor.detach().clone()
        self.requests.append(Request(self.channels.send(copy, receiver), tensor, copy))
        return self.requests[-1]

    def receive(self, tensor: Tensor, sender: int) -> Any:
        return self.channels.receive(tensor, sender)


@dataclass(frozen=True)
class Exchange(Case):
    """Messages between neighbors.

    both:   whether every rank sends to both of its neighbors, or only to the next one
    rounds: how often there are messages, followed by wait()
    """

    note: str = ""
    both: bool = True
    rounds: int = 1

    def describe(self, name: str) -> str:
        return self.note


CASES = (
    Exchange("when neighbors send to each other"),
    Exchange("when every rank sends to the next one", both=False),
    Exchange("when it's used again after wait()", rounds=2),
)


@cache
def channels() -> Channels:
    return Channels()


def draw(case: Exchange, generator: torch.Generator, size: int) -> Tensor:
    return random_tensor(generator, size, case.rounds * COUNT, SIZE)


def neighbors(case: Exchange, rank: int, size: int) -> tuple[list[int], list[int]]:
    """Return the ranks that this rank sends to, and those that it receives from."""
    lower = [rank - 1] if rank > 0 else []
    higher = [rank + 1] if rank < size - 1 else []
    return (lower + higher if case.both else higher), (lower + higher if case.both else lower)


def run(outbox: Callable[..., Any], case: Exchange, given: Tensor, group: Any) -> Observed:
    rank, size = dist.get_rank(), dist.get_world_size()
    adversary = Adversary(channels())
    template = torch.zeros(SIZE, dtype=case.dtype, device=device())
    receivers, senders = neighbors(case, rank, size)
    found: list[Tensor] = []
    touched = shared = False
    with record() as section, called_as("Outbox(channels, receiver, template)"):
        boxes = [outbox(adversary, receiver, template) for receiver in receivers]
        for box in boxes:
            box.wait()
        for first in range(0, case.rounds * COUNT, COUNT):
            for number in range(first, first + COUNT):
                for box in boxes:
                    message = given[rank, number].to(device()).clone()
                    box.send(message)
                    touched |= any(request.look() for request in adversary.requests[-1:])
                    message.fill_(torch.nan)  # the caller reuses it
                    shared |= not touched and any(request.look() for request in adversary.requests[-1:])
                for sender in senders:
                    tensor = torch.empty_like(template)
                    adversary.receive(tensor, sender).wait()
                    found.append(tensor)
            for box in boxes:
                box.wait()
        waited = [request.waited for request in adversary.requests]
        for request in adversary.requests:
            request.wait()
    early = sum(request.changed for request in adversary.requests)
    buffers = {request.tensor.data_ptr() for request in adversary.requests}
    return {
        "received": torch.stack(found) if found else None,
        "sent": torch.stack([request.copy for request in adversary.requests]) if adversary.requests else None,
        "traffic": traffic(section),
        EARLY: Claim(f"{early} of {len(waited)} messages changed while they were being sent" if early else ""),
        TIDY: Claim("it changed" if touched else ""),
        CALLER: Claim("what's sent changed with it" if shared else ""),
        ONE_BUFFER: Claim(f"{len(buffers)} tensors were sent" if len(buffers) > len(boxes) else ""),
        WAITED: Claim("" if all(waited) else f"{waited.count(False)} of {len(waited)} messages weren't waited for"),
        "the template is as it was": Claim("" if not template.any() else "something was written into it"),
    }


def right(case: Exchange, sent: Tensor, place: Place) -> Observed:
    receivers, senders = neighbors(case, place.index, place.size)
    found = [sent[sender, number] for number in range(case.rounds * COUNT) for sender in senders]
    own = [sent[place.index, number] for number in range(case.rounds * COUNT) for _ in receivers]
    calls = [("send", (place.index, other)) for other in receivers] + [
        ("recv", (other, place.index)) for other in senders]  # fmt: skip
    return {
        "received": torch.stack(found) if found else None,
        "sent": torch.stack(own) if own else None,
        "traffic": Traffic(CollectiveCall(kind, SIZE, "float64", pair) for kind, pair in calls * (case.rounds * COUNT)),
    }


exercise(
    "13.4", "Fix it: too tidy", takes=["Outbox"],
    trials=[OnRanks(cases=CASES, draw=draw, run=run, right=right, world_sizes=(2, 4), late=True)],
    passed="Every message arrives with its original values, and the outbox needs no memory besides its buffer.",
)  # fmt: skip
