"""Ways to compute only the loss, from logits that already exist, which `benchmarks.layers` runs in turns.

Each step gets a new copy of this rank's logits [n, v/p] before the clock starts, because most ways overwrite them.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from benchmarks import implementations
from benchmarks.implementations import Problem, Way

CUT = implementations.chunks(x=1)


def problem(tokens: int = 1024, vocabulary: int = 32768) -> Problem:
    """Return a loss with logits x [n, v] and target [n]. Its output is the mean loss."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(tokens, vocabulary, generator=generator)
    target = torch.randint(vocabulary, (tokens,), generator=generator)
    title = f"loss alone, v = {vocabulary:,}, {tokens:,} tokens"
    return Problem(title, {"x": logits}, None, lambda x: F.cross_entropy(x, target), target, overwritten=True)


def tplab_overwriting(problem: Problem) -> Way:
    from tplab.tensor.cross_entropy import vocab_parallel_cross_entropy

    return Way(lambda x: vocab_parallel_cross_entropy(x, problem.target, overwrite_logits=True), {}, CUT)


def tplab_keeping(problem: Problem) -> Way:
    from tplab.tensor.cross_entropy import vocab_parallel_cross_entropy

    return Way(lambda x: vocab_parallel_cross_entropy(x, problem.target), {}, CUT)


class _PlainLoss(Function):
    """The loss with its three all-reduces, in as few lines as possible."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, target: Tensor) -> Tensor:
        target = target - dist.get_rank() * z.shape[1]
        mine = (target >= 0) & (target < z.shape[1])
        column = target.where(mine, 0)[:, None]
        highest = z.amax(1)
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        shifted = z - highest[:, None]
        aimed = shifted.gather(1, column)[:, 0] * mine
        dist.all_reduce(aimed)
        exponentials = shifted.exp()
        total = exponentials.sum(1)
        dist.all_reduce(total)
        ctx.save_for_backward(exponentials / total[:, None], column, mine)
        return (total.log() - aimed).mean()

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple:
        softmax, column, mine = ctx.saved_tensors
        one = mine[:, None].to(softmax.dtype)
        return softmax.scatter_add(1, column, -one) * (dloss / len(mine)), None


def by_hand(problem: Problem) -> Way:
    return Way(lambda x: _PlainLoss.apply(x, problem.target), {}, CUT)


def megatron_core(problem: Problem) -> Way:
    """Use Megatron-Core's plain loss. Its fused loss rounds the gradient to bfloat16, so it can't be compared here."""
    implementations.start_megatron()
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    target = problem.target[:, None]  # [s, b]
    return Way(lambda x: vocab_parallel_cross_entropy(x.view(*target.shape, -1), target).mean(), {}, CUT)


def fairscale(problem: Problem) -> Way:
    implementations.start_fairscale()
    from fairscale.nn.model_parallel.cross_entropy import vocab_parallel_cross_entropy

    return Way(lambda x: vocab_parallel_cross_entropy(x, problem.target).mean(), {}, CUT)


def torch_dtensor(problem: Problem) -> Way:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import loss_parallel

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def forward(x: Tensor) -> Tensor:
        logits = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Shard(-1)])
        with loss_parallel():
            return F.cross_entropy(logits, problem.target)

    return Way(forward, {}, CUT, around_backward=loss_parallel)


class _GatherLast(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        parts = [torch.empty_like(y) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, y)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy.chunk(dist.get_world_size(), -1)[dist.get_rank()].contiguous()


def gathering(problem: Problem) -> Way:
    return Way(lambda x: F.cross_entropy(_GatherLast.apply(x), problem.target), {}, CUT)


SMALL = {"tokens": 128, "vocabulary": 4096}  # for the tests, and for a quick try
WAYS: dict[str, Callable[[Problem], Way]] = {
    "tplab, overwrite_logits": tplab_overwriting,
    "tplab": tplab_keeping,
    "hand-written minimum": by_hand,
    "Megatron-Core": megatron_core,
    "fairscale": fairscale,
    "torch DTensor, loss_parallel": torch_dtensor,
    "naive: gather the logits": gathering,
    "one process, as many threads": implementations.one_process,
}
