"""Chapter 11: the time of each collective over a link that needs alpha + beta n seconds for a message of n bytes.

    N bytes, p ranks          time                                   every rank sends
    all_reduce, ring          2(p-1) (alpha + beta N/p)              2 (p-1)/p N
    all_reduce, tree          2 ceil(log2 p) (alpha + beta N)        up to ceil(log2 p) N (the root)
    all_reduce, switch        25 us + (1 + 1/p) N / switch           (1 + 1/p) N
    all_gather                (p-1) (alpha + beta N/p)               (p-1)/p N
    reduce_scatter            (p-1) (alpha + beta N/p)               (p-1)/p N
    broadcast, tree           ceil(log2 p) (alpha + beta N)          up to ceil(log2 p) N (the root)
    all_to_all                (p-1) (alpha + beta N/p)               (p-1)/p N
    send                      alpha + beta N                         N

N is the size of the full tensor: the argument of an all-reduce or a broadcast, the result of an all-gather, and each
rank's argument of a reduce-scatter or an all-to-all. We assume that additions are free, there is no other traffic, and
all ranks start together, so real collectives take longer. With a single rank, nothing is sent. (Hockney 1994; Thakur,
Rabenseifner and Gropp 2005, sections 3 and 4; Chan et al. 2007.)

With "switch", NVLink's switch does the additions (see `Link.switch`), so for many ranks, each of them only sends half
as much as in a ring. "fastest" is the ring or the switch, whichever takes less time.
"""

from typing import Literal

from tplab.collectives.by_hand import tree_depth
from tplab.collectives.links import Link

Algorithm = Literal["ring", "tree", "switch", "fastest"]


def all_reduce(link: Link, size: float, p: int, algorithm: Algorithm = "ring") -> float:
    """Return the time in seconds of an all-reduce of a tensor of `size` bytes over p ranks."""
    _check(size, p)
    if algorithm == "fastest":
        ways: list[Algorithm] = ["ring", "switch"] if link.switch else ["ring"]
        return min(all_reduce(link, size, p, way) for way in ways)
    if algorithm == "ring":
        return link.ring_all_reduce(size, p)
    if algorithm == "tree":
        return link.tree_all_reduce(size, p)
    if algorithm == "switch":
        return link.switch_all_reduce(size, p)
    raise ValueError(f"algorithm={algorithm!r} is none of 'ring', 'tree', 'switch' and 'fastest'")


def all_gather(link: Link, size: float, p: int) -> float:
    """Return the time in seconds of a ring all-gather whose result has `size` bytes."""
    _check(size, p)
    return (p - 1) * link.seconds(size / p)


def reduce_scatter(link: Link, size: float, p: int) -> float:
    """Return the time in seconds of a ring reduce-scatter of `size` bytes, which leaves 1/p of the sum on each rank."""
    _check(size, p)
    return (p - 1) * link.seconds(size / p)


def broadcast(link: Link, size: float, p: int) -> float:
    """Return the time in seconds to broadcast `size` bytes from one rank to all p ranks along a binomial tree."""
    _check(size, p)
    return tree_depth(p) * link.seconds(size)


def all_to_all(link: Link, size: float, p: int) -> float:
    """Return the time in seconds of an all-to-all in which each rank sends `size`/p bytes to each rank, one by one."""
    _check(size, p)
    return (p - 1) * link.seconds(size / p)


def send(link: Link, size: float, p: int = 2) -> float:
    """Return the time in seconds of a message of `size` bytes, or 0 if p is 1, because a single rank sends nothing."""
    _check(size, p)
    return link.seconds(size) if p > 1 else 0.0


def _check(size: float, p: int) -> None:
    if p < 1:
        raise ValueError(f"p={p} is no number of ranks")
    if size < 0:
        raise ValueError(f"a message can't have {size} bytes")
