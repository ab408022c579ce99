"""Chapter 11: the time of one transformer layer on one of the tp ranks that share it.

    matmuls          this rank's share of them, each with its FLOPs, its tiles and its bytes: see `tplab.cost.matmul`
    elementwise      bytes that norms, dropout, residuals, activation and softmax read and write / memory bandwidth
    launches         the gaps between kernels
    communication    the collectives of tensor parallelism, alpha-beta, in a ring
    hidden           the part of the communication that overlaps with a matmul
    total            products + elementwise + launches + communication - hidden

With T = b s tokens (sequence parallelism shards [T, h] along T), S = T s heads/tp scores, and 16-bit values:

    bytes                                  forward                       backward
    a norm (two per layer)                 4Th   read, write             6Th    read dy and x, write dx
    dropout and residual (two per layer)   7Th   x, residual, mask, y    11Th   dropout 5, adding two gradients 6
    activation                             4Tf/tp                        6Tf/tp                (gated: 6 and 10)
    scores, softmax, their dropout         13S                           19S                   (FlashAttention: none)

    bookkeeping
    copies to another layout               4Th/tp   the context          4T(2h + 2kv)/tp       (FlashAttention: none)
    bias gradients, each a sum over dy                                   2T(h + 2kv + f)/tp + 4Th

    collectives                            forward                       backward
    tensor parallel                        2 all-reduce [T, h]           2 all-reduce [T, h]
    sequence parallel                      2 all-gather,                 2 reduce-scatter, 2 all-gather, and the inputs
                                           2 reduce-scatter              gathered again: 2 all-gather beside a matmul

Without dropout, its masks and passes are left out. With `overlap`, the input gradient of a column-parallel weight is
summed while the weight gradient is computed. Each such pair takes as long as the slower of the two operations, and the
collective slows the matmul down, because it needs some of the SMs for itself.

How far can you trust the model? The ten published forward and backward times of a layer on A100s are within 4% of its
predictions (tests/cost/test_published.py). It leaves out the time spent waiting for the slowest rank. (The collectives:
Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.2, and 6.2 for the overlap.)
"""

from dataclasses import dataclass, fields
from functools import lru_cache

from tplab.cost.collective import all_gather, all_reduce, reduce_scatter
from tplab.cost.flops import column_products, layer_scores
from tplab.cost.machines import Machine
from tplab.cost.matmul import Matmul
from tplab.memory.config import GPTConfig, Recompute, check_tensor_parallel
from tplab.memory.memory_bill import layer_activations


@dataclass(frozen=True)
class Pass:
    """The time in seconds of one pass through a layer, or through several layers, by category."""

    products: float = 0.0
    elementwise: float = 0.0
    communication: float = 0.0
    hidden: float = 0.0
    launches: float = 0.0

    @property
    def compute(self) -> float:
        return self.products + self.elementwise + self.launches

    @property
    def exposed(self) -> float:
        """The time in seconds of the communication that isn't hidden."""
        return self.communication - self.hidden

    @property
    def total(self) -> float:
        return self.compute + self.exposed

    def __add__(self, other: "Pass") -> "Pass":
        return Pass(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(self)))

    def __mul__(self, times: float) -> "Pass":
        return Pass(*(getattr(self, part.name) * times for part in fields(self)))


@dataclass(frozen=True)
class LayerTime:
    """A layer's time for one micro-batch, in seconds. `recompute` is the part of forward that backward repeats."""

    forward: Pass
    recompute: Pass
    backward: Pass

    @property
    def whole(self) -> Pass:
        return self.forward + self.recompute + self.backward

    @property
    def total(self) -> float:
        return self.whole.total


@lru_cache(maxsize=65536)
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
    """Return the time of one layer for `micro_batch` sequences on tp adjacent ranks that start at a node's first GPU.

    recompute, sequence_parallel: as in `tplab.memory.memory_bill.layer_activations`; overlap: as `async_grad_allreduce`

    Raises ValueError if tp doesn't fit the model or the sequence.
    """
    check_tensor_parallel(config, tp)
    layer_activations(config, micro_batch, tp, sequence_parallel=sequence_parallel, recompute=recompute)  # validates
    tokens = micro_batch * config.seq_length
    weights = layer_matmuls(config, tokens, tp)
    products = sum(matmul.seconds(machine) for matmul in weights.values())
    gradients = sum(matmul.seconds(machine) for forward in weights.values() for matmul in forward.backward())
    scores, scores_backward = score_time(config, machine, tokens, tp)
    between = tokens // tp if sequence_parallel else tokens
    blocks, blocks_backward = _between_bytes(config, between)
    inner, inner_backward = (count * tokens * config.ffn_size / tp for count in ((6, 10) if config.gated else (4, 6)))
    layout, layout_backward = _bookkeeping_bytes(config, tokens, tp, between) if machine.losses.bookkeeping else (0, 0)
    kernels = len(weights) + 2 + 2 + 1  # norms, dropouts with their residuals, activation
    link, size = machine.link(tp), 2 * tokens * config.hidden_size
    again, summing = 0.0, all_reduce(link, size, tp, "fastest")
    if sequence_parallel:
        again, summing = all_gather(link, size, tp), reduce_scatter(link, size, tp)
    messages = 2 * (again + summing)
    beside = [again, summing] if overlap else [again]  # beside dX = dY A^T, and beside the weight's gradient
    columns = [weights[name].backward()[1].seconds(machine) for name in column_products(config)]
    hidden = sum(_hidden(machine, communication, product) for product in columns for communication in beside)

    forward = scores + Pass(
        products, (blocks + inner + layout) / machine.memory_rate, messages, launches=kernels * machine.losses.launch
    )
    backward = scores_backward + Pass(
        gradients, (blocks_backward + inner_backward + layout_backward) / machine.memory_rate,
        messages + again * len(columns), hidden,
        2 * kernels * machine.losses.launch,
    )  # fmt: skip
    repeated = {"nothing": Pass(), "attention": scores, "layers": forward}[recompute]
    return LayerTime(forward, repeated, backward)


