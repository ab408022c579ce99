"""tplab: a hands-on course on tensor parallelism.

    launch(fn, world_size)   run fn on real ranks, from a notebook cell or a script
    record()                 record the collectives that this rank enters inside a `with` block
    device()                 return the device that this rank computes on

Everything else is in rooms (subpackages), in the order of the chapters in parentheses, and in a module, `plain`:

    common              tools that all rooms share
    runtime             start ranks, record their collectives, and find out which ranks are stuck
    memory (00)         the sizes of a GPT, and how much memory its training takes
    plain               a transformer for a single process, with which the parallel layers are compared
    collectives (01)    collectives built from send and receive
    tensor (02 to 09)   layers and losses that are split over ranks
    checkpoint (10)     save a model on p ranks and load it on any other number of ranks
    gpt (10)            a transformer layer, and a whole GPT
    cost (11)           formulas that predict the time of a training step
    trace (11)          what a rank did and when
    sequence (12)       sequence parallelism
    pipeline (13)       pipeline parallelism
    data (14)           data parallelism and ZeRO
    cluster (14)        data, pipeline and tensor parallelism together
    viz                 pictures of the results of runs
    course              notebooks, checks, hints, and the `tplab` command
    capstone (15)       train a GPT on many GPUs, and report on the run
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


if "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None and sys.platform != "win32":
    from tplab.runtime.forkserver import fork_server

    fork_server()  # it imports torch while the learner is still reading
