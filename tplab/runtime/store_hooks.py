"""Hooks that show on the board (see `board`) when a rank waits for a key in a store, as in `store.wait(["ready"])`.

A store holds keys and values that all ranks can read. Nothing says which rank will set a key. So the rank can continue
as long as at least one other rank can still act. The same is true of a TCPStore that waits for its other processes.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tplab.runtime.board import STORE
from tplab.runtime.recorder import Recorder

_NEVER = 99  # the call takes no time limit. That of the store applies
_LIMIT_AT = {"get": _NEVER, "multi_get": _NEVER, "wait": 1, "queue_pop": _NEVER, "barrier": 2}  # which argument it is
_ENDLESS = timedelta(minutes=5)  # torch's default. A program that sets a shorter limit may count on the error
_SHOWN = 120  # how many characters of the keys are shown

Active = Callable[[], Recorder | None]


def _wrap(name: str, limit_at: int, active: Active) -> Callable[..., Any]:
    original = getattr(dist.Store, name)

    def method(self: dist.Store, *args: Any, **kwargs: Any) -> Any:
        recorder = active()
        limit = _limit(limit_at, args, kwargs) or self.timeout  # type: ignore[attr-defined]
        if recorder is None or limit < _ENDLESS:
            return original(self, *args, **kwargs)
        if recorder.shows_wait_of_this_thread:  # it's in new_group, for example, which waits in a store
            return original(self, *args, **kwargs)
        with _shown(recorder, name, _keys(args[0] if args else kwargs["key"])):
            return original(self, *args, **kwargs)

    return method


def _wrap_tcp_store(active: Active) -> Callable[..., Any]:
    original = dist.TCPStore.__init__

    def __init__(self: dist.TCPStore, *args: Any, **kwargs: Any) -> None:  # noqa: N807 (it replaces this method)
        recorder = active()
        if recorder is None or (_limit(4, args, kwargs) or _ENDLESS) < _ENDLESS:
            return original(self, *args, **kwargs)
        host, port, *_ = (*args, kwargs.get("host_name"), kwargs.get("port"))
        with _shown(recorder, "TCPStore", f"the other processes at {host}:{port}"):
            return original(self, *args, **kwargs)

    return __init__


def _limit(at: int, args: Sequence[Any], kwargs: dict[str, Any]) -> timedelta | None:
    return args[at] if len(args) > at else kwargs.get("timeout")


def _shown(recorder: Recorder, name: str, awaited: str) -> AbstractContextManager[None]:
    """Return a context manager that shows the wait on the board while the call is running."""
    world, channel = tuple(range(dist.get_world_size())), f"{STORE}{recorder.rank}"
    return recorder.blocked_in(recorder.enter_call(f"{STORE}{name}", channel, awaited[:_SHOWN], world, ()))


def _keys(given: str | Sequence[str]) -> str:
    keys = [given] if isinstance(given, str) else list(given)
    return f"key{'' if len(keys) == 1 else 's'} {', '.join(map(ascii, keys))}"


def install(active: Active) -> None:
    """Install the wrappers. While `active()` returns None, they only forward calls."""
    for name, limit_at in _LIMIT_AT.items():
        if hasattr(dist.Store, name):  # some exist only in newer versions of torch
            setattr(dist.Store, name, _wrap(name, limit_at, active))
    dist.TCPStore.__init__ = _wrap_tcp_store(active)  # type: ignore[method-assign]