def layer_matmuls(config: GPTConfig, tokens: int, tp: int) -> dict[str, Matmul]:
    """Return one tp rank's forward matmuls that involve a layer's weights, by name. Gate and up are one matmul."""
    h, kv, ffn = config.hidden_size, config.kv_heads * config.head_dim, config.ffn_size
    return {
        "Q, K and V": Matmul(tokens, h, (h + 2 * kv) / tp),
        "attention's output": Matmul(tokens, h / tp, h),
        "MLP": Matmul(tokens, h, (2 if config.gated else 1) * ffn / tp),
        "MLP's output": Matmul(tokens, ffn / tp, h),
    }


def score_time(config: GPTConfig, machine: Machine, tokens: int, tp: int) -> tuple[Pass, Pass]:
    """Return the (forward, backward) time of Q K^T, softmax, dropout and P V in one layer.

    FlashAttention computes only the unmasked half of the scores and keeps none of them in GPU memory. Its backward pass
    takes five matmuls, compared with two in the forward pass (Dao 2023, "FlashAttention-2", section 4.1).
    """
    s, d, launch = config.seq_length, config.head_dim, machine.losses.launch
    heads = tokens / s * config.num_heads / tp  # in all sequences
    if config.flash_attention:
        products = tokens * layer_scores(config) / tp / machine.rate
        return Pass(products / 2, launches=launch), Pass(products / 2 * 5 / 2, launches=launch)
    scores, values = Matmul(s, d, s, heads), Matmul(s, s, d, heads)
    beside = 2 * 2 * s * d * heads  # bytes of two factors [s, d]; those of the scores [s, s] are counted below
    forward = sum(matmul.seconds(machine, moves=beside) for matmul in (scores, values))
    backward = sum(matmul.seconds(machine, moves=beside) for one in (scores, values) for matmul in one.backward())
    count = heads * s * s
    read_and_written, kernels = ((13, 19), 2 + 2) if config.dropout else ((8, 14), 2 + 1)  # bytes per score
    elementwise, elementwise_backward = (number * count / machine.memory_rate for number in read_and_written)
    return (
        Pass(forward, elementwise, launches=kernels * launch),
        Pass(backward, elementwise_backward, launches=2 * kernels * launch),
    )


def _hidden(machine: Machine, communication: float, product: float) -> float:
    """Return the seconds that overlapping a message with a matmul saves, which is the shorter of their times.

    Contention is subtracted from the communication's time, because it makes the matmul slower.
    """
    return min(communication * (1 - machine.losses.contention), product)


def _between_bytes(config: GPTConfig, tokens: int) -> tuple[int, int]:
    """Return the (forward, backward) bytes that two norms and two dropouts with their residuals read and write."""
    forward, backward = (4 + 7, 6 + 11) if config.dropout else (4 + 6, 6 + 6)
    return 2 * forward * tokens * config.hidden_size, 2 * backward * tokens * config.hidden_size


def _bookkeeping_bytes(config: GPTConfig, tokens: int, tp: int, between: int) -> tuple[float, float]:
    """Return the (forward, backward) bytes that autograd's own passes over memory read and write.

    Each bias gradient reads its layer's dy. Without FlashAttention, forward copies the context to another layout, and
    backward copies the gradients of the context, Q, K and V.
    """
    h, qkv = config.hidden_size, config.hidden_size + 2 * config.kv_heads * config.head_dim
    biases = 2 * (tokens * (qkv + config.ffn_size) / tp + 2 * between * h) if config.bias else 0
    if config.flash_attention:
        return 0, biases
    return 4 * tokens * h / tp, biases + 4 * tokens * (h + qkv) / tp
