"""Pictures of what runs returned, and controls that change them.

Everything here draws what other modules computed, and computes nothing itself. The functions, with their file in
parentheses where it has another name:

    matrices                     small tensors with their numbers
    split                        a tensor split into one shard per rank
    product                      XA = [XA_1, XA_2] and XA = X_1 A_1 + X_2 A_2 in blocks
    traffic                      calls and bytes of every rank
    timeline                     when each rank computed, and when it was in which collective
    curves                       losses over steps
    training                     a run: loss and tokens/s over its steps
    compared (training)          the losses of two runs in one chart, and the difference between them
    scaling (training)           how much faster it goes on more ranks
    table                        results in rows and columns
    collective (collectives)     the data of each rank before a collective and after it
    ring (collectives)           what moves around a ring, step by step
    times                        seconds over bytes: measured points and lines, on logarithmic axes
    heads                        the attention heads on each rank, with the heads of K and V below its queries
    layouts                      what each rank has from step to step: some tokens, some columns, a term of a sum
    saved_activations            what autograd saves for a layer, part by part
    bill (memory)                what a GPU has to store, part by part, beside its memory
    live_memory (memory)         how much memory was in use at each moment of a run
    parallelism (parallelisms)   data, tensor or pipeline parallelism: what each rank has, sends, and when it waits
    lookup                       a look-up in a table sharded by rows: what each rank finds, its zeros, the sum
    masks                        the positions that every rank's dropout keeps
    layer                        a transformer layer on p ranks, and what its four operators sent
    schedule                     what every rank of a pipeline does when, and where it waits
    softmax                      one token's softmax, put together from the ranks' columns
    overlap                      two lanes per rank: when it computed, and when a collective was in flight
    time_bars (costs)            where the time goes, part by part
    against (costs)              a model's figures beside published ones
    mesh                         for each axis of a mesh, which ranks form a group
    program                      the steps of a program, and where ranks communicate
    explore (controls)           a function behind sliders

A rank has the same color everywhere (colorblind-safe), with its number beside it. Every function returns a
`Picture`, a matplotlib Figure that a notebook shows when it is a cell's last line.
"""

import warnings
from typing import Any

from tplab.viz.collectives import collective, ring
from tplab.viz.colors import Picture, rank_colors
from tplab.viz.controls import explore
from tplab.viz.costs import against, time_bars
from tplab.viz.curves import curves
from tplab.viz.heads import heads
from tplab.viz.layer import layer
from tplab.viz.layouts import layouts
from tplab.viz.lookup import lookup
from tplab.viz.masks import masks
from tplab.viz.matrices import matrices
from tplab.viz.memory import bill, live_memory
from tplab.viz.mesh import mesh
from tplab.viz.overlap import overlap
from tplab.viz.parallelisms import parallelism
from tplab.viz.product import product
from tplab.viz.program import program
from tplab.viz.saved_activations import saved_activations
from tplab.viz.schedule import schedule
from tplab.viz.softmax import softmax
from tplab.viz.split import split
from tplab.viz.table import table
from tplab.viz.timeline import timeline
from tplab.viz.times import times
from tplab.viz.traffic import traffic
from tplab.viz.training import compared, scaling, training

__all__ = [
    "Picture",
    "against",
    "bill",
    "collective",
    "compared",
    "curves",
    "explore",
    "heads",
    "layouts",
    "saved_activations",
    "layer",
    "live_memory",
    "lookup",
    "masks",
    "matrices",
    "mesh",
    "overlap",
    "parallelism",
    "product",
    "program",
    "rank_colors",
    "ring",
    "scaling",
    "schedule",
    "softmax",
    "split",
    "table",
    "time_bars",
    "timeline",
    "times",
    "traffic",
    "training",
]


def __getattr__(name: str) -> Any:
    """Support the names that two pictures had before 0.2; notebooks that draw them keep working until 0.3."""
    renamed = {"held": "layouts", "kept": "saved_activations"}
    if name not in renamed:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    new = renamed[name]
    warnings.warn(f"viz.{name} is now viz.{new}; the old name goes away in tplab 0.3", DeprecationWarning, stacklevel=2)
    return globals()[new]
