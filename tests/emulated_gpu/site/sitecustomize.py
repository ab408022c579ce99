"""Emulate GPUs in every Python process that is started with this folder on its path and EMULATED_GPUS set.

Python imports this module at its start. Ranks, notebooks and `tplab check` therefore need no change.
"""

import os

if os.environ.get("EMULATED_GPUS"):
    from tests.emulated_gpu import emulate

    emulate(int(os.environ["EMULATED_GPUS"]))
