"""Chapter 11: calibrate the model for the machine at hand, with the kernels of one layer at their real sizes.

On a data-center GPU, predictions are accurate enough if we assume that kernels reach fixed fractions of the peak speeds
(`tplab.cost.machines.Losses`). A laptop has no such peaks, because a matmul's speed depends on its sizes, GELU and
attention compute more than they read, and a collective shares the cores with the matmuls. So we measure each kernel of
a layer on all ranks at the same time, and predict that a step takes the sum of their times:

    layers           matmuls, element-wise kernels and attention, forward and backward
    output           the output layer and its loss, forward and backward
    optimizer        AdamW, per parameter
    communication    an all-reduce between two matmuls (`summed`), and one that runs during a matmul (`beside`), each
                     as a time per call and a time per byte

The sizes and the number of calls are all that the model knows about the program whose time it predicts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from tplab.collectives.links import now
from tplab.cost.layer import layer_matmuls
from tplab.memory.config import GPTConfig, check_tensor_parallel
from tplab.runtime import device

ROUNDS = 7
IN_A_ROW = 10  # all-reduces per round
LARGEST = 8_000_000  # the largest number of parameters that the optimizer is timed with


@dataclass(frozen=True)
class Line:
    """The time of messages in seconds: `call` for each message, plus `byte` for each of its bytes."""

    call: float = 0.0
    byte: float = 0.0

    def seconds(self, calls: float, size: float) -> float:
        """Return the time of `calls` messages with `size` bytes in total."""
        return self.call * calls + self.byte * size


@dataclass(frozen=True)
class Kernels:
    """Times in seconds of one layer's kernels for a micro-batch on one of the tp ranks, each as (forward, backward).

    `output` is the time of the output layer and its loss, forward plus backward. `optimizer` is the time per parameter.
    `summed` is the time of all-reduces that the rank waits for, and `beside` the time of all-reduces that run during a
    matmul. With one rank, both are 0. `others` maps the name of each other group to its `summed` and `beside`.
    """

    matmuls: tuple[float, float]
    elementwise: tuple[float, float]
    attention: tuple[float, float]
    output: float
    optimizer: float
    summed: Line = Line()
    beside: Line = Line()
    others: dict[str, tuple[Line, Line]] = field(default_factory=dict)


def measure_kernels(
    config: GPTConfig,
    micro_batch: int,
    tp: int,
    *,
    parameters: int = LARGEST,
    dtype: torch.dtype = torch.float32,
    group: ProcessGroup | None = None,
    others: Mapping[str, ProcessGroup] | None = None,
    rounds: int = ROUNDS,
) -> Kernels:
    """Measure one layer's kernels for a micro-batch, on all tp ranks at the same time.

    parameters   number of parameters per rank, for timing the optimizer, which gets at most `LARGEST`
    group        the tp ranks, whose all-reduces are timed (None: all ranks)
    others       groups whose all-reduces are timed as well, by name

    All ranks have to call this, and each rank returns its own times. The times of all-reduces are means, and all others
    are medians. Raises ValueError if tp doesn't fit the model.
    """
    check_tensor_parallel(config, tp)
    tokens, h, ffn = micro_batch * config.seq_length, config.hidden_size, config.ffn_size // tp

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, device=device(), dtype=dtype, requires_grad=True)

    def timed(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[float, float]:
        return _forward_and_backward(function, inputs, rounds)

    matmuls = [
        timed(F.linear, leaf(tokens, int(one.k)), leaf(int(one.n), int(one.k)))
        for one in layer_matmuls(config, tokens, tp).values()
    ]
    block = leaf(tokens, h)
    scale, shift = leaf(h), leaf(h)
    if config.bias:
        norm = timed(lambda x, w, b: F.layer_norm(x, (h,), w, b), block, scale, shift)
    else:
        norm = timed(lambda x, w: F.rms_norm(x, (h,), w), block, scale)
    residual = timed(lambda x, y: x + F.dropout(y, config.dropout), block, leaf(tokens, h))
    activation = timed(_activation(config), *(leaf(tokens, ffn) for _ in range(2 if config.gated else 1)))
    heads = (leaf(micro_batch, config.num_heads // tp, config.seq_length, config.head_dim) for _ in range(3))
    attention = timed(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=config.dropout, is_causal=True), *heads
    )
    targets = torch.randint(config.vocab_size // tp, (tokens,), device=device())
    output = timed(
        lambda x, w: F.cross_entropy(F.linear(x, w).float(), targets), block, leaf(config.vocab_size // tp, h)
    )
    all_reduces = partial(_all_reduces, tokens, h, ffn, dtype, rounds=rounds)
    summed, beside = all_reduces(group)
    return Kernels(
        matmuls=_sum(matmuls),
        elementwise=_sum([norm, norm, residual, residual, activation]),
        attention=attention,
        output=sum(output),
        optimizer=_optimizer(min(parameters, LARGEST), rounds),
        summed=summed,
        beside=beside,
        others={name: all_reduces(other) for name, other in (others or {}).items()},
    )


def _activation(config: GPTConfig) -> Callable[..., Tensor]:
    if config.gated:
        return lambda x, y: F.silu(x) * y
    return lambda x: F.gelu(x, approximate="tanh" if config.activation == "gelu_tanh" else "none")


def _forward_and_backward(
    function: Callable[..., Tensor], inputs: tuple[Tensor, ...], rounds: int
) -> tuple[float, float]:
    out = function(*inputs)
    upstream = torch.randn_like(out)
    torch.autograd.grad(out, inputs, upstream)
    forward, backward = [], []
    for _ in range(rounds):
        _together()
        began = now()
        out = function(*inputs)
        middle = now()
        torch.autograd.grad(out, inputs, upstream)
        backward.append(now() - middle)
        forward.append(middle - began)
    return median(forward), median(backward)


def _optimizer(parameters: int, rounds: int) -> float:
    weight = torch.zeros(parameters, device=device(), requires_grad=True)
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight])
    optimizer.step()
    seconds = []
    for _ in range(rounds):
        _together()
        began = now()
        optimizer.step()
        seconds.append(now() - began)
    return median(seconds) / parameters


def _all_reduces(
    tokens: int, h: int, ffn: int, dtype: torch.dtype, group: ProcessGroup | None, rounds: int
) -> tuple[Line, Line]:
    """Return the times of all-reduces that the rank waits for, and of all-reduces that run during a matmul.

    The time of the matmuls themselves isn't included.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return Line(), Line()
    x, weight = (torch.randn(*shape, device=device(), dtype=dtype) for shape in ((tokens, h), (ffn, h)))
    small, large = (torch.zeros(size, device=device(), dtype=dtype) for size in (1, tokens * h))

    def work(message: Tensor | None, beside: bool) -> None:
        F.linear(x, weight)
        handle = dist.all_reduce(message, group=group, async_op=True) if message is not None and beside else None
        if message is not None and not beside:
            dist.all_reduce(message, group=group)
        F.linear(x, weight)
        if handle is not None:
            handle.wait()

    lines = []
    for beside in (False, True):
        none, few, many = _means([partial(work, message, beside) for message in (None, small, large)], rounds)
        lines.append(Line(max(few - none, 0.0), max(many - few, 0.0) / large.nbytes))
    return lines[0], lines[1]


def _means(functions: list[Callable[[], object]], rounds: int) -> list[float]:
    """Return the mean time per call of each function, in seconds. The functions take turns of `IN_A_ROW` calls each.

    There are no barriers within a turn, as in a step. Now and then a rank has to wait for a long time because another
    rank is late. The mean includes these waits, because they add up over a step.
    """
    seconds = [0.0] * len(functions)
    for turn in range(rounds + 1):
        for place, function in enumerate(functions):
            _together()
            began = now()
            for _ in range(IN_A_ROW):
                function()
            seconds[place] += (now() - began) * (turn > 0)  # the first turn is a warm-up
    return [total / (rounds * IN_A_ROW) for total in seconds]


def _together() -> None:
    if dist.is_initialized():
        dist.barrier()


def _sum(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    return sum(forward for forward, _ in pairs), sum(backward for _, backward in pairs)
