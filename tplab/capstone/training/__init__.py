"""The program that every rank runs.

loop           train(settings): steps, evaluations, checkpoints, until the end or a request to stop
build_model    the model with tplab's layers, the learner's, torch's, or none that are parallel
step           forward, backward, the sums over ranks, clipping, the optimizer
optimizer      AdamW and its learning rate
step_summary   one all-reduce per step, after which every rank knows how the step went
evaluation     the loss on held-out text
sample         text that the model writes
ranks          who this rank is, and whom it talks to
signals        a request to stop saves a checkpoint first
meter          what a step costs: time, bytes, memory
log, log_rows  what is written down
"""

from tplab.capstone.training.loop import train

__all__ = ["train"]
