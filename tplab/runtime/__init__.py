"""The ground floor: start ranks, record their collectives, diagnose who is stuck where.

launcher    launch(): checks its arguments, starts one process per rank, returns their results
devices     which GPU a rank computes on, if any
forkserver  the process that has already imported torch and forks the ranks
preload     what the server imports because ranks did
rank        what runs in a rank's process
hooks       wraps torch.distributed, so that ... (functional_hooks: also what DTensor and torch.compile use)
recorder    ... every collective is written down before it starts
naming      the description of a collective, and the line it comes from
records     what was written down: Collective, Record
stream_waits  how long a GPU's stream waits for collectives
board       the shared memory in which ranks announce what they are doing
diagnosis   from the board to a sentence such as "rank 2 never joined all_reduce #3"
watch       follows a run until it ends, and puts the report about a deadlock or a failed rank together
failures    a failed rank's traceback, with the notebook's own cell and line
transport   tensors and functions by value, from one process to another
process     a rank as the parent sees it: its process, its pipes, what it has reported
results     what the ranks returned
display     what the ranks print
liveview    what every rank is doing during a run
screen      a line of a terminal, or a widget, that changes
torchrun    the same launch() on ranks that torchrun has started
magic       %%ranks
"""

from tplab.runtime.devices import device
from tplab.runtime.failures import Deadlock, RankError
from tplab.runtime.hooks import record
from tplab.runtime.launcher import Results, launch
from tplab.runtime.records import Collective, Record, Total

__all__ = ["Collective", "Deadlock", "RankError", "Record", "Results", "Total", "device", "launch", "record"]
