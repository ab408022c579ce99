"""Ways to compute the logits and the loss of a language model on p ranks, which `benchmarks.layers` runs in turns.

Each way runs a library's output layer, and then its loss from `benchmarks.losses`.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import implementations, losses
from benchmarks.implementations import Problem, Way

CUT = implementations.chunks(weight=0)


def problem(tokens: int = 1024, hidden: int = 1024, vocabulary: int = 32768) -> Problem:
    """Return an LM head with x [n, h], weight [v, h] and target [n]. Its output is the mean loss."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(vocabulary, hidden, generator=generator) / hidden**0.5
    x = torch.randn(tokens, hidden, generator=generator)
    target = torch.randint(vocabulary, (tokens,), generator=generator)

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight), target)

    title = f"LM head and loss, v = {vocabulary:,}, h = {hidden:,}, {tokens:,} tokens"
    return Problem(title, {"x": x, "weight": weight}, None, plain, target)


def tplab_overwriting(problem: Problem) -> Way:
    return _with_tplab(problem, losses.tplab_overwriting(problem))


def tplab_keeping(problem: Problem) -> Way:
    return _with_tplab(problem, losses.tplab_keeping(problem))


def _with_tplab(problem: Problem, loss: Way) -> Way:
    from tplab.tensor.embedding import parallel_logits

    mine = implementations.parameters(problem, CUT)
    return Way(lambda x: loss.forward(parallel_logits(x, mine["weight"])), mine, CUT)


def tplab_fused(problem: Problem) -> Way:
    from tplab.tensor.linear_cross_entropy import parallel_linear_cross_entropy

    mine, target = implementations.parameters(problem, CUT), problem.target
    return Way(lambda x: parallel_linear_cross_entropy(x, mine["weight"], target), mine, CUT)


def _with_copy_in(problem: Problem, loss: Way) -> Way:
    mine = implementations.parameters(problem, CUT)
    return Way(lambda x: loss.forward(F.linear(implementations.CopyIn.apply(x), mine["weight"])), mine, CUT)


def by_hand(problem: Problem) -> Way:
    return _with_copy_in(problem, losses.by_hand(problem))


def gathering(problem: Problem) -> Way:
    return _with_copy_in(problem, losses.gathering(problem))


def megatron_core(problem: Problem) -> Way:
    loss = losses.megatron_core(problem)
    from megatron.core.tensor_parallel import ColumnParallelLinear

    vocabulary, hidden = problem.inputs["weight"].shape
    config = implementations.megatron_config(hidden)
    head = ColumnParallelLinear(hidden, vocabulary, config=config, init_method=config.init_method, bias=False)
    mine = implementations.fill(head, {"weight": "weight"}, problem, CUT)
    return Way(lambda x: loss.forward(head(x[:, None])[0]), mine, CUT)  # [s, b, h] -> [s, b, v/p]


def fairscale(problem: Problem) -> Way:
    loss = losses.fairscale(problem)
    from fairscale.nn.model_parallel.layers import ColumnParallelLinear

    vocabulary, hidden = problem.inputs["weight"].shape
    head = ColumnParallelLinear(hidden, vocabulary, bias=False, gather_output=False)
    return Way(lambda x: loss.forward(head(x)), implementations.fill(head, {"weight": "weight"}, problem, CUT), CUT)


def torch_dtensor(problem: Problem) -> Way:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel

    loss, (vocabulary, hidden) = losses.torch_dtensor(problem), problem.inputs["weight"].shape
    model = nn.Sequential(nn.Linear(hidden, vocabulary, bias=False))
    implementations.fill(model, {"weight": "0.weight"}, problem, lambda _, whole: whole)
    implementations.parallelize(model, {"0": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)})
    mine = {"weight": model.get_parameter("0.weight")}
    return Way(lambda x: loss.forward(model(x)), mine, CUT, around_backward=loss.around_backward)


SMALL = {"tokens": 128, "hidden": 128, "vocabulary": 4096}  # for the tests, and for a quick try
WAYS: dict[str, Callable[[Problem], Way]] = {
    "tplab, 512 tokens at once": tplab_fused,
    "tplab, overwrite_logits": tplab_overwriting,
    "tplab": tplab_keeping,
    "hand-written minimum": by_hand,
    "Megatron-Core": megatron_core,
    "fairscale": fairscale,
    "torch DTensor, loss_parallel": torch_dtensor,
    "naive: gather the logits": gathering,
    "one process, as many threads": implementations.one_process,
}
