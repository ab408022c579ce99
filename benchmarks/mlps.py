"""Ways to compute an MLP, gelu(X A + a) B + b, on p ranks, which `benchmarks.layers` runs in turns."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import implementations
from benchmarks.implementations import Problem, Way

CUT = implementations.chunks(up=0, up_bias=0, down=1)


def problem(tokens: int = 2048, hidden: int = 1024) -> Problem:
    """Return an MLP with x [1, n, h], `up` = A^T [4 h, h] and `down` = B^T [h, 4 h], both with a bias."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    width = 4 * hidden
    inputs = {
        "x": draw(1, tokens, hidden),
        "up": draw(width, hidden) / hidden**0.5,
        "up_bias": draw(width),
        "down": draw(hidden, width) / width**0.5,
        "down_bias": draw(hidden),
    }
    title = f"MLP {hidden}→{width}→{hidden}, {tokens:,} tokens"
    return Problem(title, inputs, draw(1, tokens, hidden), _plain)


def _plain(x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, up, up_bias)), down, down_bias)


def tplab(problem: Problem, async_grad_allreduce: bool = False) -> Way:
    from tplab.tensor.mlp import ParallelMLP

    mlp = ParallelMLP(problem.inputs["x"].shape[-1], async_grad_allreduce=async_grad_allreduce)
    names = {"up": "up.weight", "up_bias": "up.bias", "down": "down.weight", "down_bias": "down.bias"}
    return Way(mlp, implementations.fill(mlp, names, problem, CUT), CUT)


def tplab_async(problem: Problem) -> Way:
    return tplab(problem, async_grad_allreduce=True)


def by_hand(problem: Problem) -> Way:
    mine = implementations.parameters(problem, CUT)

    def forward(x: Tensor) -> Tensor:
        y = F.gelu(F.linear(implementations.CopyIn.apply(x), mine["up"], mine["up_bias"]))  # [1, n, 4 h/p]
        return implementations.SumUp.apply(F.linear(y, mine["down"])) + mine["down_bias"]

    return Way(forward, mine, CUT)


def megatron_core(problem: Problem) -> Way:
    """Use Megatron-Core's MLP with its own linear layers.

    It takes [s, b, h], but with a single sequence, that's the same memory.
    """
    implementations.start_megatron()
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLP, MLPSubmodules

    hidden = problem.inputs["x"].shape[-1]
    config = implementations.megatron_config(hidden, ffn_hidden_size=4 * hidden)
    parts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    mlp = MLP(config, parts, ffn_hidden_size=4 * hidden)
    names = {"up": "linear_fc1.weight", "up_bias": "linear_fc1.bias"}
    names |= {"down": "linear_fc2.weight", "down_bias": "linear_fc2.bias"}

    def forward(x: Tensor) -> Tensor:
        y, bias = mlp(x)
        return y + bias

    return Way(forward, implementations.fill(mlp, names, problem, CUT), CUT)


def fairscale(problem: Problem) -> Way:
    implementations.start_fairscale()
    from fairscale.nn.model_parallel.layers import ColumnParallelLinear, RowParallelLinear

    hidden = problem.inputs["x"].shape[-1]
    mlp = nn.Sequential(
        ColumnParallelLinear(hidden, 4 * hidden, gather_output=False),
        nn.GELU(),
        RowParallelLinear(4 * hidden, hidden, input_is_parallel=True),
    )
    names = {"up": "0.weight", "up_bias": "0.bias", "down": "2.weight", "down_bias": "2.bias"}
    return Way(mlp, implementations.fill(mlp, names, problem, CUT), CUT)


def torch_dtensor(problem: Problem) -> Way:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    hidden = problem.inputs["x"].shape[-1]
    mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))
    names = {"up": "0.weight", "up_bias": "0.bias", "down": "2.weight", "down_bias": "2.bias"}
    implementations.fill(mlp, names, problem, lambda _, whole: whole)
    implementations.parallelize(mlp, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    found = dict(mlp.named_parameters())
    return Way(mlp, {name: found[theirs] for name, theirs in names.items()}, CUT)


SMALL = {"tokens": 256, "hidden": 128}  # for the tests, and for a quick try
WAYS: dict[str, Callable[[Problem], Way]] = {
    "tplab": tplab,
    "tplab, async_grad_allreduce": tplab_async,
    "hand-written minimum": by_hand,
    "Megatron-Core": megatron_core,
    "fairscale": fairscale,
    "torch DTensor": torch_dtensor,
    "one process, as many threads": implementations.one_process,
}
