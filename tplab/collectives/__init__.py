"""Chapter 01: collectives built from send and receive, and what a message costs.

by_hand    all-reduce as a ring and as a tree
examples   each of torch's collectives, called once, on values that show which rank they came from
links      message time modeled as alpha + beta · bytes, with measured and published values
ring_run   what each rank of a ring all-reduce sent, step by step
subgroups  split a process group without involving the other ranks of the run
"""

from tplab.collectives.by_hand import (
    reduce_scatter_steps,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    tree_all_reduce,
)
from tplab.collectives.examples import EXAMPLES
from tplab.collectives.links import Link
from tplab.collectives.ring_run import RingRun, record_ring

__all__ = [
    "EXAMPLES",
    "Link",
    "RingRun",
    "record_ring",
    "reduce_scatter_steps",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_reduce_scatter",
    "tree_all_reduce",
]
