"""Chapter 11: how long each collective takes over a link that needs alpha + beta n seconds for a message of n bytes.

    N bytes, p ranks          time                                   every rank sends
    all_reduce, ring          2(p-1) (alpha + beta N/p)              2 (p-1)/p N
    all_reduce, tree          2 ceil(log2 p) (alpha + beta N)        up to ceil(log2 p) N, the root
    all_gather                (p-1) (alpha + beta N/p)               (p-1)/p N
    reduce_scatter            (p-1) (alpha + beta N/p)               (p-1)/p N
    broadcast, tree           ceil(log2 p) (alpha + beta N)          up to ceil(log2 p) N, the root
    all_to_all                (p-1) (alpha + beta N/p)               (p-1)/p N
    send                      alpha + beta N                         N

N is the whole: the tensor that an all-reduce or a broadcast is called with, what an all-gather returns, what a
reduce-scatter or an all-to-all takes in on each rank. The additions cost nothing, every link is free, and all ranks
begin at once: real collectives take longer. With one rank nothing is sent.
(Hockney 1994; Thakur, Rabenseifner and Gropp 2005, sections 3 and 4; Chan et al. 2007.)
"""

from collections.abc import Callable
from typing import Literal

from tplab.collectives.by_hand import tree_depth
from tplab.collectives.links import Link

Algorithm = Literal["ring", "tree"]


def all_reduce(link: Link, size: float, p: int, algorithm: Algorithm = "ring") -> float:
    """Seconds of an all-reduce of a tensor of `size` bytes over p ranks."""
    _check(size, p)
    if algorithm not in ("ring", "tree"):
        raise ValueError(f"algorithm={algorithm!r} is neither 'ring' nor 'tree'")
    return link.ring_all_reduce(size, p) if algorithm == "ring" else link.tree_all_reduce(size, p)


def all_gather(link: Link, size: float, p: int) -> float:
    """Seconds of an all-gather in a ring after which every rank has `size` bytes."""
    _check(size, p)
    return (p - 1) * link.seconds(size / p)


def reduce_scatter(link: Link, size: float, p: int) -> float:
    """Seconds of a reduce-scatter in a ring of `size` bytes, of which every rank gets 1/p."""
    _check(size, p)
    return (p - 1) * link.seconds(size / p)


def broadcast(link: Link, size: float, p: int) -> float:
    """Seconds until all p ranks have the `size` bytes of one, along a binomial tree."""
    _check(size, p)
    return tree_depth(p) * link.seconds(size)


def all_to_all(link: Link, size: float, p: int) -> float:
    """Seconds in which every rank sends each other one its part of `size` bytes, one partner after the other."""
    _check(size, p)
    return (p - 1) * link.seconds(size / p)


def send(link: Link, size: float, p: int = 2) -> float:
    """Seconds of a message of `size` bytes; p, as the others have it, is 2 (or 1: nothing to send)."""
    _check(size, p)
    return link.seconds(size) if p > 1 else 0.0


COLLECTIVES: dict[str, Callable[[Link, float, int], float]] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "broadcast": broadcast,
    "all_to_all": all_to_all,
    "send": send,
}


def _check(size: float, p: int) -> None:
    if p < 1:
        raise ValueError(f"p={p} is no number of ranks")
    if size < 0:
        raise ValueError(f"a message can't have {size} bytes")
