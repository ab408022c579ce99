"""Given by the course: my operators of chapter 03, in the form that later chapters call.

Mine take no group, because chapter 03 has only one. Where not all ranks take part, the course's operators run.
"""

import torch.distributed as dist
from my_tp.mappings import CopyToRegion, GatherFromRegion, ReduceFromRegion, ScatterToRegion

from tplab.tensor.mappings import copy_to_region as copy_in_group
from tplab.tensor.mappings import gather_from_region as gather_in_group
from tplab.tensor.mappings import reduce_from_region as reduce_in_group
from tplab.tensor.mappings import scatter_to_region as scatter_in_group


def is_everybody(group):
    """Whether all ranks belong to a group."""
    return group is None or dist.get_world_size(group) == dist.get_world_size()


def copy_to_region(x, group=None):
    """f: x [..], replicated -> the same; backward: the sum of the gradients."""
    return CopyToRegion.apply(x) if is_everybody(group) else copy_in_group(x, group)


def reduce_from_region(x, group=None):
    """g: x [..], partial -> the sum; backward: the gradient as it is."""
    return ReduceFromRegion.apply(x) if is_everybody(group) else reduce_in_group(x, group)


def scatter_to_region(x, group=None, *, stride=1):
    """x [.., h], replicated -> this rank's part [.., h/p]; backward: all parts of the gradient."""
    if is_everybody(group) and stride == 1:
        return ScatterToRegion.apply(x)
    return scatter_in_group(x, group, stride=stride)


def gather_from_region(x, group=None, *, stride=1):
    """x [.., h/p] -> all parts [.., h]; backward: this rank's part of the gradient."""
    if is_everybody(group) and stride == 1:
        return GatherFromRegion.apply(x)
    return gather_in_group(x, group, stride=stride)
