"""Chapter 11: the time of one matmul on a GPU, from its FLOPs, the tiles it is computed in, and the bytes it moves.

    y [m, n] = x [m, k] w [k, n]        2 m n k FLOPs        2 (m k + k n + m n) bytes of 16-bit values

A GPU computes y in tiles, each on one of its multiprocessors (SMs). All SMs work through one wave of tiles after
another, and in the last wave some SMs have nothing to do, so 109 tiles take as long as 216 on 108 SMs. With large
tiles, x and w are read less often, but because there are fewer tiles, the last wave wastes more time. A library such as
cuBLAS has tiles of several sizes and chooses the fastest. (NVIDIA, "Matrix Multiplication Background User's Guide",
sections 4 and 6.)

The time of the bytes is added to that of the FLOPs, as in Calculon ("no_overlap" in its A100 file), because a matmul
starts by loading tiles and ends by storing them, and every layer consists of matmuls that wait for each other.
"""

from dataclasses import dataclass
from math import ceil

from tplab.cost.machines import Machine

TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.9))  # rows, columns, and the rate relative to the largest tiles


@dataclass(frozen=True)
class Matmul:
    """`count` independent matmuls of [m, k] and [k, n] in one kernel. Sizes are in elements and may be fractional."""

    m: float
    k: float
    n: float
    count: float = 1

    @property
    def flops(self) -> float:
        return 2 * self.m * self.k * self.n * self.count

    @property
    def bytes(self) -> float:
        return 2 * (self.m * self.k + self.k * self.n + self.m * self.n) * self.count

    def backward(self) -> tuple["Matmul", "Matmul"]:
        """Return the two matmuls of the backward pass: dx = dy wᵀ and dw = xᵀ dy."""
        return Matmul(self.m, self.n, self.k, self.count), Matmul(self.k, self.m, self.n, self.count)

    def occupancy(self, multiprocessors: int) -> float:
        """Return the share of the large matmuls' rate that the best tiles reach, or 1 if `multiprocessors` is 0."""
        if not multiprocessors:
            return 1.0
        return max(
            rate * self.m * self.n * self.count / (waves * multiprocessors * rows * columns)
            for rows, columns, rate in TILES
            for waves in [ceil(ceil(self.m / rows) * ceil(self.n / columns) * self.count / multiprocessors)]
        )

    def seconds(self, machine: Machine, *, moves: float | None = None) -> float:
        """Return the time on one GPU. `moves` is the number of bytes to count instead of those of x, w and y."""
        computing = self.flops / machine.rate / self.occupancy(machine.losses.multiprocessors)
        if not machine.losses.matmul_traffic:
            return computing
        return computing + (self.bytes if moves is None else moves) / machine.memory_rate
