"""Chapter 01: a ring all-reduce, recorded step by step, so that a picture can show what moved where.

The ranks run any function that takes a tensor and returns its sum over the ranks, such as the learner's own. They copy
every message they send. Rank r's tensor has p chunks, and all elements of chunk i are (i + 1) · 10^r. So the digits of
a message show which chunk it is and which ranks are in its sum. For example, 3303 is chunk 2, summed over ranks 0, 2
and 3.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tplab.collectives.by_hand import ring_all_reduce
from tplab.runtime import Deadlock, RankError, device, launch

AllReduce = Callable[[Tensor], Tensor]
ELEMENTS = 125  # elements per chunk, in float64, so that a message has 1,000 bytes
MOST_RANKS = 8  # the digits of a sum go up to p, and each rank needs its own color


class Message(NamedTuple):
    """A message in one step, in which rank `source` sends chunk `chunk`, summed over `ranks`, to rank `target`."""

    source: int
    target: int
    chunk: int
    ranks: frozenset[int]
    bytes: int


Held = tuple[tuple[frozenset[int], ...], ...]  # [rank][chunk]: the ranks in that rank's sum of that chunk


@dataclass(frozen=True)
class RingRun:
    """What the ranks of a ring all-reduce sent in each step, and what they had after it.

    name:      the function that ran, such as "your ring_all_reduce"
    size:      bytes of the tensor that every rank started with
    messages:  for each step, the messages in the order of their senders
    held:      what the ranks had before the first step and after each step. An incomplete sum moves on when it's sent,
               which leaves an empty set on its sender
    note:      why tplab's own ring ran instead of the requested function, or ""
    """

    name: str
    size: int
    messages: tuple[tuple[Message, ...], ...]
    held: tuple[Held, ...]
    note: str = ""


class _NotARingError(Exception):
    """Raised for a run that isn't an all-reduce around a ring. The message continues "because ring_all_reduce ..."."""


def record_ring(all_reduce: AllReduce, p: int) -> RingRun:
    """Run `all_reduce` on p ranks and return what each rank sent in each step.

    If the function fails, returns a wrong sum, or doesn't send one chunk per step to one neighbor, tplab's own ring
    runs instead, and `note` says why. Raises ValueError unless p is between 2 and 8.
    """
    if not 2 <= p <= MOST_RANKS:
        raise ValueError(f"a ring is recorded on 2 to {MOST_RANKS} ranks, got p={p}: each rank needs its own digit")
    name = getattr(all_reduce, "__name__", "the function")
    if getattr(all_reduce, "__module__", "") == "__main__":
        name = f"your {name}"
    elif all_reduce is ring_all_reduce:
        name = f"tplab's {name}"
    try:
        return _recorded(all_reduce, p, name)
    except (_NotARingError, RankError) as error:
        if all_reduce is ring_all_reduce:
            raise
        note = f"This is tplab's ring, because {name} {_what_is_wrong(error)}."
        return replace(_recorded(ring_all_reduce, p, "tplab's ring_all_reduce"), note=note)


def _what_is_wrong(error: Exception) -> str:
    if isinstance(error, Deadlock):
        return "got stuck"
    if not isinstance(error, RankError):
        return str(error)
    if error.cause_type == "NotImplementedError":
        return "isn't written yet"
    said = str(error.cause_message or "").strip().partition("\n")[0].rstrip(".")
    return f"failed with {error.cause_type} on rank {error.rank}" + f" ({said})" * bool(said)


def _recorded(all_reduce: AllReduce, p: int, name: str) -> RingRun:
    """Run the function. Raises RankError if a rank fails, and _NotARingError if the messages don't make up a ring."""
    ran = launch(_run, p, args=(all_reduce,))
    full = torch.stack([tensor_of(rank, p) for rank in range(p)]).sum(0)  # [p, ELEMENTS]
    for rank, (total, _) in enumerate(ran):
        if not (isinstance(total, Tensor) and total.shape == full.shape and torch.equal(total.double(), full)):
            raise _NotARingError(f"returned a wrong sum on rank {rank}")
    sent = [[_message(rank, target, value) for target, value in messages] for rank, (_, messages) in enumerate(ran)]
    for rank, own in enumerate(sent):
        if len(own) != 2 * (p - 1):
            raise _NotARingError(f"sent {len(own)} messages from rank {rank} and not 2(p-1) = {2 * (p - 1)}")
        if {message.target for message in own} != {(rank + _direction(sent)) % p}:
            raise _NotARingError(f"sent messages from rank {rank} to other ranks than one neighbor")
    steps = tuple(zip(*sent, strict=True))
    return RingRun(name, full.numel() * full.element_size(), steps, tuple(_held(steps, p)))


def _direction(sent: Sequence[Sequence[Message]]) -> int:
    """Return 1 if rank 0 sends to the right, and -1 if it sends to the left."""
    return 1 if sent[0][0].target == 1 else -1


def _message(source: int, target: int, value: Tensor) -> Message:
    digits = str(round(value.flatten()[0].item())) if value.numel() else ""
    ranks = frozenset(rank for rank, digit in enumerate(reversed(digits)) if digit != "0")
    kinds = set(digits) - {"0"}
    if len(kinds) != 1 or value.numel() != ELEMENTS or (value != value.flatten()[0]).any():
        raise _NotARingError(f"sent a message from rank {source} that isn't exactly one chunk")
    return Message(source, target, int(kinds.pop()) - 1, ranks, value.numel() * value.element_size())


def _held(steps: Sequence[Sequence[Message]], p: int) -> Iterator[Held]:
    """Yield what the ranks have before the first step and after each step.

    A rank adds its own values to what it receives. We see this sum only when the rank sends it, in the next step.
    """
    complete = frozenset(range(p))
    held = [[frozenset({rank})] * p for rank in range(p)]
    for step in range(len(steps) + 1):
        for message in steps[step - 1] if step else ():
            if message.ranks != complete:
                held[message.source][message.chunk] = frozenset()
        for message in steps[step - 1] if step else ():
            held[message.target][message.chunk] = message.ranks
        for message in steps[step] if step < len(steps) else ():
            held[message.source][message.chunk] = message.ranks
        yield tuple(map(tuple, held))


# On each rank


def tensor_of(rank: int, p: int) -> Tensor:
    """Return a rank's tensor [p, ELEMENTS], in which all elements of chunk i are (i + 1) · 10^rank."""
    chunks = torch.arange(1, p + 1, dtype=torch.float64) * 10.0**rank  # [p]; float64 is exact up to 15 digits
    return chunks.unsqueeze(1).repeat(1, ELEMENTS)


def _run(all_reduce: AllReduce) -> tuple[Any, list[tuple[int, Tensor]]]:
    x = tensor_of(dist.get_rank(), dist.get_world_size()).to(device())
    with _copies_of_messages() as sent:
        total = all_reduce(x)
    return total, [(target, value.cpu()) for target, value in sent]


@contextmanager
def _copies_of_messages() -> Iterator[list[tuple[int, Tensor]]]:
    """Context manager that yields a list, to which it adds (receiver, copy) for every message that this rank sends."""
    sent: list[tuple[int, Tensor]] = []
    original = ProcessGroup.send

    def send(group: ProcessGroup, tensors: list[Tensor], target: int, *args: Any) -> Any:
        sent.append((dist.get_global_rank(group, target), tensors[0].detach().clone()))
        return original(group, tensors, target, *args)

    ProcessGroup.send = send  # type: ignore[method-assign, assignment]
    try:
        yield sent
    finally:
        ProcessGroup.send = original  # type: ignore[method-assign]
