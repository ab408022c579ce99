"""Chapter 02: which part of a tensor belongs to which rank.

A tensor is split along one dimension into p equal shards, one per rank, in rank order:

    A [m, n] along dim 1, p = 2:    A = [ A_0 | A_1 ]        A_r [m, n/p]

A fused tensor contains several matrices side by side, such as the gate G and the value U of a SwiGLU. Each matrix is
split, and a rank has one shard of each. `stride` is the number of matrices:

    [ G | U ] along dim 1, p = 2, stride = 2:    rank 0: [ G_0 | U_0 ]    rank 1: [ G_1 | U_1 ]

In attention, the matrices differ in size, and a head must not be split, so each matrix is described by a `Block`. Here,
Q has 4 heads, and K and V have 2. If there are more ranks than K and V heads, neighboring ranks have copies of the same
head:

    blocks Q, K, V of 4, 2, 2 units, p = 2:    rank 0: Q 0 1, K 0, V 0    rank 1: Q 2 3, K 1, V 1
    p = 4:    rank 0: Q 0, K 0, V 0    rank 1: Q 1, K 0, V 0    rank 2: Q 2, K 1, V 1    rank 3: Q 3, K 1, V 1

Nothing here communicates. `tplab.tensor.full_state` gathers the shards of all ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import isqrt
from typing import Self

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from tplab.collectives.by_hand import rank_and_size
from tplab.tensor.group_module import GroupModule, group_ranks


@dataclass(frozen=True)
class Block:
    """One matrix of a fused tensor. Its `size` entries are grouped into units, such as heads, of `unit` entries each.

    A unit is never split, and all ranks get the same number of units. If there are fewer units than ranks, each unit is
    on `copies(p)` neighboring ranks. `copies` and `shard_length` raise ValueError if the units can be neither divided
    over p ranks nor copied to them evenly. The same block can be used for every p.

    `padded` is for vocabularies: zeros are appended to the `size` entries until all ranks have the same number of
    complete units. Only the shards contain these zeros, so the full tensor is the same for every p.
    """

    size: int
    unit: int = 1
    padded: bool = False

    def __post_init__(self) -> None:
        if self.unit < 1 or (self.size % self.unit and not self.padded):
            raise ValueError(f"a block of size={self.size} isn't made of whole units of {self.unit}")

    def copies(self, world_size: int) -> int:
        """Return the number of ranks that have the same shard of this block."""
        if self.padded:
            return 1
        units = self.size // self.unit
        if units and world_size % units == 0:
            return world_size // units
        if units % world_size == 0:
            return 1
        raise ValueError(
            f"a block of {units} units of {self.unit} can't be divided over {world_size} ranks, nor copied to them "
            "evenly: use a p that divides the number of units, or a multiple of it"
        )

    def shard_length(self, world_size: int) -> int:
        """Return the number of entries on each rank, including padding."""
        if self.padded:
            return -(-self.size // (self.unit * world_size)) * self.unit  # rounded up
        return self.size * self.copies(world_size) // world_size

    def pad(self, matrix: Tensor, dim: int, world_size: int) -> Tensor:
        """Append the zeros that a padded block needs on p ranks. For any other block, return the matrix unchanged."""
        if not self.padded:
            return matrix
        shape = list(matrix.shape)
        shape[dim] = world_size * self.shard_length(world_size) - self.size
        return torch.cat([matrix, matrix.new_zeros(shape)], dim)


@dataclass(frozen=True)
class Sharding:
    """How a parameter is split along `dim`: into `stride` equal blocks, or into `blocks`, each divided over the ranks.

    If each rank has only a shard of a parameter, it is marked with `param.tensor_parallel = Sharding(dim=0)`. A
    parameter without this attribute is replicated, so every rank has all of it. (Megatron's names for this:
    tensor_model_parallel, partition_dim, partition_stride.)

    `ranks` are the global ranks that have the shards, in order, or None if they are unknown. A `ShardedModule` sets
    them, so that `check_group` can raise an error if a function gets a different process group. Shardings that differ
    only in their ranks are equal, because the ranks don't affect how the parameter is split.
    """

    dim: int
    stride: int = 1
    blocks: tuple[Block, ...] = ()
    ranks: tuple[int, ...] | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        return f"Sharding(dim={self.dim}, " + (f"blocks={self.blocks})" if self.blocks else f"stride={self.stride})")

    def shard(self, whole: Tensor, rank: int, world_size: int) -> Tensor:
        """Return the shard of `whole` that belongs to `rank`. Unlike the function `shard`, this supports `blocks`."""
        if not self.blocks:
            return shard(whole, self.dim, rank, world_size, stride=self.stride)
        sizes, copies = [block.size for block in self.blocks], [block.copies(world_size) for block in self.blocks]
        if whole.shape[self.dim] != sum(sizes):
            raise ValueError(f"blocks of {sizes} make {sum(sizes)} entries, got {whole.shape[self.dim]}")
        blocks = zip(whole.split(sizes, self.dim), self.blocks, copies, strict=True)
        matrices = [(block.pad(matrix, self.dim, world_size), c) for matrix, block, c in blocks]
        return torch.cat([shard(m, self.dim, rank // c, world_size // c) for m, c in matrices], self.dim)

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """Return the full tensor, given the shards of all ranks in rank order. If there are copies, use the first."""
        if not self.blocks:
            return unshard(shards, self.dim, stride=self.stride)
        lengths = [block.shard_length(len(shards)) for block in self.blocks]
        parts = zip(*(part.split(lengths, self.dim) for part in shards), strict=True)  # p parts of each block
        copies = [block.copies(len(shards)) for block in self.blocks]
        matrices = [unshard(p[::c], self.dim) for p, c in zip(parts, copies, strict=True)]
        sizes = [block.size for block in self.blocks]
        return torch.cat([m.narrow(self.dim, 0, size) for m, size in zip(matrices, sizes, strict=True)], self.dim)

    def whole_shape(self, shard_shape: Sequence[int], world_size: int) -> list[int]:
        """Return the shape of the full tensor if each of p ranks has a shard of `shard_shape`."""
        shape = list(shard_shape)
        shape[self.dim] = sum(b.size for b in self.blocks) if self.blocks else shape[self.dim] * world_size
        return shape


def runs(sharding: Sharding, size: int, rank: int, world_size: int) -> list[tuple[int, int, int]]:
    """Return (offset in the full tensor, offset in the shard, length) of each contiguous run of entries on `rank`.

    To find the runs, we shard the numbers 1 to `size`, so a zero in the shard is padding. A run of entries also ends
    where a block ends. Otherwise, a rank with the last head of Q and the only head of K would have both in a single
    chunk, which would overlap with other ranks' chunks of K without matching any of them.
    """
    mine = replace(sharding, dim=0).shard(torch.arange(1, size + 1, device="cpu"), rank, world_size)
    places = mine.nonzero().flatten()
    numbers = mine[places] - 1
    borders = torch.tensor([0, *accumulate(block.size for block in sharding.blocks)])
    begins = torch.isin(numbers, borders)
    begins[:1] = True
    begins[1:] |= numbers.diff() != 1
    lengths = torch.diff(begins.nonzero().flatten(), append=torch.tensor([len(numbers)]))
    return list(zip(numbers[begins].tolist(), places[begins].tolist(), lengths.tolist(), strict=True))


def divide(size: int, world_size: int, *, name: str = "size", unit: str = "elements") -> int:
    """Return `size / world_size`. Raises ValueError, listing the possible world sizes, if it isn't an integer.

    `name` and `unit` describe what is being divided: divide(12, 8, name="num_heads", unit="heads").
    """
    if world_size < 1:
        raise ValueError(f"{name}={size} can't be divided over {world_size} ranks: there has to be at least one rank")
    if size % world_size:
        raise ValueError(
            f"{name}={size} can't be divided over {world_size} ranks: each rank takes whole {unit}, and as many as any "
            f"other. Use p in {_divisors(size)}."
        )
    return size // world_size


def shard_range(size: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the part [start, stop) of range(size) that belongs to `rank`.

    Raises ValueError if p doesn't divide size.
    """
    length = divide(size, world_size)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} isn't one of {world_size} ranks: they are numbered 0 to {world_size - 1}")
    return rank * length, (rank + 1) * length


