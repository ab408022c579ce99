"""Starts ranks, records their collectives, and finds out which ranks are stuck and where.

launcher    launch(): checks its arguments, starts one process per rank, and returns the results
devices     chooses the backend, and the GPU that each rank computes on, if any
transport   passes tensors, functions and calls by value from one process to another
forkserver  the process that has already imported torch and forks the ranks
rank        the code that runs in a rank's process
hooks       wraps the methods of torch.distributed so that they call the recorder
functional_hooks  the same for functional collectives, which call operators instead
carriers    lets a slow link or a check decide when a message or collective is completed
recorder    records every collective before it starts
naming      describes a collective as text and finds the line that calls it
records     the results of a run, and the recorded data: Collective, Record, Total
streams     finds out which collective a rank with a GPU is blocked in, and how long its stream waits
board       the shared memory in which ranks announce what they are doing
diagnosis   turns the board into a sentence such as "rank 2 never joined all_reduce #3"
watch       follows a run until it ends, and writes the report if a rank fails or the ranks deadlock
failures    formats a failed rank's traceback, with the notebook's cell and line
display     shows what the ranks print
liveview    shows what every rank is doing during a run
slow_link   makes messages and collectives take as long as on a slower link
shared_memory  all-reduces through memory that the ranks share, instead of through gloo
torchrun    runs launch() on ranks that torchrun has started
"""

from tplab.runtime.devices import device
from tplab.runtime.failures import Deadlock, RankError
from tplab.runtime.hooks import record
from tplab.runtime.launcher import launch
from tplab.runtime.records import Collective, Record, Results, Total
from tplab.runtime.slow_link import slow_link

__all__ = [
    "Collective",
    "Deadlock",
    "RankError",
    "Record",
    "Results",
    "Total",
    "device",
    "launch",
    "record",
    "slow_link",
]
