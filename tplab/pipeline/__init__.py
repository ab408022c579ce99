"""Chapter 13: pipeline parallelism, which gives each rank some of the layers.

schedules        GPipe, 1F1B, interleaved and zero-bubble schedules as lists of actions
schedule_order   check that a schedule can run, and compute when each action starts and ends
p2p              the messages between stages
split_backward   a backward pass in two halves, for zero-bubble schedules
stages           a GPT as pipeline stages
executor         run a schedule on real ranks
examples         stages to try a schedule with
"""

from tplab.pipeline.executor import Pipeline
from tplab.pipeline.p2p import Channels
from tplab.pipeline.schedule_order import ScheduleError, simulate
from tplab.pipeline.schedules import Action, Schedule, gpipe, interleaved, one_f_one_b, zero_bubble
from tplab.pipeline.stages import gpt_stages

__all__ = [
    "Action",
    "Channels",
    "Pipeline",
    "Schedule",
    "ScheduleError",
    "gpipe",
    "gpt_stages",
    "interleaved",
    "one_f_one_b",
    "simulate",
    "zero_bubble",
]
