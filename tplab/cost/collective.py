"""Chapter 11: the time of each collective over a link that needs alpha + beta n seconds for a message of n bytes.

    N bytes, p ranks          time                                   every rank sends
    all_reduce, ring          2(p-1) (alpha + beta N/p)              2 (p-1)/p N
    all_reduce, tree          2 ceil(log2 p) (alpha + beta N)        up to ceil(log2 p) N, the root
    all_gather                (p-1) (alpha + beta N/p)               (p-1)/p N
    reduce_scatter            (p-1) (alpha + beta N/p)               (p-1)/p N
    broadcast, tree           ceil(log2 p) (alpha + beta N)          up to ceil(log2 p) N, the root
    all_to_all                (p-1) (alpha + beta N/p)               (p-1)/p N
    send                      alpha + beta N                         N

N is the full tensor: the argument of an all-reduce or a broadcast, the result of an all-gather, and each rank's
argument of a reduce-scatter or an all-to-all. We assume that additions are free, every link is idle, and all ranks
start together, so real collectives take longer. With a single rank, nothing is sent.
(Hockney 1994; Thakur, Rabenseifner and Gropp 2005, sections 3 and 4; Chan et al. 2007.)
"""

from collections.abc import Callable
from typing import Literal

from tplab.collectives.by_hand import tree_depth
from tplab.collectives.links import Link

Algorithm = Literal["ring", "tree"]


def all_reduce(link: Link, size: float, p: int, algorithm: Algorithm = "ring") -> float:
    """Seconds for an all-reduce of a tensor of `size` bytes over p ranks."""
    _check(size, p)
    if algorithm not in ("ring", "tree"):
        raise ValueError(f"algorithm={algorithm!r} is neither 'ring' nor 'tree'")
    return link.ring_all_reduce(size, p) if algorithm == "ring" else link.tree_all_reduce(size, p)


def all_gather(link: Link, size: float, p: int) -> float:
    """Seconds for a ring all-gather after which every rank has `size` bytes."""
    _check(size, p)
    return (p - 1) * link.seconds(size / p)


def reduce_scatter(link: Link, size: float, p: int) -> float:
    """Seconds for a ring reduce-scatter of `size` bytes, of which every rank gets 1/p."""
    _check(size, p)
    return (p - 1) * link.seconds(size / p)


def broadcast(link: Link, size: float, p: int) -> float:
    """Seconds until all p ranks have the `size` bytes of one rank, along a binomial tree."""
    _check(size, p)
    return tree_depth(p) * link.seconds(size)


def all_to_all(link: Link, size: float, p: int) -> float:
    """Seconds for an all-to-all in which every rank sends out `size` bytes, 1/p to each rank, one partner at a time."""
    _check(size, p)
    return (p - 1) * link.seconds(size / p)


def send(link: Link, size: float, p: int = 2) -> float:
    """Seconds for a message of `size` bytes. p matches the collectives' argument: 2, or 1 if nothing is sent."""
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
