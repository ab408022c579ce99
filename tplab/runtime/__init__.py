"""Starts ranks, records their collectives, and finds out which ranks are stuck and where.

launcher    launch(): checks its arguments, starts one process per rank, and returns the results
devices     chooses the backend, and the GPU that each rank computes on, if any
forkserver  the process that has already imported torch and forks the ranks
preload     imports in the fork server what earlier ranks had to import
setup_file  writes and reads the file that tells the ranks what to run
rank        the code that runs in a rank's process
hooks       wraps the methods of torch.distributed so that they call the recorder
functional_hooks  does the same for the collectives of DTensor and torch.compile
group_hooks  shows on the board when ranks create groups, because they wait for each other in these calls
torch_hooks  shows on the board which collectives torch starts from C++, as DDP does
carriers    lets a slow link or a check decide when a message or collective is completed
recorder    records every collective before it starts
naming      describes a collective as text and finds the line that calls it
records     defines Collective, Record and Total, the classes of the recorded data
stream_waits  measures how long a GPU's stream waits for collectives
stream_watch  finds out which collective a rank with a GPU is blocked in
threads     finds out whether any thread of a rank can still make progress
board       the shared memory in which ranks announce what they are doing
diagnosis   turns the board into a sentence such as "rank 2 never joined all_reduce #3"
watch       follows a run until it ends, and writes the report if a rank fails or the ranks deadlock
failures    formats a failed rank's traceback, with the notebook's cell and line
slow_link   makes messages and collectives take as long as on a slower link
shared_memory  all-reduces through memory that the ranks share, instead of through gloo
transport   passes tensors and functions by value from one process to another
blame       names the part of an argument or a function that can't be sent to another process
inside      says whether this process is a rank
process     a rank as seen from the parent: its process, its pipes, and what it has reported
results     the results of a run
display     shows what the ranks print
liveview    shows what every rank is doing during a run
screen      updates a line of a terminal, or a widget, in place
torchrun    runs launch() on ranks that torchrun has started
magic       the %%ranks cell magic
"""

from tplab.runtime.devices import device
from tplab.runtime.failures import Deadlock, RankError
from tplab.runtime.hooks import record
from tplab.runtime.launcher import Results, launch
from tplab.runtime.records import Collective, Record, Total
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
