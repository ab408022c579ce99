"""Given by the course: my operators from chapter 03, adapted to the way later chapters call them.

My operators take no group, because chapter 03 has only one. If only some ranks take part, the course's operators run.
"""

import torch.distributed as dist
from my_tp.operators import CopyToRegion, GatherFromRegion, ReduceFromRegion, ScatterToRegion

from tplab.tensor.operators import copy_to_region as copy_in_group
from tplab.tensor.operators import gather_from_region as gather_in_group
from tplab.tensor.operators import reduce_from_region as reduce_in_group
from tplab.tensor.operators import scatter_to_region as scatter_in_group


def is_everybody(group):
    """Return whether all ranks belong to a group."""
    return group is None or dist.get_world_size(group) == dist.get_world_size()


def copy_to_region(x, group=None):
    """f: x [..], replicated -> x, unchanged; backward: the sum of all ranks' gradients."""
    return CopyToRegion.apply(x) if is_everybody(group) else copy_in_group(x, group)


def reduce_from_region(x, group=None):
    """g: x [..], partial -> the sum over all ranks; backward: the gradient, unchanged."""
    return ReduceFromRegion.apply(x) if is_everybody(group) else reduce_in_group(x, group)


def scatter_to_region(x, group=None, *, stride=1):
    """x [.., h], replicated -> this rank's chunk [.., h/p]; backward: all ranks' chunks of the gradient."""
    if is_everybody(group) and stride == 1:
        return ScatterToRegion.apply(x)
    return scatter_in_group(x, group, stride=stride)


def gather_from_region(x, group=None, *, stride=1):
    """x [.., h/p] -> all ranks' chunks [.., h]; backward: this rank's chunk of the gradient."""
    if is_everybody(group) and stride == 1:
        return GatherFromRegion.apply(x)
    return gather_in_group(x, group, stride=stride)
