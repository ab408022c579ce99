"""Says whether this process is a rank that launch() has started.

The process itself has to know this. An environment variable would also be there in the programs that a rank starts, and
someone may have set it by hand.
"""

import os

_rank: int | None = None  # process id of the rank. A process that the rank forks has a copy of this variable


def become_rank() -> None:
    """Note that this process is a rank."""
    global _rank
    _rank = os.getpid()


def is_rank() -> bool:
    """Return True in a rank, and False in all other processes, even in those that a rank has started."""
    return _rank == os.getpid()
