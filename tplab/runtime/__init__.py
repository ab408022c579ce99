"""The ground floor: start ranks, record their collectives, say which rank is stuck where.

launcher    launch(): checks its arguments, starts one process a rank, brings back what they return
devices     which GPU a rank computes on, if any
forkserver  the process that has torch imported already and forks the ranks
preload     what the server imports because ranks did
rank        what runs in a rank's process
hooks       wraps torch.distributed, so that ... (functional_hooks: also what DTensor and torch.compile use)
recorder    ... every collective is written down before it starts
naming      what a collective is called, and the line it comes from
records     what was written down: Collective, Record
stream_waits  how long a GPU's stream stands still for collectives
board       the shared memory in which ranks write what they are doing
diagnosis   from the board to a sentence such as "rank 2 never joined all_reduce #3"
failures    a failed rank's traceback, with the notebook's own cell and line
transport   tensors and functions by value, from one process to another
display     what the ranks print
liveview    what every rank is doing while a run lasts
screen      a line of a terminal, or a widget, that changes
torchrun    the same launch() where torchrun has started the ranks
magic       %%ranks
"""

from tplab.runtime.devices import device
from tplab.runtime.failures import Deadlock, RankError
from tplab.runtime.hooks import record
from tplab.runtime.launcher import Results, launch
from tplab.runtime.records import Collective, Record, Total

__all__ = ["Collective", "Deadlock", "RankError", "Record", "Results", "Total", "device", "launch", "record"]
