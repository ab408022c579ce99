"""Chapter 11: the machines whose times we predict, with the speed of a single GPU and the links between GPUs.

    matmuls             FLOPs / (flops · fraction)        fraction: share of the theoretical peak that large ones reach
    all other work      bytes read and written / bandwidth of the GPU's own memory
    a message           a Link: alpha + beta · bytes, one for GPUs in one node, one for GPUs in different nodes

If a group of p ranks spans several nodes, with k of its ranks in each, it can use k network adapters per node. So its
ring can cross between nodes in k places at the same time, each with 1/k of the bytes (see `Machine.link`).

`MACHINES` contains published values, each with its source.
"""

from dataclasses import dataclass, field, replace

from tplab.collectives.links import Link

GB = 10**9


@dataclass(frozen=True)
class Losses:
    """What keeps a GPU below its peak performance in a real layer. By default, there are no losses.

    matmul_traffic    a matmul takes the time of its FLOPs plus the time of the bytes that it reads and writes
    multiprocessors   SMs that share the tiles of a matmul (wave quantization, see `tplab.cost.matmul`); 0: no tiles
    ring              share of the bandwidth inside a node that the large messages of a ring reach
    memory            share of the memory bandwidth that element-wise kernels reach
    contention        share of the SMs that a collective keeps busy while it runs beside a matmul
    launch            seconds from the end of a kernel to the start of the next one
    bookkeeping       autograd's own passes over memory: bias gradients, sums of the micro-batches' weight gradients,
                      and copies of Q, K, V and the context to another layout (without FlashAttention)
    """

    matmul_traffic: bool = False
    multiprocessors: int = 0
    ring: float = 1.0
    memory: float = 1.0
    contention: float = 0.0
    launch: float = 0.0
    bookkeeping: bool = False


