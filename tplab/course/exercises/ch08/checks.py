"""The checks of exercises 8.1, log-sum-exp, and 8.2, the loss of each token and its gradient.

The logits [.., v] are random, and their columns are split across the ranks. In some cases, the logits are large, differ
from rank to rank, or are -inf, because real logits can be like that, too.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tplab.course.checks import twins
from tplab.course.checks.cases import GROUPS, Case, Place, random_tensor
from tplab.course.checks.observation import Changed, Claim, Observed, Snapshot, observe
from tplab.course.checks.recorded_traffic import CollectiveCall, Traffic
from tplab.course.checks.run_answer import called_as
from tplab.course.checks.trials import OnRanks, exercise
from tplab.memory.meter import saved_for_backward
from tplab.runtime import device

SECOND = "dlogits of a second backward pass"
OTHER_VOCABULARY = "dlogits after a call with a smaller vocabulary"
KEPT = "at most one tensor [.., v/p] is saved for the backward pass"


@dataclass(frozen=True)
class Logits(Case):
    """One kind of logits.

    shift:      number that is added to every logit
    spread:     how much higher the logits of the last rank are than those of the first rank
    climb:      how much higher the logits of the last token are than those of the first token
    padded:     whether the last columns are -inf: one column and, with several ranks, also all columns of the last rank
    transposed: whether the logits are non-contiguous in memory
    columns:    number of columns on each rank
    """

    note: str = ""
    leading: tuple[int, ...] = (8,)
    shift: float = 0.0
    spread: float = 0.0
    climb: float = 0.0
    padded: bool = False
    transposed: bool = False
    columns: int = 3

    def describe(self, name: str) -> str:
        return self.note


CASES = (
    Logits(),
    Logits("with logits [2, 4, v/p]", (2, 4)),
    Logits("with logits [2, 4, v/p], not contiguous", (2, 4), transposed=True),
    Logits("with logits of about 10000", shift=1e4),
    Logits("with logits from about -10000, in the first token, to 0, in the last", shift=-1e4, climb=1e4),
    Logits("with logits of about -2000 on the first rank and 2000 on the last", shift=-2e3, spread=4e3),
    Logits("with padding, where the last columns are -inf", padded=True),
    Logits("with logits of about -30000, and padding", shift=-3e4, padded=True),
    Logits("with a single column on each rank", columns=1),
    Logits("with logits [1, 8, v/p]", (1, 8)),
    Logits(groups=GROUPS),
)


class Sample(NamedTuple):
    logits: Tensor  # [.., v], or [.., v/p] on a rank
    target: Tensor  # [..]
    dy: Tensor  # [..], the upstream gradient


def draw(case: Logits, generator: torch.Generator, size: int) -> Sample:
    v, count = size * case.columns, torch.Size(case.leading).numel()
    rank_of_column = torch.arange(v) // case.columns
    logits = 2 * random_tensor(generator, *case.leading, v) + case.shift
    logits += case.spread * rank_of_column / max(size - 1, 1)
    logits += case.climb * torch.linspace(0, 1, count, dtype=logits.dtype).view(*case.leading, 1)
    real = v
    if case.padded:
        real = v - 1 if size == 1 else v - case.columns - 1
        logits[..., real:] = -torch.inf
    edges = [edge for edge in range(real) if edge % case.columns in (0, case.columns - 1)][:count]  # of the shards
    others = torch.randint(real, (count - len(edges),), generator=generator).tolist()
    target = torch.tensor(edges + others)[torch.randperm(count, generator=generator)]
    return Sample(logits, target.view(case.leading), random_tensor(generator, *case.leading))


def give(case: Logits, sample: Sample, place: Place) -> Sample:
    shard = place.part(sample.logits, -1)
    shard = shard.transpose(0, -1).contiguous().transpose(0, -1) if case.transposed else shard.clone()
    return sample._replace(logits=shard)


def spends(seen: Observed, given: Tensor, most: int, right: int) -> Observed:
    """Return what `observe` saw, but with the right forward traffic if each rank contributes few enough numbers.

    An answer may send fewer numbers than the reference answer, or send them in other messages. The numbers that a rank
    contributes to an all-gather are its own part.

    given: a tensor with one element per token, in the dtype of the logits
    most:  the numbers per token that a rank may contribute. A number takes at least four bytes, even for bfloat16
    right: the numbers per token that the reference answer contributes, each in an all-reduce of its own
    """
    calls = seen["forward traffic"]
    if not isinstance(calls, Traffic) or not calls:
        return seen
    if any(call.kind == "barrier" or not call.waited for call in calls):
        return seen
    sizes = [getattr(torch, call.dtype).itemsize * call.numel for call in calls]
    mine = [
        size // (len(call.group) if call.kind == "all_gather" else 1) for size, call in zip(sizes, calls, strict=True)
    ]
    if sum(mine) > most * given.numel() * max(given.element_size(), 4):
        return seen
    dtype = str(given.dtype).removeprefix("torch.")
    return seen | {
        "forward traffic": Traffic([CollectiveCall("all_reduce", given.numel(), dtype, calls[0].group)] * right)
    }


def run_logsumexp(answer: Any, case: Logits, given: Sample, group: Any) -> Observed:
    logits, dy = given.logits.to(device()), given.dy.to(device())
    with called_as(f"vocab_logsumexp(logits {list(logits.shape)}, group)"):
        seen = observe(lambda z: answer(z, group), dy, inputs={"logits": logits})
    return spends(seen, dy, 2, 2) | {"out": twins.loss_in(case.twin, seen["out"])}


def right_logsumexp(case: Logits, sample: Sample, place: Place) -> Observed:
    lse = sample.logits.logsumexp(-1)
    softmax = place.part((sample.logits - lse.unsqueeze(-1)).exp(), -1)
    return {
        "out": lse,
        "dlogits": softmax * sample.dy.unsqueeze(-1),
        "forward traffic": place.traffic(*[("all_reduce", lse.numel())] * 2),
        "backward traffic": place.traffic(),
    }


def own_terms(case: Logits, sample: Sample, size: int) -> dict[str, list[Tensor]]:
    return {"log-sum-exp": [shard.logsumexp(-1) for shard in sample.logits.chunk(size, -1)]}


def without_rounding(case: Logits) -> tuple[twins.Twin, ...]:
    """Return the twins that would round large logits too much."""
    return twins.ROUNDED if case.shift else ()


exercise(
    "8.1", "Log-sum-exp for two numbers per token", takes=["vocab_logsumexp"],
    trials=[
        OnRanks(
            cases=CASES, draw=draw, give=give, run=run_logsumexp, right=right_logsumexp, terms=own_terms,
            without=without_rounding, world_sizes=(2, 4, 1),
        )
    ],
    passed="Your log-sum-exp is correct even for logits of 10,000 and -10,000. Each rank contributes at most two "
    "numbers per token, and the backward pass sends nothing.",
)  # fmt: skip


def run_loss(answer: Any, case: Logits, given: Sample, group: Any) -> Observed:
    logits, target, dy = (tensor.to(device()) for tensor in given)

    def apply(z: Tensor) -> Any:
        return answer.apply(z, target, group)

    before = Snapshot(target=target)
    with called_as(f"apply(logits {list(logits.shape)}, target {list(target.shape)}, group)"):
        seen = spends(observe(apply, dy, inputs={"logits": logits}), dy, 3, 3)
        seen["out"] = twins.loss_in(case.twin, seen["out"])
        seen["inputs unchanged"] = Changed([*seen["inputs unchanged"], *before.changed()])
        return seen | more_backward_passes(answer, Sample(logits, target, dy), group)


def more_backward_passes(answer: Any, given: Sample, group: Any) -> Observed:
    """Return the gradient of a second backward pass, the gradient after a call with a smaller vocabulary, and a claim
    that forward saves at most one tensor [.., v/p].
    """
    logits, target, dy = given
    leaf = logits.clone().requires_grad_()
    with saved_for_backward() as kept:
        out = answer.apply(leaf, target, group)
    shapes = [torch.Size(shape) for shape, _, _ in kept.pieces] + [tensor.shape for tensor in _on_context(out)]
    large = [shape for shape in shapes if shape.numel() >= logits.numel()]
    seen: Observed = {KEPT: Claim(f"{len(large)} are saved" if len(large) > 1 else "")}
    if isinstance(out, Tensor) and out.requires_grad and out.shape == dy.shape:
        torch.autograd.grad(out, leaf, dy, retain_graph=True, allow_unused=True)
        seen[SECOND] = torch.autograd.grad(out, leaf, dy, allow_unused=True)[0]
        out = answer.apply(leaf, target, group)
        answer.apply(logits[..., 1:].clone().requires_grad_(), torch.zeros_like(target), group)
        try:
            seen[OTHER_VOCABULARY] = torch.autograd.grad(out, leaf, dy, allow_unused=True)[0]
        except Exception as error:
            seen[OTHER_VOCABULARY] = Claim(f"it raised {type(error).__name__}: {error}")
    return seen


def _on_context(out: Any) -> list[Tensor]:
    """Return the tensors in the attributes that forward gave ctx, which are kept alive just like saved tensors."""
    node = out.grad_fn if isinstance(out, Tensor) else None
    return [value for value in tree_leaves(getattr(node, "__dict__", {})) if isinstance(value, Tensor)]


def right_loss(case: Logits, sample: Sample, place: Place) -> Observed:
    logits, target, dy = sample
    log_softmax = logits.log_softmax(-1)
    one_hot = torch.zeros_like(logits).scatter(-1, target.unsqueeze(-1), 1.0)
    gradient = place.part((log_softmax.exp() - one_hot) * dy.unsqueeze(-1), -1)
    return {
        "out": -log_softmax.gather(-1, target.unsqueeze(-1)).squeeze(-1),
        "dlogits": gradient,
        "forward traffic": place.traffic(*[("all_reduce", dy.numel())] * 3),
        "backward traffic": place.traffic(),
        SECOND: gradient,
        OTHER_VOCABULARY: gradient,
    }


exercise(
    "8.2", "The loss and its gradient", takes=["VocabParallelCrossEntropy"], theirs=["vocab_parallel_cross_entropy"],
    trials=[
        OnRanks(
            cases=[replace(case, columns=5) for case in CASES if case.columns > 1],  # gathering them takes more than 3
            draw=draw, give=give, run=run_loss, right=right_loss,
            without=without_rounding, world_sizes=(2, 4, 1),
        )
    ],
    passed="Your loss needs three numbers per token in the forward pass and no message in the backward pass, and it "
    "can run backward as often as you like.",
)  # fmt: skip
