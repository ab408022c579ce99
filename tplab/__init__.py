"""tplab: a course on tensor parallelism that runs.

    launch(fn, world_size)   run fn on real ranks, from a notebook cell or a script
    record()                 the collectives that this rank enters inside a block
    device()                 the device of this rank
    %%ranks 4                run a notebook cell on 4 ranks (registered here when IPython imports us)

The layers of the course live in `tplab.sharding`, `tplab.mappings`, `tplab.linear`, ...: one module a chapter.
"""

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tplab.runtime import Deadlock, RankError, Results, device, launch, record

__version__ = "0.1.0"

__all__ = ["Deadlock", "RankError", "Results", "device", "launch", "record"]


def __getattr__(name: str) -> Any:
    """Import torch only for those who need it: the command `tplab` answers without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tplab import runtime

    return getattr(runtime, name)


if "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None:
    from tplab.runtime.magic import register_in_ipython

    register_in_ipython()