@dataclass(frozen=True)
class Machine:
    """A cluster of identical nodes. Raises ValueError for impossible values, such as a bandwidth of 0.

    flops           peak of one GPU in FLOP/s, for dense matmuls of 16-bit values
    fraction        share of this peak that large matmuls reach
    memory          bytes per GPU
    bandwidth       bytes per second between that memory and the GPU's cores
    gpus_per_node   number of GPUs per node
    inside          link between two GPUs of a node, in one direction
    between         link between GPUs of different nodes, in one direction, when all GPUs of the node send
    losses          what keeps a real layer below these values
    sources         the source of each value, beginning with "estimate" if nobody has published it
    """

    name: str
    flops: float
    fraction: float
    memory: int
    bandwidth: float
    gpus_per_node: int
    inside: Link
    between: Link
    losses: Losses = Losses()
    sources: dict[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for name in ("flops", "memory", "bandwidth", "gpus_per_node"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} of {self.name!r} must be positive")
        for share in (self.fraction, self.losses.ring, self.losses.memory, 1 - self.losses.contention):
            if not 0 < share <= 1:
                raise ValueError(
                    f"{self.name!r} has fraction={self.fraction} and {self.losses}: fraction, ring and memory should "
                    "be shares above 0, up to 1, and contention a share below 1"
                )

    @property
    def rate(self) -> float:
        """FLOP/s of large matmuls."""
        return self.flops * self.fraction

    @property
    def memory_rate(self) -> float:
        """Bytes per second that element-wise kernels read and write."""
        return self.bandwidth * self.losses.memory

    def link(self, p: int, stride: int = 1) -> Link:
        """Return the link between neighbors in a ring of p ranks that are `stride` GPUs apart. Nodes fill up in order.

        If all ranks are in one node, the link is `inside`, with its bandwidth multiplied by `losses.ring`. If there are
        k ranks in each of several nodes, the ring crosses between two nodes at k places at the same time. So the link
        is `between` with k times its bandwidth, but never faster than within a node. (NCCL builds such rings, one per
        adapter.) Every step has the alpha of `between`, which overestimates the steps inside a node. Raises ValueError
        for less than one rank, or a stride below 1.
        """
        if p < 1 or stride < 1:
            raise ValueError(f"a group has p >= 1 ranks that stand stride >= 1 GPUs apart, got {p=}, {stride=}")
        if p == 1 or p * stride <= self.gpus_per_node:
            return replace(self.inside, beta=self.inside.beta / self.losses.ring)
        in_a_node = max(self.gpus_per_node // stride, 1)
        beta = max(self.between.beta / in_a_node, self.inside.beta / self.losses.ring)
        return Link(self.between.alpha, beta)


_NVLINK_ALPHA, _NETWORK_ALPHA = 3.4e-6, 14e-6  # seconds: NVIDIA/nccl b647562, src/graph/tuning.cc, hwLat, Ring, Simple
_HOPPER_SWITCH, _BLACKWELL_SWITCH = 0.85, 0.74


def _nvlink(links: int, gigabytes: float, switch: float = 0.0) -> Link:
    """Return the link that a GPU's `links` NVLinks form together (NVIDIA/nccl, src/graph/topo.h).

    gigabytes the GB/s that NCCL's rings reach over each of them
    switch    the share of their bandwidth that sums in the switch reach (src/graph/tuning.cc, nvlsEfficiency), or 0
    """
    bandwidth = links * gigabytes * GB
    return Link(_NVLINK_ALPHA, 1 / bandwidth, switch * bandwidth)


def _network(gigabytes: float) -> Link:
    return Link(_NETWORK_ALPHA, 1 / (gigabytes * GB))


_MATMUL = "Bekman, Machine Learning Engineering, compute/accelerator, Maximum Achievable Matmul FLOPS"
_HOPPER_FRACTION = f"794.5 of 989 TFLOP/s on an H100 SXM: {_MATMUL}"
_HOPPER_PEAK = "dense, that is half of the figure with sparsity: NVIDIA {} data sheet"


def _losses(multiprocessors: int) -> Losses:
    """Return the losses of NVIDIA's GPUs with NVLink. Their shares are those in Calculon's file for the A100.

    Calculon assumes that 195 of NVLink's 300 GB/s are reached (efficiency 0.65), and `inside` is the 240 GB/s that NCCL
    reaches at best. For newer GPUs, we know of no published shares, so these are estimates there. A kernel takes about
    5 microseconds to launch (NVIDIA, "Getting Started with CUDA Graphs", developer blog, 2019).
    """
    return Losses(True, multiprocessors, ring=195 / 240, memory=0.9, contention=0.15, launch=5e-6, bookkeeping=True)


MACHINES: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        Machine(
            "V100 DGX-2H", flops=2.1e15 / 16, fraction=101 / 112, memory=32 * GB, bandwidth=900e9, gpus_per_node=16,
            inside=_nvlink(6, 20.0),  # SM70_NVLINK_BW
            between=_network(100 / 16),  # 100 GB/s a server of 16 GPUs, 8 adapters: Shoeybi et al. 2019, section 5
            losses=replace(_losses(80), ring=1.0),  # Calculon has no file for it, and NCCL's constant is 80% of NVLink
            sources={
                "flops": "2.1 PFLOP/s for 16 GPUs: NVIDIA DGX-2H data sheet",
                "fraction": "101 of 112 TFLOP/s, [8192, 8192] matrices on a V100 PCIe: NVIDIA developer forums, 79781",
                "memory": "Shoeybi et al. 2019, section 5",
                "bandwidth": "NVIDIA V100 architecture whitepaper",
            },
        ),
        Machine(
            "A100 DGX", flops=312e12, fraction=271.2 / 312, memory=80 * GB, bandwidth=2039e9, gpus_per_node=8,
            inside=_nvlink(12, 20.0),  # SM80_NVLINK_BW
            between=_network(25),  # 8 adapters of 200 Gb/s for 8 GPUs: Korthikanti et al. 2022, section 6
            losses=_losses(108),
            sources={
                "flops": "Narayanan et al. 2021, section 5; NVIDIA A100 data sheet",
                "fraction": f"271.2 of 312 TFLOP/s on an A100 SXM: {_MATMUL}",
                "memory": "Narayanan et al. 2021, section 5",
                "bandwidth": "NVIDIA A100 data sheet, A100 80GB SXM",
            },
        ),
        Machine(
            "H100 DGX", flops=989e12, fraction=794.5 / 989, memory=80 * GB, bandwidth=3350e9, gpus_per_node=8,
            inside=_nvlink(18, 20.6, _HOPPER_SWITCH),  # SM90_NVLINK_BW
            between=_network(50),  # 8 adapters of 400 Gb/s for 8 GPUs: NVIDIA DGX H100 data sheet
            losses=_losses(132),
            sources={
                "flops": _HOPPER_PEAK.format("H100"),
                "fraction": _HOPPER_FRACTION,
                "memory": "NVIDIA H100 data sheet, H100 SXM",
                "bandwidth": "NVIDIA H100 data sheet, H100 SXM",
            },
        ),
        Machine(
            "H200 DGX", flops=989e12, fraction=794.5 / 989, memory=141 * GB, bandwidth=4800e9, gpus_per_node=8,
            inside=_nvlink(18, 20.6, _HOPPER_SWITCH),  # SM90_NVLINK_BW
            between=_network(50),  # 8 adapters of 400 Gb/s for 8 GPUs: NVIDIA DGX H200 data sheet
            losses=_losses(132),
            sources={
                "flops": _HOPPER_PEAK.format("H200"),
                "fraction": f"the same chip: {_HOPPER_FRACTION}",
                "memory": "NVIDIA H200 data sheet",
                "bandwidth": "NVIDIA H200 data sheet",
            },
        ),
        Machine(
            "B200 DGX", flops=2250e12, fraction=1745 / 2250, memory=180 * GB, bandwidth=8000e9, gpus_per_node=8,
            inside=_nvlink(18, 40.1, _BLACKWELL_SWITCH),  # SM100_NVLINK_BW
            between=_network(50),  # 8 adapters of 400 Gb/s for 8 GPUs: NVIDIA DGX B200 data sheet
            losses=_losses(148),
            sources={
                "flops": _HOPPER_PEAK.format("DGX B200"),
                "fraction": f"1745 of 2250 TFLOP/s on a B200 SXM: {_MATMUL}",
                "memory": "1,440 GB for 8 GPUs: NVIDIA DGX B200 user guide",
                "bandwidth": "64 TB/s for 8 GPUs: NVIDIA DGX B200 data sheet",
            },
        ),
        Machine(
            "GB200 NVL72", flops=2500e12, fraction=1745 / 2250, memory=186 * GB, bandwidth=8000e9, gpus_per_node=72,
            inside=_nvlink(18, 40.1, _BLACKWELL_SWITCH),  # SM100_NVLINK_BW
            between=_network(50),  # an adapter of 400 Gb/s per GPU: NVIDIA DGX GB200 user guide
            losses=_losses(148),
            sources={
                "flops": f"360 PFLOP/s with sparsity for 72 GPUs, {_HOPPER_PEAK.format('GB200 NVL72')}",
                "fraction": "estimate: the share that matmuls reach on a B200 SXM",
                "memory": "13.4 TB for 72 GPUs: NVIDIA GB200 NVL72 data sheet",
                "bandwidth": "576 TB/s for 72 GPUs: NVIDIA GB200 NVL72 data sheet",
            },
        ),
    )
}  # fmt: skip


def machine(name: str) -> Machine:
    """Return the machine in `MACHINES` whose name starts with `name`, ignoring case: "h100" is "H100 DGX".

    Raises ValueError, listing the known names, unless exactly one machine matches.
    """
    found = [known for key, known in MACHINES.items() if name and key.lower().startswith(name.strip().lower())]
    if len(found) != 1:
        raise ValueError(f"no machine is called {name!r}; known: {', '.join(MACHINES)}")
    return found[0]
