"""Pictures of what runs returned, and controls to turn. Draws what other modules computed, computes nothing itself.

    matrices   small tensors with their numbers
    split      a tensor cut into one part per rank
    product    XA = [XA_1, XA_2] and XA = X_1 A_1 + X_2 A_2 in blocks
    traffic    calls and bytes of every rank
    timeline   when each rank computed, and when it was in which collective
    curves     losses over steps
    table      results in rows and columns
    explore    a function behind sliders

A rank has one colour everywhere (colour-blind safe), and its number stands beside it. Every function returns a
`Picture`, a matplotlib Figure that a notebook shows when it is a cell's last line.
"""

from tplab.viz.colors import Picture, rank_colors
from tplab.viz.controls import explore
from tplab.viz.curves import curves
from tplab.viz.matrices import matrices
from tplab.viz.product import product
from tplab.viz.split import split
from tplab.viz.table import table
from tplab.viz.timeline import timeline
from tplab.viz.traffic import traffic

__all__ = [
    "Picture",
    "curves",
    "explore",
    "matrices",
    "product",
    "rank_colors",
    "split",
    "table",
    "timeline",
    "traffic",
]
