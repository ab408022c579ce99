"""Chapter 10: save a model on p ranks and load it on any other number of ranks.

files       the directory of a checkpoint, written by torch.distributed.checkpoint
pieces      which chunks of each full tensor a rank has
replicas    check that replicated tensors are identical on all ranks
optimizer   save and load the optimizer's state, by parameter name
sharded     save and load the model and the optimizer
"""

from tplab.checkpoint.sharded import load_sharded, save_sharded

__all__ = [
    "load_sharded",
    "save_sharded",
]
