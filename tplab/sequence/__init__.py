"""Chapter 12: sequence parallelism, which shards the activations that tensor parallelism replicates.

regions   the operators that replace f and g: all-gather and reduce-scatter along the sequence
linear    a column-parallel matmul that can gather its input again in the backward pass
gpt       a GPT whose sequence is sharded over p ranks, and the all-reduce of its replicated parameters' gradients
examples  a small layer in pieces, in which chapter 12 shows what each rank computes, saves and sends
"""

from tplab.sequence.gpt import (
    SequenceParallelGPT,
    allreduce_sequence_parallel_gradients,
    sequence_parallel_parameters,
)
from tplab.sequence.linear import GATHER_AGAIN, SEQUENCE_PARALLEL, gather_linear, gather_linear_again
from tplab.sequence.regions import (
    gather_from_sequence_region,
    reduce_scatter_to_sequence_region,
    scatter_to_sequence_region,
    tokens_per_rank,
)

__all__ = [
    "GATHER_AGAIN",
    "SEQUENCE_PARALLEL",
    "SequenceParallelGPT",
    "allreduce_sequence_parallel_gradients",
    "gather_from_sequence_region",
    "gather_linear",
    "gather_linear_again",
    "reduce_scatter_to_sequence_region",
    "scatter_to_sequence_region",
    "sequence_parallel_parameters",
    "tokens_per_rank",
]
