"""Chapter 11: the time of each collective over a link that needs alpha + beta n seconds for a message of n bytes.

    N bytes, p ranks          time                                   every rank sends
    all_reduce, ring          2(p-1) (alpha + beta N/p)              2 (p-1)/p N
    all_reduce, tree          2 ceil(log2 p) (alpha + beta N)        up to ceil(log2 p) N (the root)
    all_reduce, switch        25 us + (1 + 1/p) N / switch           (1 + 1/p) N
    all_gather                (p-1) (alpha + beta N/p)               (p-1)/p N
    reduce_scatter            (p-1) (alpha + beta N/p)               (p-1)/p N

N is the size of the full tensor: the argument of an all-reduce, the result of an all-gather, and each rank's argument
of a reduce-scatter. We assume that additions are free, there is no other traffic, and all ranks start together, so real
collectives take longer. With a single rank, nothing is sent. (Hockney 1994; Thakur, Rabenseifner and Gropp 2005,
sections 3 and 4; Chan et al. 2007.)

With "switch", NVLink's switch does the additions (see `Link.switch`), so for many ranks, each of them only sends half
as much as in a ring. "fastest" is the ring or the switch, whichever takes less time.
"""

from typing import Literal

from tplab.collectives.links import Link

Algorithm = Literal["ring", "tree", "switch", "fastest"]


def all_reduce(link: Link, size: float, p: int, algorithm: Algorithm = "ring") -> float:
    """Return the time in seconds of an all-reduce of a tensor of `size` bytes over p ranks."""
    if algorithm == "fastest":
        ring = link.ring_all_reduce(size, p)
        return min(ring, link.switch_all_reduce(size, p)) if link.switch else ring
    ways = {"ring": link.ring_all_reduce, "tree": link.tree_all_reduce, "switch": link.switch_all_reduce}
    if algorithm not in ways:
        raise ValueError(f"algorithm={algorithm!r} is none of {', '.join(ways)} and fastest")
    return ways[algorithm](size, p)


def all_gather(link: Link, size: float, p: int) -> float:
    """Return the time in seconds of a ring all-gather whose result has `size` bytes."""
    return (p - 1) * link.seconds(size / p)


def reduce_scatter(link: Link, size: float, p: int) -> float:
    """Return the time in seconds of a ring reduce-scatter of `size` bytes, which leaves 1/p of the sum on each rank."""
    return (p - 1) * link.seconds(size / p)
