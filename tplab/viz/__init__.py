"""Pictures of the results of runs, and controls for these pictures.

The functions here only draw what other modules computed. If a function is in a file with a different name, the list
shows that name in parentheses:

    matrices                     small tensors with their values
    split                        a tensor split into one shard per rank
    product                      XA = [XA_1, XA_2] and XA = X_1 A_1 + X_2 A_2 in blocks
    traffic                      calls and bytes of every rank
    timeline                     when each rank computed, and when it was in which collective
    curves                       losses over steps and, if they coincide, how they differ
    table                        results in rows and columns
    collective (collectives)     the data of each rank before and after a collective
    ring (collectives)           what moves around a ring, step by step
    ring_run                     a recorded ring all-reduce: a picture per step, with the bytes per link, for play
    times                        seconds over bytes: measured points and lines, on logarithmic axes
    heads                        the attention heads on each rank, with the K and V heads below their queries
    bill (memory)                what a GPU has to store, by category, compared with its memory
    live_memory (memory)         the memory in use at each moment of a run
    parallelism (parallelisms)   data, tensor or pipeline parallelism: what each rank has and sends, and when it waits
    lookup                       a look-up in a table sharded by rows: what each rank finds, its zeros, the sum
    masks                        the positions that the dropout of each rank keeps
    layer                        a transformer layer on p ranks, and what its four operators sent
    schedule                     what every rank of a pipeline does when, and where it waits
    token_way                    a token's path through both ends of a model: a picture per step, for play
    clock                        when each operation of a list runs or waits: a picture per operation, for play
    overlap                      two lanes per rank: when it computed, and when a collective was in flight
    time_bars (costs)            where the time goes, by category
    saved_activations (costs)    what autograd saves for a layer, by category
    against (costs)              a model's predictions compared with published values
    mesh                         for each axis of a mesh, which ranks form a group
    poster                       a whole model: who wrote each block, and what the block sends
    Picture (colors)             what these functions return, and the look of all pictures
    block (blocks)               a tensor as a rectangle, with its name, shape and cells; used by other pictures
    explore (controls)           sliders for the arguments of a function
    play (controls)              a Play button for the steps of a run, below the same sliders

Each rank is labeled with its number, and it has the same colorblind-safe color in every picture. A function that draws
one picture returns a `Picture`, which is a matplotlib Figure that a notebook displays if it's on a cell's last line.
"""

from tplab.viz.clock import clock
from tplab.viz.collectives import collective, ring
from tplab.viz.colors import Picture
from tplab.viz.controls import Frames, explore, play
from tplab.viz.costs import against, saved_activations, time_bars
from tplab.viz.curves import curves
from tplab.viz.heads import heads
from tplab.viz.layer import layer
from tplab.viz.lookup import lookup
from tplab.viz.masks import masks
from tplab.viz.matrices import matrices
from tplab.viz.memory import bill, live_memory
from tplab.viz.mesh import mesh
from tplab.viz.overlap import overlap
from tplab.viz.parallelisms import parallelism
from tplab.viz.poster import Block, poster
from tplab.viz.product import product
from tplab.viz.ring_run import ring_run
from tplab.viz.schedule import schedule
from tplab.viz.split import split
from tplab.viz.table import table
from tplab.viz.timeline import timeline
from tplab.viz.times import times
from tplab.viz.token_way import token_way
from tplab.viz.traffic import traffic

__all__ = [
    "Block",
    "Frames",
    "Picture",
    "against",
    "bill",
    "clock",
    "collective",
    "curves",
    "explore",
    "heads",
    "saved_activations",
    "layer",
    "live_memory",
    "lookup",
    "masks",
    "matrices",
    "mesh",
    "overlap",
    "parallelism",
    "play",
    "poster",
    "product",
    "ring",
    "ring_run",
    "schedule",
    "split",
    "table",
    "time_bars",
    "timeline",
    "times",
    "token_way",
    "traffic",
]
