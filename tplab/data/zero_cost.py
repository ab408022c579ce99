"""Chapter 14: formulas for the traffic of each ZeRO stage.

    stage   elements sent in a step with m backward passes
    0       2Ψ          all-reduce, once
    1       2Ψ          reduce-scatter, once; all-gather of the weights
    2       (m + 1)Ψ    reduce-scatter in each backward; all-gather of the weights
    3       3mΨ         all-gather in each forward and backward, reduce-scatter

Ψ is the number of parameters. An all-reduce is a reduce-scatter and an all-gather, so it counts as 2. In a ring, each
rank sends (p-1)/p of each Ψ in the table. Weights and gradients are sent in their own dtypes. What each stage stores is
in the table of `zero`. (Rajbhandari et al. 2020, section 7, for m = 1.)
"""

STAGES = (0, 1, 2, 3)


def zero_traffic(stage: int, parameters: int, micro_batches: int = 1) -> dict[str, int]:
    """Return the number of elements per step for each kind of collective, counted as in `tplab.record`.

    Stage 0 is plain data parallelism.
    """
    if stage not in STAGES:
        raise ValueError(f"there is no stage {stage} of ZeRO: use one of {', '.join(map(str, STAGES))}")
    return {
        0: {"all_reduce": parameters},
        1: {"reduce_scatter": parameters, "all_gather": parameters},
        2: {"reduce_scatter": micro_batches * parameters, "all_gather": parameters},
        3: {"reduce_scatter": micro_batches * parameters, "all_gather": 2 * micro_batches * parameters},
    }[stage]
