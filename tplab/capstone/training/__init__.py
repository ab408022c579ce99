"""The program that every rank runs.

loop           train(settings): steps, evaluations and checkpoints, until the end or a request to stop
build_model    builds the model from tplab's layers, the learner's, torch's, or plain ones
step           forward, backward, all-reduces of gradients, clipping, optimizer step
optimizer      AdamW and its learning rate
step_summary   one all-reduce per step that gives every rank the results of the step
evaluation     the loss on held-out text, and text that the model generates
ranks          this rank's position in the run, and its process groups
signals        requests to stop, after which a checkpoint is saved
meter          measures the cost of a step: time, bytes, memory
log            the log of a run, and its rows
"""

from tplab.capstone.training.loop import train

__all__ = ["train"]