def shard(tensor: Tensor, dim: int, rank: int, world_size: int, *, stride: int = 1) -> Tensor:
    """Return the shard [.., n/p, ..] of `tensor` [.., n, ..] that belongs to `rank`, as a contiguous copy.

    Because it is a copy, writing into a shard never changes the full tensor, and the full tensor can be freed. The
    function is differentiable. Raises ValueError if n isn't divisible by stride times p.
    """
    dim = _checked_dim(tensor, dim)
    block = _block_length(tensor.shape[dim], stride)
    start, stop = shard_range(block, rank, world_size)
    blocks = tensor.unflatten(dim, (stride, block))  # [.., stride, n/stride, ..]
    part = blocks.narrow(dim + 1, start, stop - start)  # [.., stride, n/(stride p), ..]
    return part.clone(memory_format=torch.contiguous_format).flatten(dim, dim + 1)  # [.., n/p, ..]


def unshard(shards: Sequence[Tensor], dim: int, *, stride: int = 1) -> Tensor:
    """Return the full tensor [.., n, ..], given the shards [.., n/p, ..] of all ranks in rank order. Undoes `shard`.

    The function is differentiable. Raises ValueError if there are no shards, or if their shapes differ.
    """
    if not shards:
        raise ValueError("unshard needs the shards of all ranks, in rank order, got none")
    shapes = [tuple(part.shape) for part in shards]
    if len(set(shapes)) > 1:
        raise ValueError(f"all shards must have the same shape, got {shapes} for ranks 0 to {len(shards) - 1}")
    dim = _checked_dim(shards[0], dim)
    block = _block_length(shards[0].shape[dim], stride)
    parts = [part.unflatten(dim, (stride, block)) for part in shards]  # p tensors [.., stride, n/(stride p), ..]
    return torch.cat(parts, dim + 1).flatten(dim, dim + 1)  # [.., n, ..]


