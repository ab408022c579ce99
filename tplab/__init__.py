"""tplab: a hands-on course on tensor parallelism.

    launch(fn, world_size)   run fn on real ranks, from a notebook cell or a script
    record()                 record the collectives that this rank enters inside a `with` block
    device()                 return the device that this rank computes on
    %%ranks 4                run a notebook cell on 4 ranks (available as soon as tplab is imported in IPython)

Everything else is in subpackages (rooms), one per subject, in the order of the chapters: `tplab.memory`,
`tplab.collectives`, `tplab.tensor`, ... ARCHITECTURE.md lists all of them.
"""

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tplab.runtime import Deadlock, RankError, Results, device, launch, record

__version__ = "0.2.0"

__all__ = ["Deadlock", "RankError", "Results", "device", "launch", "record"]


def __getattr__(name: str) -> Any:
    """Import `tplab.runtime`, which imports torch, on first use, so that the `tplab` command starts without torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tplab import runtime

    return getattr(runtime, name)


if "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None:
    from tplab.runtime.magic import register_in_ipython

    register_in_ipython()
