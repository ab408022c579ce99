"""Chapter 01: collectives built from send and receive, and what a message costs.

by_hand    scatter, gather, and all-reduce as a ring and as a tree
examples   each of torch's collectives, called once, on values that show which rank they came from
links      message time modeled as alpha + beta · bytes, with measured and published values
ring_run   what each rank of a ring all-reduce sent, step by step
subgroups  split a process group without involving the other ranks of the run
"""

from tplab.collectives.by_hand import (
    all_gather_steps,
    chunk_sizes,
    exchange,
    gather,
    rank_and_size,
    reduce_scatter_steps,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    scatter,
    tree_all_reduce,
    tree_depth,
)
from tplab.collectives.examples import EXAMPLES, my_numbers
from tplab.collectives.links import PUBLISHED, SIZES, Link, fit, measure_link
from tplab.collectives.ring_run import RingRun, record_ring

__all__ = [
    "EXAMPLES",
    "PUBLISHED",
    "SIZES",
    "Link",
    "RingRun",
    "all_gather_steps",
    "chunk_sizes",
    "exchange",
    "fit",
    "gather",
    "measure_link",
    "my_numbers",
    "rank_and_size",
    "record_ring",
    "reduce_scatter_steps",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_reduce_scatter",
    "scatter",
    "tree_all_reduce",
    "tree_depth",
]