def sharding_of(value: object) -> Sharding | None:
    """Return which part of the full tensor a parameter or buffer is, or None if it's the full tensor."""
    return getattr(value, "tensor_parallel", None)


def shard_ranks(parameter: Tensor) -> tuple[int, ...] | None:
    """Return the global ranks that have a parameter's shards, or None if it's replicated or the ranks are unknown.

    If the result is a single rank, that rank has the full parameter. The ranks are unknown if a layer only set
    `param.tensor_parallel = Sharding(dim)`, without `ranks`.
    """
    sharding = sharding_of(parameter)
    return None if sharding is None else sharding.ranks


def check_group(name: str, parameter: Tensor, group: ProcessGroup | None) -> None:
    """Raise ValueError if a parameter's shards aren't on the group's ranks. Unknown ranks aren't checked.

    Also raises ValueError for a DTensor, whose local tensor may be a part of a shard.
    """
    if isinstance(parameter, DTensor):
        raise ValueError(
            f"{name} is a DTensor. Gather, load and save the model before fully_shard or parallelize_module, or use "
            "torch.distributed.checkpoint"
        )
    if (own := shard_ranks(parameter)) is None:
        return
    given = group_ranks(group)
    if own == given or len(own) == len(given) == 1:
        return
    chosen = "group=None" if group is None else "the given group"
    raise ValueError(
        f"{name} {list(parameter.shape)} has its shards on ranks {list(own)}, but {chosen} means ranks {list(given)}. "
        "Pass the group that its layer was made with (layer.group)"
    )


class ShardedModule(GroupModule):
    """Base class for modules with sharded parameters. `self.shardings` maps each parameter's name to its sharding.

    It keeps the `tensor_parallel` attribute on each of these parameters. A plain attribute would be lost whenever torch
    creates new parameters, as in copy.deepcopy, to_empty and load_state_dict(assign=True).
    """

    group: ProcessGroup | None

    def __init__(self, group: ProcessGroup | None = None) -> None:
        super().__init__()
        self.group = group
        self.rank, self.world_size = rank_and_size(group)
        self.shardings: dict[str, Sharding] = {}

    def register_shard(self, name: str, parameter: nn.Parameter, sharding: Sharding) -> None:
        """Register this rank's shard of a parameter that is split over `self.group` as described by `sharding`."""
        self.shardings[name] = replace(sharding, ranks=group_ranks(self.group))
        self.register_parameter(name, parameter)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        self._mark_shards()

    def _mark_shards(self) -> None:
        for name, sharding in self.shardings.items():
            if (parameter := self._parameters.get(name)) is not None:
                parameter.tensor_parallel = sharding  # type: ignore[attr-defined]

    def _apply(self, fn: Callable, recurse: bool = True) -> Self:  # called by to, to_empty, double, ...
        module = super()._apply(fn, recurse)
        self._mark_shards()
        return module

    def __deepcopy__(self, memo: dict) -> Self:
        twin = super().__deepcopy__(memo)
        twin._mark_shards()
        return twin

    def extra_repr(self) -> str:
        shapes = [f"{name} {list(value.shape)}" for name, value in self._parameters.items() if value is not None]
        return f"rank {self.rank} of {self.world_size} holds {', '.join(shapes)}"


def _divisors(size: int) -> str:
    small = [p for p in range(1, isqrt(size) + 1) if size % p == 0]
    divisors = [str(p) for p in sorted({*small, *(size // p for p in small)})]
    return ", ".join(divisors if len(divisors) <= 16 else [*divisors[:15], "...", divisors[-1]])


def _checked_dim(tensor: Tensor, dim: int) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"dim={dim} doesn't exist in a tensor of shape {tuple(tensor.shape)}")
    return dim % tensor.dim()


def _block_length(size: int, stride: int) -> int:
    if stride < 1 or size % stride:
        raise ValueError(f"a size of {size} isn't stride={stride} equal blocks")
    return size // stride
