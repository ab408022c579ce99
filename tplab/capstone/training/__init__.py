"""The program that every rank runs.

loop           train(settings): steps, evaluations and checkpoints, until the end or a request to stop
build_model    the model, made of tplab's layers, the learner's, torch's, or plain ones
step           forward, backward, all-reduces of gradients, clipping, the optimizer
optimizer      AdamW and its learning rate
step_summary   one all-reduce per step, after which every rank knows how the step went
evaluation     the loss on held-out text
sample         text that the model writes
ranks          this rank's place in the run, and its process groups
signals        requests to stop, which save a checkpoint first
meter          the cost of a step: time, bytes, memory
log, log_rows  the log of a run, and the rows in it
"""

from tplab.capstone.training.loop import train

__all__ = ["train"]
