"""Chapter 14: the position of each rank in data, pipeline and tensor parallelism, and the ranks it communicates with.

Every rank has three coordinates. Ranks are numbered along tp first, then pp, then dp:

    rank = (dp · PP + pp) · TP + tp          PP, TP: the sizes; dp, pp, tp: the coordinates

    dp=2, pp=2, tp=2           tp 0   tp 1              tp group     ranks in one row        0 1
                    dp 0  pp 0    0      1              pp group     same column, same dp    0 2
                          pp 1    2      3              dp group     same pp, same tp        0 4
                    dp 1  pp 0    4      5
                          pp 1    6      7

tp is innermost because it communicates most: each layer needs several all-reduces, and computation usually has to wait
for them. A tp group has consecutive ranks, so they are on the same node and use its fast links. dp is outermost because
it communicates only once per step, while backward is still running. (Narayanan et al. 2021, section 3; Megatron:
parallel_state.initialize_model_parallel, which numbers ranks along dp before pp.)
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tplab.runtime import device

Dimension = Literal["dp", "pp", "tp"]
DIMENSIONS: tuple[Dimension, ...] = get_args(Dimension)  # outermost first


class Place(NamedTuple):
    """Coordinates of a rank: the indices of its replica, pipeline stage and tensor-parallel shard."""

    dp: int
    pp: int
    tp: int


@dataclass(frozen=True)
class Grid:
    """A grid of dp replicas, each with pp stages of tp ranks. It only computes indices, so it needs no process group.

    Raises ValueError for a size below 1, a rank or coordinates outside the grid, or an unknown dimension.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for name in DIMENSIONS:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: each dimension of the grid needs a size of 1 at least")

    @property
    def size(self) -> int:
        """The number of ranks in the grid."""
        return self.dp * self.pp * self.tp

    def place(self, rank: int) -> Place:
        """Return the coordinates of a rank."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} isn't one of the {self.size} ranks of {self}: they are 0 to {self.size - 1}")
        return Place(rank // (self.pp * self.tp), rank // self.tp % self.pp, rank % self.tp)

    def rank(self, dp: int = 0, pp: int = 0, tp: int = 0) -> int:
        """Return the rank at these coordinates. This is the inverse of `place`."""
        for name, index in zip(DIMENSIONS, (dp, pp, tp), strict=True):
            if not 0 <= index < getattr(self, name):
                raise ValueError(f"there is no {name} {index} in {self}: they are 0 to {getattr(self, name) - 1}")
        return (dp * self.pp + pp) * self.tp + tp

    def group(self, rank: int, dimension: Dimension) -> list[int]:
        """Return the group of `rank` along a dimension: all ranks with the same other coordinates, including itself."""
        here = self.place(rank)._asdict()
        return [self.rank(**{**here, dimension: index}) for index in range(self._size_of(dimension))]

    def groups(self, dimension: Dimension) -> list[list[int]]:
        """Return all groups of a dimension. Every rank is in exactly one of them."""
        self._size_of(dimension)
        firsts = [rank for rank in range(self.size) if getattr(self.place(rank), dimension) == 0]
        return [self.group(rank, dimension) for rank in firsts]

    def __str__(self) -> str:
        return " · ".join(f"{name}={getattr(self, name)}" for name in DIMENSIONS)

    def _size_of(self, dimension: Dimension) -> int:
        if dimension not in DIMENSIONS:
            raise ValueError(f"there is no dimension {dimension!r}: use one of {', '.join(DIMENSIONS)}")
        return getattr(self, dimension)


def mesh(dp: int = 1, pp: int = 1, tp: int = 1) -> DeviceMesh:
    """Create the process groups of a grid and return them as a `DeviceMesh`, with `.get_group("tp")` and so on.

    Every rank must call it with the same sizes, because creating a process group is collective. Raises ValueError if
    torch.distributed isn't initialized, or if the product of the sizes isn't the number of ranks.
    """
    grid = Grid(dp, pp, tp)
    if not dist.is_initialized():
        raise ValueError(f"a mesh of {grid} = {grid.size} needs its ranks: call it on ranks that tplab.launch started")
    if grid.size != dist.get_world_size():
        raise ValueError(
            f"{grid} = {grid.size} ranks, but there are {dist.get_world_size()}: the three sizes have to multiply to "
            "the number of ranks"
        )
    return init_device_mesh(device().type, (dp, pp, tp), mesh_dim_names=DIMENSIONS)
