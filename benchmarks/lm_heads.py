"""The ways to compute the logits and the loss of a language model on p ranks that `benchmarks.layers` runs in turns.

A way is a function (whole weight [v, h], group size p) -> step; step(x, target) returns this rank's loss, ready for
backward, and (x, weight) whose gradients it fills. Each cuts its own shard, as its library would hold it. What isn't
installed raises ImportError.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

Step = Callable[[Tensor, Tensor], Tensor]


def _my_rows(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.chunk(dist.get_world_size())[dist.get_rank()].clone())


def tplab_overwriting(weight: Tensor) -> tuple[Step, nn.Parameter]:
    from tplab.cross_entropy import vocab_parallel_cross_entropy
    from tplab.embedding import parallel_logits

    mine = _my_rows(weight)
    return lambda x, t: vocab_parallel_cross_entropy(parallel_logits(x, mine), t, overwrite_logits=True), mine


def tplab_keeping(weight: Tensor) -> tuple[Step, nn.Parameter]:
    from tplab.cross_entropy import vocab_parallel_cross_entropy
    from tplab.embedding import parallel_logits

    mine = _my_rows(weight)
    return lambda x, t: vocab_parallel_cross_entropy(parallel_logits(x, mine), t), mine


def tplab_fused(weight: Tensor) -> tuple[Step, nn.Parameter]:
    from tplab.linear_cross_entropy import parallel_linear_cross_entropy

    mine = _my_rows(weight)
    return lambda x, t: parallel_linear_cross_entropy(x, mine, t), mine


class _CopyIn(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        dy = dy.contiguous()
        dist.all_reduce(dy)
        return dy


class _GatherLast(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        parts = [torch.empty_like(y) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, y)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy.chunk(dist.get_world_size(), -1)[dist.get_rank()].contiguous()


class _PlainLoss(Function):
    """The three all-reduces, in the fewest lines."""

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


def by_hand(weight: Tensor) -> tuple[Step, nn.Parameter]:
    mine = _my_rows(weight)
    return lambda x, t: _PlainLoss.apply(F.linear(_CopyIn.apply(x), mine), t), mine


def gathering(weight: Tensor) -> tuple[Step, nn.Parameter]:
    mine = _my_rows(weight)
    return lambda x, t: F.cross_entropy(_GatherLast.apply(F.linear(_CopyIn.apply(x), mine)), t), mine


def torch_dtensor(weight: Tensor) -> tuple[Step, nn.Parameter]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

    head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    head.load_state_dict({"weight": weight}, assign=True)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(head, mesh, plan)

    def step(x: Tensor, target: Tensor) -> Tensor:
        with loss_parallel():
            return F.cross_entropy(head(x), target)

    step.backward_inside = loss_parallel  # type: ignore[attr-defined]
    return step, head.weight


def megatron_core(weight: Tensor) -> tuple[Step, nn.Parameter]:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, vocab_parallel_cross_entropy

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    mine = _my_rows(weight)

    def step(x: Tensor, target: Tensor) -> Tensor:
        logits = F.linear(copy_to_tensor_model_parallel_region(x), mine)
        return vocab_parallel_cross_entropy(logits[:, None], target[:, None]).mean()  # [s, b, v/p]

    return step, mine


def fairscale(weight: Tensor) -> tuple[Step, nn.Parameter]:
    from fairscale.nn.model_parallel.cross_entropy import vocab_parallel_cross_entropy
    from fairscale.nn.model_parallel.initialize import initialize_model_parallel
    from fairscale.nn.model_parallel.mappings import copy_to_model_parallel_region

    initialize_model_parallel(dist.get_world_size())
    mine = _my_rows(weight)
    return lambda x, t: vocab_parallel_cross_entropy(F.linear(copy_to_model_parallel_region(x), mine), t).mean(), mine


WAYS = {
    "tplab, overwrite_logits": tplab_overwriting,
    "tplab": tplab_keeping,
    "tplab, 512 tokens at once": tplab_fused,
    "hand-written minimum": by_hand,
    "Megatron-Core": megatron_core,
    "fairscale": fairscale,
    "torch DTensor, loss_parallel": torch_dtensor,
    "naive: gather the logits": gathering,
}
