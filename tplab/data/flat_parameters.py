"""Chapter 14: parameters in one flat vector, which p ranks can split evenly.

Layers have all kinds of sizes, few of which are divisible by p. So we concatenate their parameters, append zeros, and
split the vector into p equal shards, no matter where the boundaries fall:

    [ weight 0 ................ | bias 0 | weight 1 ............... | bias 1 | 0 0 ]
    [ shard of rank 0 ......... | shard of rank 1 ......... | shard of rank 2 .... ]        p = 3

Adam and SGD treat each element separately, so an optimizer can work on a shard without knowing the boundaries. (FSDP 1:
FlatParameter; DeepSpeed: flattened partitions; Megatron: the distributed optimizer's grad buffer.)
"""

import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tplab.collectives.by_hand import rank_and_size
from tplab.runtime import device, record
from tplab.tensor.sharding import group_ranks, shard_ranks

BUCKET_BYTES = 25 * 2**20  # as in DistributedDataParallel


class Piece(NamedTuple):
    """This rank's part of a parameter's gradient. `values` [k] start at element `start` of the flattened parameter.

    shape    the full parameter's shape, which the parameter itself may not have (ZeRO-3 frees it)
    """

    parameter: nn.Parameter
    shape: torch.Size
    start: int
    values: Tensor


class Flat:
    """Layout of parameters with the same dtype in a flat vector [p n]. Each rank of a group has a shard [n] of it.

    numel           the total number of elements in the parameters
    shard_numel     n, the number of elements per rank; p n is `numel` rounded up to a multiple of p
    Raises ValueError if the parameters have several dtypes, or if there are none.
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
        """Return a new vector [p n] that contains one tensor per parameter, with zeros for None."""
        vector = torch.zeros(self.world_size * self.shard_numel, dtype=self.dtype, device=self.device)
        for view, tensor in zip(self.views(vector), tensors, strict=True):
            if tensor is not None:
                view.copy_(tensor)
        return vector

    def views(self, vector: Tensor) -> list[Tensor]:
        """Return views of the vector [p n] in the shapes of the parameters."""
        numbers = vector[: self.numel].split([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(numbers, self.shapes, strict=True)]

    def parts(self, vector: Tensor) -> list[Tensor]:
        """Return the p shards [n] of all ranks, as views of the vector [p n]."""
        return list(vector.split(self.shard_numel)) if self.shard_numel else [vector] * self.world_size

    def shard(self, vector: Tensor) -> Tensor:
        """Return this rank's shard [n], as a view of the vector [p n]."""
        return self.parts(vector)[self.rank]

    def reduce_scatter(self, vector: Tensor) -> tuple[Tensor, dist.Work | None]:
        """Start summing the ranks' vectors [p n]. Returns this rank's shard [n] of the sum (new memory), and the work.

        Don't use the vector or the shard before `work.wait()`. On a single rank, work is None.
        """
        total = torch.empty(self.shard_numel, dtype=vector.dtype, device=vector.device)
        if self.world_size == 1:
            return total.copy_(vector), None
        return total, dist.reduce_scatter(total, self.parts(vector), group=self.group, async_op=True)

    def all_gather(self, shard: Tensor, vector: Tensor) -> None:
        """Fill the vector [p n] with the shards [n] of all ranks. `shard` may be a view of the vector."""
        if self.world_size == 1:
            vector.copy_(shard)
        else:
            dist.all_gather(self.parts(vector), shard, group=self.group)

    def pieces(self, shard: Tensor) -> list[Piece]:
        """Split this rank's shard [n] at parameter boundaries. Parameters that aren't in the shard are left out."""
        first, stop, found, begin = self.rank * self.shard_numel, (self.rank + 1) * self.shard_numel, [], 0
        for parameter, shape in zip(self.parameters, self.shapes, strict=True):
            end = begin + shape.numel()
            low, high = max(first, begin), min(stop, end)
            if low < high:
                found.append(Piece(parameter, shape, low - begin, shard[low - first : high - first]))
            begin = end
        return found


def in_buckets(
    parameters: Iterable[nn.Parameter], bucket_bytes: int = BUCKET_BYTES, separate: nn.Parameter | None = None
) -> list[list[nn.Parameter]]:
    """Group the trainable parameters, last ones first, into buckets of one dtype with at most `bucket_bytes` bytes.

    Backward reaches the last layers first, so the first bucket is the first to fill up. `separate` gets a bucket of its
    own, and so does a parameter that is larger than `bucket_bytes`. Raises ValueError if bucket_bytes is below 1.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes={bucket_bytes}: a bucket holds one byte at least")
    buckets: list[list[nn.Parameter]] = []
    open_buckets: dict[torch.dtype, tuple[list[nn.Parameter], int]] = {}
    for parameter in reversed([parameter for parameter in parameters if parameter.requires_grad]):
        size = parameter.numel() * parameter.element_size()
        if parameter is separate:
            buckets.append([parameter])
            continue
        bucket, filled = open_buckets.get(parameter.dtype, ([], 0))
        if not bucket or filled + size > bucket_bytes:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(parameter)
        open_buckets[parameter.dtype] = bucket, filled + size
    return buckets


def broadcast(tensors: Iterable[Tensor], group: ProcessGroup | None = None) -> None:
    """Copy tensors from rank 0 of the group to all ranks, in place, with one broadcast per tensor."""
    if rank_and_size(group)[1] == 1:
        return
    for tensor in tensors:
        values = tensor.detach().contiguous()
        dist.broadcast(values, group_src=0, group=group)
        if values.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(values)


def start_alike(parameters: Iterable[tuple[str, nn.Parameter]], group: ProcessGroup | None = None) -> None:
    """Check that the group's ranks are replicas, and copy the named parameters from rank 0 of the group to all of them.

    Raises ValueError if the ranks have different parameters, like pipeline stages, or different shards of the same
    parameters, like tensor-parallel ranks, because rank 0's values would overwrite those of the others.
    """
    if rank_and_size(group)[1] == 1:
        return
    named, ranks = list(parameters), group_ranks(group)
    for name, parameter in named:
        of_shards = set(shard_ranks(parameter) or ()) & set(ranks)
        if len(of_shards) > 1:
            raise ValueError(
                f"{name} {list(parameter.shape)} is sharded over ranks {sorted(of_shards)}, so they aren't replicas of "
                f"each other, but data parallelism was given ranks {list(ranks)}. Pass the group of the ranks that "
                'have the same shards: group=mesh.get_group("dp")'
            )
    looks = [(tuple(p.shape), str(p.dtype), p.requires_grad) for _, p in named]
    checksum = torch.tensor(zlib.crc32(repr(looks).encode()), device=device())
    checksums = [torch.empty_like(checksum) for _ in ranks]
    with record(keep=False):
        dist.all_gather(checksums, checksum, group=group)
    if len(set(map(int, checksums))) > 1:
        raise ValueError(
            f"ranks {list(ranks)} aren't replicas: their parameters differ in number, shape or dtype, or in which of "
            "them are trained. Pass the group of the ranks that have the same part of the model: "
            'group=mesh.get_group("dp")'
        )
    broadcast((parameter for _, parameter in named), group)
