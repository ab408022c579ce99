"""Chapter 14: data parallelism, from plain replicas to ZeRO 3.

grid              the coordinates of each rank on a grid of data, pipeline and tensor parallelism
flat_parameters   parameters concatenated into a flat vector that p ranks can split evenly
data_parallel     gradients summed over the replicas, in buckets, during the backward pass
grad_norm         the norm of a gradient that is spread over many ranks
zero              ZeRO 1 and 2
zero3             ZeRO 3
zero_state        ZeRO's optimizer state in the format of a plain optimizer, for checkpoints
"""

from tplab.data.data_parallel import DataParallel, tokens_of_all
from tplab.data.grad_norm import clip, clip_grad_norm, grad_norm
from tplab.data.grid import Grid, mesh
from tplab.data.zero import ZeRO1, ZeRO2
from tplab.data.zero3 import ZeRO3
from tplab.data.zero_state import FullOptimizer

__all__ = [
    "DataParallel",
    "FullOptimizer",
    "Grid",
    "ZeRO1",
    "ZeRO2",
    "ZeRO3",
    "clip",
    "clip_grad_norm",
    "grad_norm",
    "mesh",
    "tokens_of_all",
]
