"""Chapter 01: the cost of a message. Its time is modeled as linear in its size: t(n) = alpha + beta n.

    alpha   latency: seconds that any message takes, however small
    beta    seconds per additional byte; 1/beta is the bandwidth

In this model, an all-reduce of N bytes over p ranks takes (if additions are free and no other traffic uses the links)

    ring    2(p-1) (alpha + beta N/p)
    tree    2 ceil(log2 p) (alpha + beta N)

So a tree is faster where alpha dominates, that is, for small N and many ranks. A ring is faster where beta dominates.
(Hockney 1994, "The communication challenge for MPP"; Thakur, Rabenseifner and Gropp 2005, "Optimization of collective
communication operations in MPICH".)
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from tplab.collectives.by_hand import ring_all_reduce, tree_all_reduce, tree_depth
from tplab.runtime import device

Point = tuple[int, float]  # message size in bytes, time in seconds


@dataclass(frozen=True)
class Link:
    """A connection between two ranks: `alpha` seconds per message, plus `beta` seconds per byte.

    switch    bytes per second that a rank sends to a switch that adds up the ranks' tensors (NVIDIA calls this NVLS),
              or 0 if the switch only forwards messages
    """

    alpha: float
    beta: float
    switch: float = 0.0

    @property
    def bandwidth(self) -> float:
        """Bytes per second in one direction, for messages large enough that alpha doesn't matter."""
        return 1 / self.beta

    def seconds(self, size: float) -> float:
        """Return the time it takes to send a message of `size` bytes."""
        return self.alpha + self.beta * size

    def ring_all_reduce(self, size: float, p: int) -> float:
        """Return the time of an all-reduce of `size` bytes over p ranks in a ring."""
        return 2 * (p - 1) * self.seconds(size / p)

    def tree_all_reduce(self, size: float, p: int) -> float:
        """Return the time of an all-reduce of `size` bytes over p ranks along a binomial tree."""
        return 2 * tree_depth(p) * self.seconds(size)

    def switch_all_reduce(self, size: float, p: int) -> float:
        """Return the time of an all-reduce of `size` bytes over p ranks if the switch adds up the tensors.

        Each rank sends its full tensor to the switch once. It also sends 1/p of the sum, which the switch forwards to
        all ranks. Raises ValueError if the switch can't add tensors (switch=0).
        """
        if not self.switch:
            raise ValueError("switch=0: nothing on this link adds up messages, so use a ring or a tree")
        return (SWITCH_ALPHA + (1 + 1 / p) * size / self.switch) if p > 1 else 0.0


# The latency of an all-reduce in the switch, in seconds: NVIDIA/nccl, src/graph/tuning.cc, hwLat, NVLS over NVLink
SWITCH_ALPHA = 25e-6


def _published(microseconds: float, gigabytes: float) -> Link:
    return Link(microseconds * 1e-6, 1 / (gigabytes * 1e9))


# The bandwidth is in GB/s (10^9 bytes) per GPU and direction. For NVLink, vendors quote the sum of both directions.
# Alpha is what NCCL assumes for one ring step with the protocol that reaches the full bandwidth (NVIDIA/nccl b647562,
# src/graph/tuning.cc, hwLat, Ring with protocol Simple): 3.4 us over NVLink, 5.7 us over PCIe, and 14 us over the
# network. (Its LL protocol takes 0.6, 1.0 and 2.7 us, and reaches a quarter of the bandwidth in this commit. Since June
# 2026, NCCL's main branch has assumed half of the bandwidth for LL.)
PUBLISHED = {
    "NVLink 5": _published(3.4, 900),  # 1.8 TB/s in both directions: NVIDIA Blackwell architecture technical brief
    "NVLink 4": _published(3.4, 450),  # 900 GB/s in both directions: NVIDIA H100 architecture whitepaper
    "NVLink 3": _published(3.4, 300),  # 600 GB/s in both directions: NVIDIA A100 architecture whitepaper
    "PCIe 5.0 x16": _published(5.7, 16 * 32 / 8 * 128 / 130),  # 16 lanes of 32 GT/s, 128b/130b: PCI-SIG, PCIe 5.0
    "InfiniBand NDR": _published(14.0, 50),  # 400 Gb/s, 4 lanes: InfiniBand Trade Association, roadmap
    "PCIe 4.0 x16": _published(5.7, 16 * 16 / 8 * 128 / 130),  # 16 lanes of 16 GT/s, 128b/130b: PCI-SIG, PCIe 4.0
    "InfiniBand HDR": _published(14.0, 25),  # 200 Gb/s, 4 lanes: InfiniBand Trade Association, roadmap
}


