"""The program that every rank runs: `train`.

loop           `train` itself
ranks          a rank's process groups; on a CPU, their all-reduces go through shared memory (runtime.shared_memory)
build_model    the model, from the course's layers, the learner's, or plain ones
optimizer      AdamW, with weight decay for matrices only
trainer        training steps on one rank, evaluation, samples
step_summary   the all-reduce that gives every rank a step's results
meter          what a step costs a rank: time, bytes, memory, waiting
log            the file log.jsonl
console        progress as text
stopping       requests to stop a run
"""

from tplab.capstone.training.loop import train

__all__ = ["train"]
