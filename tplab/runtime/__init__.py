"""The ground floor: start ranks, record their collectives, diagnose who is stuck where.

launcher    launch(): checks its arguments, starts one process per rank, and returns the results
devices     which GPU each rank computes on, if any
forkserver  the process that has already imported torch and forks the ranks
preload     repeats the imports of earlier ranks in the fork server
setup_file  tells the ranks what to run
rank        the code that runs in a rank's process
hooks       wraps torch.distributed to call the recorder (functional_hooks: the same for DTensor and torch.compile)
group_hooks  shows where ranks create groups and wait for each other to do so
torch_hooks  shows the collectives that torch starts from C++, as DDP does
recorder    records every collective before it starts
naming      describes a collective as text and finds the line that calls it
records     the classes of the recorded data: Collective, Record
stream_waits  measures how long a GPU's stream waits for collectives
stream_watch  finds out which collective a rank with a GPU is blocked in
threads     finds out whether any thread of a rank can still act
board       the shared memory in which ranks announce what they are doing
diagnosis   turns the board into a sentence such as "rank 2 never joined all_reduce #3"
watch       follows a run until it ends, and writes the report if a rank fails or the ranks deadlock
failures    formats a failed rank's traceback, with the notebook's cell and line
shared_memory  all-reduces through memory that ranks share, instead of gloo
transport   passes tensors and functions by value from one process to another
blame       names the part of an argument or a function that can't be passed
process     a rank as seen from the parent: its process, its pipes, and what it has reported
results     the results of a run
display     shows what the ranks print
liveview    shows what every rank is doing during a run
screen      updates a line of a terminal, or a widget, in place
torchrun    launch() on ranks that torchrun has started
magic       the %%ranks cell magic
"""

from tplab.runtime.devices import device
from tplab.runtime.failures import Deadlock, RankError
from tplab.runtime.hooks import record
from tplab.runtime.launcher import Results, launch
from tplab.runtime.records import Collective, Record, Total

__all__ = ["Collective", "Deadlock", "RankError", "Record", "Results", "Total", "device", "launch", "record"]
