"""tplab: a course on tensor parallelism that runs.

    launch(fn, world_size)   run fn on real ranks, from a notebook cell or a script
    record()                 the collectives that this rank enters inside a block
    device()                 the device of this rank
    %%ranks 4                run a notebook cell on 4 ranks (registered here when IPython imports us)

The layers of the course live in `tplab.sharding`, `tplab.mappings`, `tplab.linear`, ...: one module a chapter.
"""

from tplab.runtime import Deadlock, RankError, Results, device, launch, record
from tplab.runtime.magic import register_in_ipython

__version__ = "0.1.0"

__all__ = ["Deadlock", "RankError", "Results", "device", "launch", "record"]

register_in_ipython()
