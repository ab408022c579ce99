"""Chapter 14: parameters in one vector, which p ranks can share evenly.

Layers have all sizes, and few of them can be divided by p. So their parameters are laid one after another, zeros are
put behind the last, and the vector is cut into p equal shards, wherever the cuts fall:

    [ weight 0 ................ | bias 0 | weight 1 ............... | bias 1 | 0 0 ]
    [ shard of rank 0 ......... | shard of rank 1 ......... | shard of rank 2 .... ]        p = 3

Adam and SGD treat each number by itself, so an optimizer may work on a shard and know nothing of the cuts.
(FSDP 1: FlatParameter; DeepSpeed: flattened partitions; Megatron: the distributed optimizer's grad buffer.)
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tplab.collectives.by_hand import rank_and_size

BUCKET_BYTES = 25 * 2**20  # of DistributedDataParallel


class Piece(NamedTuple):
    """What this rank holds of a parameter's gradient: `values` [k], from number `start` on.

    shape    of the whole parameter, which it may not have itself (ZeRO-3 frees it)
    """

    parameter: nn.Parameter
    shape: torch.Size
    start: int
    values: Tensor


class Flat:
    """The layout of some parameters of one dtype in a vector [p n], of which each rank of a group holds [n].

    numel           all numbers of the parameters
    shard_numel     n, the numbers of one rank; p n is `numel` rounded up
    Raises ValueError for parameters of several dtypes, or for none.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], group: ProcessGroup | None = None) -> None:
        self.parameters, self.group = list(parameters), group
        self.rank, self.world_size = rank_and_size(group)
        dtypes = {parameter.dtype for parameter in self.parameters}
        if len(dtypes) != 1:
            raise ValueError(f"a vector holds parameters of one dtype, got {sorted(map(str, dtypes)) or 'none at all'}")
        self.dtype, self.device = dtypes.pop(), self.parameters[0].device
        self.shapes = [parameter.shape for parameter in self.parameters]
        self.numel = sum(shape.numel() for shape in self.shapes)
        self.shard_numel = -(-self.numel // self.world_size)

    def flatten(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """A new vector [p n] of one tensor for each parameter; zeros for None."""
        vector = torch.zeros(self.world_size * self.shard_numel, dtype=self.dtype, device=self.device)
        for view, tensor in zip(self.views(vector), tensors, strict=True):
            if tensor is not None:
                view.copy_(tensor)
        return vector

    def views(self, vector: Tensor) -> list[Tensor]:
        """The vector [p n] in the shapes of the parameters; they share its memory."""
        numbers = vector[: self.numel].split([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(numbers, self.shapes, strict=True)]

    def parts(self, vector: Tensor) -> list[Tensor]:
        """The shards of all ranks, p of [n], in the memory of the vector [p n]."""
        return list(vector.split(self.shard_numel)) if self.shard_numel else [vector] * self.world_size

    def shard(self, vector: Tensor) -> Tensor:
        """This rank's shard [n], in the memory of the vector [p n]."""
        return self.parts(vector)[self.rank]

    def reduce_scatter(self, vector: Tensor) -> Tensor:
        """This rank's shard [n] of the sum of the ranks' vectors [p n]; in new memory, so that the vector can go."""
        total = torch.empty(self.shard_numel, dtype=vector.dtype, device=vector.device)
        if self.world_size == 1:
            return total.copy_(vector)
        dist.reduce_scatter(total, self.parts(vector), group=self.group)
        return total

    def all_gather(self, shard: Tensor, vector: Tensor) -> None:
        """Fill the vector [p n] with the shards [n] of all ranks. `shard` may be this rank's part of it."""
        if self.world_size == 1:
            vector.copy_(shard)
        else:
            dist.all_gather(self.parts(vector), shard, group=self.group)

    def pieces(self, shard: Tensor) -> list[Piece]:
        """This rank's shard [n], cut at the borders of the parameters; those that lie elsewhere are left out."""
        first, stop, found, begin = self.rank * self.shard_numel, (self.rank + 1) * self.shard_numel, [], 0
        for parameter, shape in zip(self.parameters, self.shapes, strict=True):
            end = begin + shape.numel()
            low, high = max(first, begin), min(stop, end)
            if low < high:
                found.append(Piece(parameter, shape, low - begin, shard[low - first : high - first]))
            begin = end
        return found


def in_buckets(parameters: Iterable[nn.Parameter], bucket_bytes: int = BUCKET_BYTES) -> list[list[nn.Parameter]]:
    """The parameters that are trained, last one first, in buckets of one dtype with `bucket_bytes` at most.

    Backward comes to the last layers first, so the first bucket is the first to be full. A parameter that is larger
    than a bucket has one alone. Raises ValueError for bucket_bytes below 1.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes={bucket_bytes}: a bucket holds one byte at least")
    buckets: list[list[nn.Parameter]] = []
    open_buckets: dict[torch.dtype, tuple[list[nn.Parameter], int]] = {}
    for parameter in reversed([parameter for parameter in parameters if parameter.requires_grad]):
        size = parameter.numel() * parameter.element_size()
        bucket, filled = open_buckets.get(parameter.dtype, ([], 0))
        if not bucket or filled + size > bucket_bytes:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(parameter)
        open_buckets[parameter.dtype] = bucket, filled + size
    return buckets


def broadcast(tensors: Iterable[Tensor], group: ProcessGroup | None = None) -> None:
    """Give all ranks the values that rank 0 of the group has, in place: one broadcast for each tensor."""
    if rank_and_size(group)[1] == 1:
        return
    for tensor in tensors:
        values = tensor.detach().contiguous()
        dist.broadcast(values, group_src=0, group=group)
        if values.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(values)
