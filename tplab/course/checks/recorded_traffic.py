"""One rank's traffic, in a form that checks can compare with the expected traffic.

A rank's traffic is the list of collectives that it entered. Checks compare the kind, size, dtype, and group of
each collective, and they require that something waited for the collective to complete. Checks ignore where and when a
rank called a collective.

with record() as section:
    y = layer(x)
traffic(section) == Traffic.expected(p, ("all_reduce", 96))
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from tplab.runtime import Collective


class CollectiveCall(NamedTuple):
    """The properties by which checks compare collective calls.

    numel:  number of elements in the message, as nccl-tests counts them. For all_reduce, broadcast, reduce, send and
            recv, it's the size of the tensor. For all_gather, gather, scatter, reduce_scatter and all_to_all, it's the
            total size of all parts.
    waited: whether anything waited for the collective to complete.
    """

    kind: str
    numel: int
    dtype: str
    group: tuple[int, ...]
    waited: bool = True


class Traffic(tuple[CollectiveCall, ...]):
    """The collectives that one rank entered.

    Two `Traffic` objects are equal if they contain the same calls, regardless of order. `traffic` and
    `Traffic.expected` leave out collectives in groups with only one rank, because these collectives transfer nothing.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Traffic) and Counter(self) == Counter(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __reduce__(self) -> tuple[Any, ...]:
        return Traffic, (tuple(self),)

    def __str__(self) -> str:
        return _in_words(Counter(self)) or "none"

    __repr__ = __str__

    @staticmethod
    def expected(
        p: int, *calls: tuple[str, int], dtype: str = "float64", group: Iterable[int] | None = None
    ) -> "Traffic":
        """Return the traffic that a check expects on a rank, as in `Traffic.expected(p, ("all_reduce", 96))`.

        A group with only one rank generates no traffic.
        """
        members = tuple(range(p)) if group is None else tuple(group)
        return (
            Traffic(CollectiveCall(kind, numel, dtype, members) for kind, numel in calls)
            if len(members) > 1
            else Traffic()
        )


def traffic(section: Iterable[Collective]) -> Traffic:
    """Return the traffic of a `record()` section, or of any other sequence of collectives that one rank entered."""
    return Traffic(
        CollectiveCall(c.kind, _elements(c), c.dtype, tuple(c.group), c.end is not None)
        for c in section
        if len(c.group) > 1
    )


def _elements(collective: Collective) -> int:
    if not collective.dtype:
        return 0
    return collective.bytes // torch.empty((), dtype=getattr(torch, collective.dtype)).element_size()


def _in_words(calls: Counter[CollectiveCall]) -> str:
    """Describe the calls in words, and count identical calls, as in "2 all_reduces of 96 elements (float64)"."""
    groups = {call.group for call in calls}
    texts = []
    for call, count in sorted(calls.items()):
        kind = call.kind + "s" * (count > 1)
        text = f"{count} {kind}" + (f" of {call.numel} elements ({call.dtype})" if call.dtype else "")
        if len(groups) > 1:
            message = call.kind in ("send", "recv")
            text += " from rank {} to rank {}".format(*call.group) if message else f" among ranks {list(call.group)}"
        if not call.waited:
            text += ", started but never waited for"
        texts.append(text)
    return ", ".join(texts)
