"""Chapter 14: formulas for the memory and the traffic of each ZeRO stage.

    stage   weights   gradients   optimizer   elements sent in a step with m backward passes
    0       Ψ         Ψ           Ψ           2Ψ          all-reduce, once
    1       Ψ         Ψ           Ψ/p         2Ψ          reduce-scatter, once; all-gather of the weights
    2       Ψ         Ψ/p         Ψ/p         (m + 1)Ψ    reduce-scatter in each backward; all-gather of the weights
    3       Ψ/p       Ψ/p         Ψ/p         3mΨ         all-gather in each forward and backward, reduce-scatter

Ψ is the number of parameters. An all-reduce is a reduce-scatter and an all-gather, so it counts as 2. In a ring, each
rank sends (p-1)/p of each Ψ in the table. Weights and gradients are sent in their own dtypes. (Rajbhandari et al. 2020,
section 3 and figure 1 for the memory, section 7 for the traffic with m = 1.)
"""

from tplab.memory.memory_bill import ADAM, Recipe

STAGES = (0, 1, 2, 3)


def zero_memory(stage: int, parameters: int, dp: int, recipe: Recipe = ADAM) -> dict[str, float]:
    """Return the number of bytes on each of the dp ranks, by category. Stage 0 is plain data parallelism."""
    _check(stage, dp)
    whole = {"weights": recipe.weights, "gradients": recipe.gradients, "optimizer": recipe.optimizer}
    cut_from = {"weights": 3, "gradients": 2, "optimizer": 1}
    return {name: size * parameters / (dp if stage >= cut_from[name] else 1) for name, size in whole.items()}


def zero_traffic(stage: int, parameters: int, micro_batches: int = 1) -> dict[str, int]:
    """Return the number of elements per step for each kind of collective, counted as in `tplab.record`."""
    _check(stage, 1)
    return {
        0: {"all_reduce": parameters},
        1: {"reduce_scatter": parameters, "all_gather": parameters},
        2: {"reduce_scatter": micro_batches * parameters, "all_gather": parameters},
        3: {"reduce_scatter": micro_batches * parameters, "all_gather": 2 * micro_batches * parameters},
    }[stage]


def _check(stage: int, dp: int) -> None:
    if stage not in STAGES:
        raise ValueError(f"there is no stage {stage} of ZeRO: use one of {', '.join(map(str, STAGES))}")
    if dp < 1:
        raise ValueError(f"dp={dp}: there is one replica at least")