def fit(points: Iterable[Point]) -> Link:
    """Fit a link to measured (bytes, seconds), minimizing the relative error.

    The fit minimizes the sum of ((alpha + beta n - t) / t)^2, which is a linear problem in alpha and beta. We use
    relative errors because the times span several orders of magnitude. With plain least squares, an error of 10% in the
    time of the largest message would outweigh all the small messages, which determine alpha. (With such errors and
    sizes from 4 B to 16 MiB, the median error of alpha is 33% with plain least squares, but 1.5% here.) alpha is never
    negative. Raises ValueError for fewer than two different sizes, a time that isn't positive, or times that don't grow
    with the size.
    """
    points = list(points)
    sizes = torch.tensor([size for size, _ in points], dtype=torch.float64)
    times = torch.tensor([seconds for _, seconds in points], dtype=torch.float64)
    if len({size for size, _ in points}) < 2:
        raise ValueError(f"a line needs messages of at least two sizes, got {sorted({size for size, _ in points})}")
    if not bool((times > 0).all()):
        raise ValueError(f"every time must be positive, got {times.min().item()} s")
    one, size = 1 / times, sizes / times  # alpha · one + beta · size should be 1
    (a, b), (c, d) = ((one @ one, one @ size), (one @ size, size @ size))
    right = one.sum(), size.sum()
    alpha = float((right[0] * d - b * right[1]) / (a * d - b * c))
    beta = float((a * right[1] - c * right[0]) / (a * d - b * c))
    if alpha < 0:  # the best fit with alpha = 0
        alpha, beta = 0.0, float(right[1] / d)
    if beta <= 0:
        raise ValueError(f"larger messages don't take longer in these points: no line with a bandwidth fits ({beta=})")
    return Link(alpha, beta)


SIZES = tuple(4 * 4**k for k in range(12))  # 4 B to 16 MiB
_IN_A_ROW = 4


def measure_link(sizes: Sequence[int] = SIZES, *, rounds: int = 10, group: ProcessGroup | None = None) -> list[Point]:
    """Measure (bytes, seconds) for messages between the group's first two ranks. All ranks of the group must call this.

    Each time is half of the shortest of many round trips, because other work on the machine can only make a round trip
    longer. Each round covers all sizes, so that a busy moment doesn't affect all measurements of one size. A round
    sends each size a few times in a row, because the first messages after a large one are slower. Rank 0 measures, and
    all ranks return its results. Raises ValueError for a group of one rank.
    """
    rank, p = dist.get_rank(group), dist.get_world_size(group)
    if p < 2:
        raise ValueError("a link has two ends: measure it on at least 2 ranks")
    shortest = torch.full((len(sizes),), float("inf"), dtype=torch.float64, device=device())
    messages = [torch.zeros(size, dtype=torch.uint8, device=device()) for size in sizes]
    for _ in range(rounds if rank < 2 else 0):
        for index, message in enumerate(messages):
            seconds = min(_half_round_trip(message, rank, group) for _ in range(_IN_A_ROW))
            shortest[index] = min(shortest[index].item(), seconds)
    dist.broadcast(shortest, group=group, group_src=0)
    return list(zip(sizes, shortest.tolist(), strict=True))


def _half_round_trip(message: torch.Tensor, rank: int, group: ProcessGroup | None) -> float:
    began = now()
    if rank == 0:
        dist.send(message, group=group, group_dst=1)
        dist.recv(message, group=group, group_src=1)
    else:
        dist.recv(message, group=group, group_src=0)
        dist.send(message, group=group, group_dst=0)
    return (now() - began) / 2


def measure_all_reduces(sizes: Sequence[int], *, rounds: int = 20) -> dict[str, list[float]]:
    """Measure how many seconds an all-reduce of each size takes in a ring and a tree: {"ring": [..], "tree": [..]}.

    sizes: bytes of the float32 tensors, multiples of 4

    All ranks must call this. Each time is the slowest rank's time in the fastest of several rounds. A barrier precedes
    every all-reduce, because a rank that starts late would count as slow. All ranks return the same times.
    """
    ways = {"ring": ring_all_reduce, "tree": tree_all_reduce}
    shortest = torch.full((len(ways), len(sizes)), float("inf"), dtype=torch.float64, device=device())
    for _ in range(rounds):
        for column, size in enumerate(sizes):
            for row, way in enumerate(ways.values()):
                x = torch.zeros(size // 4, device=device())
                dist.barrier()
                began = now()
                way(x)
                slowest = torch.tensor(now() - began, dtype=torch.float64, device=device())
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                shortest[row, column] = torch.minimum(shortest[row, column], slowest)
    return dict(zip(ways, shortest.tolist(), strict=True))


def now() -> float:
    """Return the current time in seconds, after the GPU (if there is one) has finished all pending work."""
    if torch.cuda.is_available() and device().type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
