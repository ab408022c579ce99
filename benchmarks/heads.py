"""Ways to compute a language model's logits and loss on p ranks, which `benchmarks.layers` runs in turns."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from benchmarks import ways
from benchmarks.ways import Problem, Way

SMALL = {"tokens": 128, "hidden": 128, "vocabulary": 4096}  # for the tests, and for a quick try


@dataclass
class Head(Problem):
    target: Tensor  # ids [n]


def head(tokens: int = 1024, hidden: int = 1024, vocabulary: int = 32768) -> Head:
    """Return an LM head with x [n, h], weight [v, h] and target [n]. Its output is the mean loss."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(vocabulary, hidden, generator=generator) / hidden**0.5
    x = torch.randn(tokens, hidden, generator=generator)
    target = torch.randint(vocabulary, (tokens,), generator=generator)

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight), target)

    title = f"LM head and loss, v = {vocabulary:,}, h = {hidden:,}, {tokens:,} tokens"
    return Head(title, {"x": x, "weight": weight}, None, plain, target)


def cut(name: str, whole: Tensor) -> Tensor:
    """Return this rank's rows of the weight. Everything else is replicated."""
    return whole.chunk(dist.get_world_size())[dist.get_rank()].contiguous() if name == "weight" else whole


def tplab(head: Head) -> Way:
    from tplab.tensor import parallel_logits, vocab_parallel_cross_entropy

    mine = ways.parameters(head, cut)
    return Way(lambda x: vocab_parallel_cross_entropy(parallel_logits(x, mine["weight"]), head.target), mine, cut)


def tplab_fused(head: Head) -> Way:
    from tplab.tensor import parallel_linear_cross_entropy

    mine = ways.parameters(head, cut)
    return Way(lambda x: parallel_linear_cross_entropy(x, mine["weight"], head.target), mine, cut)


def by_hand(head: Head, loss: Callable[[Tensor, Tensor], Tensor]) -> Way:
    """loss    maps this rank's logits [n, v/p] and the target to the mean loss"""
    mine = ways.parameters(head, cut)
    return Way(lambda x: loss(F.linear(ways.CopyIn.apply(x), mine["weight"]), head.target), mine, cut)


class PlainLoss(Function):
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


class GatherLast(Function):
    """Gather all logits on every rank, which is what you'd do if you knew no better."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        parts = [torch.empty_like(y) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, y)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy.chunk(dist.get_world_size(), -1)[dist.get_rank()].contiguous()


def _gathered_loss(z: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(GatherLast.apply(z), target)


def megatron_core(head: Head) -> Way:
    """Use Megatron-Core's plain loss. Its fused loss rounds the gradient to bfloat16, so it can't be compared here."""
    ways.start_megatron()
    from megatron.core.tensor_parallel import ColumnParallelLinear, vocab_parallel_cross_entropy

    vocabulary, hidden = head.inputs["weight"].shape
    config = ways.megatron_config(hidden)
    layer = ColumnParallelLinear(hidden, vocabulary, config=config, init_method=config.init_method, bias=False)
    mine, target = ways.fill(layer, {"weight": "weight"}, head, cut), head.target[:, None]  # [s, b]

    def forward(x: Tensor) -> Tensor:
        logits = layer(x[:, None])[0]  # [s, b, h] -> [s, b, v/p]
        return vocab_parallel_cross_entropy(logits, target).mean()

    return Way(forward, mine, cut)


def torch_dtensor(head: Head) -> Way:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel

    vocabulary, hidden = head.inputs["weight"].shape
    model = nn.Sequential(nn.Linear(hidden, vocabulary, bias=False))
    ways.fill(model, {"weight": "0.weight"}, head, ways.unsharded)
    ways.parallelize(model, {"0": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)})

    def forward(x: Tensor) -> Tensor:
        with loss_parallel():
            return F.cross_entropy(model(x), head.target)

    return Way(forward, {"weight": model.get_parameter("0.weight")}, cut, around_backward=loss_parallel)


WAYS: dict[str, Callable[[Head], Way]] = {
    "tplab, fused": tplab_fused,
    "tplab": tplab,
    "hand-written minimum": partial(by_hand, loss=PlainLoss.apply),
    "Megatron-Core": megatron_core,
    "torch DTensor, loss_parallel": torch_dtensor,
    "naive: gather the logits": partial(by_hand, loss=_gathered_loss),
    "one process, as many threads": ways.one_process,
}
