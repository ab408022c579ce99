"""Chapter 11: the time of one transformer layer on one of the tp ranks that share it.

    products         FLOPs of this rank's share / rate of large matmuls
    elementwise      bytes that norms, dropout, residuals, activation, softmax read and write / memory bandwidth
    communication    the collectives of tensor parallelism, alpha-beta, in a ring
    hidden           the part of the communication that overlaps with a matmul
    total            products + elementwise + communication - hidden

With T = b s tokens (sequence parallelism shards [T, h] along the sequence), S = T s heads/tp scores, 16-bit values:

    bytes                                  forward                       backward
    a norm (two per layer)                 4Th   read, write             6Th    read dy and x, write dx
    dropout and residual (two per layer)   7Th   x, residual, mask, y    11Th   dropout 5, adding two gradients 6
    activation                             4Tf/tp                        6Tf/tp                (gated: 6 and 10)
    scores, softmax, their dropout         13S                           19S                   (FlashAttention: none)

    collectives                            forward                       backward
    tensor parallel                        2 all-reduce [T, h]           2 all-reduce [T, h]
    sequence parallel                      2 all-gather,                 2 reduce-scatter, 2 all-gather, and the inputs
                                           2 reduce-scatter              gathered again: 2 all-gather beside a matmul

Without dropout, these masks and passes are left out. With `overlap`, the input gradient of a column-parallel weight is
summed while the weight gradient is computed, and each such pair takes as long as the slower of the two.

Every real layer is slower, because the formulas leave things out: matmuls of shards are smaller than the large ones
whose rate we use, kernels take time to launch, overlapping operations slow each other down, and ranks wait for the
slowest. On A100s, published layers and steps take 15 to 30 % longer than predicted, small layers even more. (The
collectives: Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.2, and 6.2 for the overlap.)
"""

from dataclasses import dataclass, fields

from tplab.cost.collective import all_gather, all_reduce, reduce_scatter
from tplab.cost.flops import column_products, layer_products, layer_scores
from tplab.cost.machines import Machine
from tplab.memory.config import GPTConfig, Recompute, check_tensor_parallel
from tplab.memory.memory_bill import layer_activations


@dataclass(frozen=True)
class Pass:
    """Seconds of one pass through a layer, or through several layers, by category."""

    products: float = 0.0
    elementwise: float = 0.0
    communication: float = 0.0
    hidden: float = 0.0

    @property
    def compute(self) -> float:
        return self.products + self.elementwise

    @property
    def exposed(self) -> float:
        """Seconds of communication that aren't hidden."""
        return self.communication - self.hidden

    @property
    def total(self) -> float:
        return self.compute + self.exposed

    def __add__(self, other: "Pass") -> "Pass":
        return Pass(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(self)))

    def __mul__(self, times: float) -> "Pass":
        return Pass(*(getattr(self, part.name) * times for part in fields(self)))

    def parts(self) -> dict[str, float]:
        return {
            "matrix products": self.products, "element-wise": self.elementwise, "communication": self.exposed,
        }  # fmt: skip


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer for one micro-batch. `recompute` is the part of the forward pass that backward repeats."""

    forward: Pass
    recompute: Pass
    backward: Pass

    @property
    def whole(self) -> Pass:
        return self.forward + self.recompute + self.backward

    @property
    def total(self) -> float:
        return self.whole.total


@dataclass(frozen=True)
class Overlap:
    """Two operations that can overlap in the backward pass of one column-parallel weight, in seconds."""

    name: str
    communication: float  # summing the gradient of the input over ranks
    product: float  # the gradient of the weight

    @property
    def hidden(self) -> float:
        return min(self.communication, self.product)

    @property
    def share(self) -> float:
        """The fraction of the communication that is hidden, or 1 with a single rank, which doesn't communicate."""
        return self.hidden / self.communication if self.communication else 1.0


