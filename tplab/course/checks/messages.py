"""Watch the messages that an answer starts, and keep them from disturbing whatever runs after the answer.

torch may drop a message as soon as the program throws away its request, so whether the other side gets the message
depends on timing. If only one side posts its send or receive, that operation is matched with one of the next case or
answer.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from tplab.course.checks.observation import side_group
from tplab.runtime import Collective, device
from tplab.runtime.recorder import Recorder

unnamed: list[str] = []  # the receives of the running answer that don't name their sender
_kept: list[Any] = []  # the requests of this rank's messages that may not have arrived yet


@contextmanager
def messages_kept() -> Iterator[None]:
    """Context manager that keeps the request of every message until the message has arrived or the launch ends.

    It wraps the recorder instead of torch, because reports show the line that called torch.
    """
    original = Recorder.started
    unnamed.clear()

    def started(recorder: Recorder, entered: Any, request: Any) -> None:
        original(recorder, entered, request)
        if entered.tag is not None:  # the recorder remembers the tag until it knows the sender
            unnamed.append(entered.known.kind)
        _kept[:] = [each for each in _kept if not each.is_completed()]
        if request is not None and entered.known.kind in ("send", "recv"):
            _kept.append(request)

    Recorder.started = started  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Recorder.started = original  # type: ignore[method-assign]


def one_sided(section: Iterable[Collective]) -> bool:
    """Return whether any rank started a message that its partner didn't, so that a later message may get mixed up.

    Every rank has to call this function with the record of the same section of the program. All ranks get the same
    result.
    """
    group = side_group()
    if group is None:
        return False
    rank, p = dist.get_rank(), dist.get_world_size()
    balance = torch.zeros(p, p, dtype=torch.int64, device=device())  # sends minus receives, by sender and receiver
    for call in section:
        if call.kind == "send":
            balance[rank, call.peer] += 1
        elif call.kind == "recv":
            sender = rank if call.peer is None else call.peer  # None if it may come from any rank and hasn't come yet
            balance[sender, rank] -= 1
    dist.all_reduce(balance, group=group)
    return bool(balance.any())