def layer_time(
    config: GPTConfig,
    machine: Machine,
    *,
    micro_batch: int = 1,
    tp: int = 1,
    sequence_parallel: bool = False,
    recompute: Recompute = "nothing",
    overlap: bool = False,
) -> LayerTime:
    """Return the time of one layer for `micro_batch` sequences on tp adjacent ranks, starting at the first of a node.

    recompute, sequence_parallel: as in `tplab.memory.memory_bill.layer_activations`; overlap: as `async_grad_allreduce`
    Raises ValueError if tp doesn't fit the model or the sequence.
    """
    check_tensor_parallel(config, tp)
    layer_activations(config, micro_batch, tp, sequence_parallel=sequence_parallel, recompute=recompute)  # validates
    tokens = micro_batch * config.seq_length
    weights = tokens * layer_products(config) / tp / machine.rate
    scores, scores_backward = score_time(config, machine, tokens, tp)
    between, between_backward = _between_bytes(config, tokens // tp if sequence_parallel else tokens)
    inner, inner_backward = (count * tokens * config.ffn_size / tp for count in ((6, 10) if config.gated else (4, 6)))
    link, size = machine.link(tp), 2 * tokens * config.hidden_size
    if sequence_parallel:
        messages = 2 * (all_gather(link, size, tp) + reduce_scatter(link, size, tp))
    else:
        messages = 2 * all_reduce(link, size, tp)
    pairs = overlap_saving(config, machine, micro_batch=micro_batch, tp=tp, sequence_parallel=sequence_parallel)
    again = all_gather(link, size, tp) if sequence_parallel else 0.0  # once per pair, beside dX = dY A^T
    hidden = sum(min(again, pair.product) + (pair.hidden if overlap else 0.0) for pair in pairs)

    forward = Pass(weights, (between + inner) / machine.bandwidth, messages) + scores
    backward = Pass(
        2 * weights, (between_backward + inner_backward) / machine.bandwidth, messages + again * len(pairs), hidden
    )
    repeated = {"nothing": Pass(), "attention": scores, "layers": forward}[recompute]
    return LayerTime(forward, repeated, backward + scores_backward)


def score_time(config: GPTConfig, machine: Machine, tokens: int, tp: int) -> tuple[Pass, Pass]:
    """Return the (forward, backward) time of Q K^T, softmax, dropout and P V of one layer.

    FlashAttention computes only the unmasked half of the scores and keeps none in GPU memory. Its backward pass takes
    five matmuls for the two of the forward pass (Dao 2023, "FlashAttention-2", section 4.1).
    """
    products = tokens * layer_scores(config) / tp / machine.rate
    if config.flash_attention:
        return Pass(products / 2), Pass(products / 2 * 5 / 2)
    count = tokens * config.seq_length * config.num_heads / tp
    read_and_written = (13, 19) if config.dropout else (8, 14)  # bytes per score
    forward, backward = (number * count / machine.bandwidth for number in read_and_written)
    return Pass(products, forward), Pass(2 * products, backward)


def overlap_saving(
    config: GPTConfig, machine: Machine, *, micro_batch: int = 1, tp: int = 1, sequence_parallel: bool = False
) -> list[Overlap]:
    """Return the operations that can overlap in the backward pass of a layer, for each column-parallel weight."""
    tokens = micro_batch * config.seq_length
    link, size = machine.link(tp), 2 * tokens * config.hidden_size
    summing = reduce_scatter(link, size, tp) if sequence_parallel else all_reduce(link, size, tp)
    return [
        Overlap(name, summing, tokens * products / tp / machine.rate)
        for name, products in column_products(config).items()
    ]


def efficiency(
    config: GPTConfig,
    machine: Machine,
    tp: int,
    *,
    micro_batch: int = 1,
    sequence_parallel: bool = False,
    recompute: Recompute = "nothing",
    overlap: bool = False,
) -> float:
    """Return t(1) / (tp t(tp)) of one layer, its parallel efficiency on tp GPUs compared with a single GPU."""
    alone = layer_time(config, machine, micro_batch=micro_batch, recompute=recompute).total
    shared = layer_time(
        config, machine, micro_batch=micro_batch, tp=tp, sequence_parallel=sequence_parallel, recompute=recompute,
        overlap=overlap,
    ).total  # fmt: skip
    return alone / (tp * shared)


def _between_bytes(config: GPTConfig, tokens: int) -> tuple[int, int]:
    """Return the bytes that two norms and two dropouts with their residuals read and write: (forward, backward)."""
    forward, backward = (4 + 7, 6 + 11) if config.dropout else (4 + 6, 6 + 6)
    return 2 * forward * tokens * config.hidden_size, 2 * backward * tokens * config.hidden_size
