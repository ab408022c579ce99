"""The check of exercise 12.1, a block that works on s/p tokens wherever no matmul needs all of them.

The check provides the block's `inner`: two matmuls, split by columns and by rows, without any communication. What's
right is the same block in a single process. Each rank's gradient of the norm and of the bias is only a part, and how
the ranks share it is up to the answer, so the check sums these gradients over the ranks and compares the sums.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tplab.course.checks import twins
from tplab.course.checks.cases import GROUPS, Case, Place, random_tensor
from tplab.course.checks.observation import Claim, Observed, observe
from tplab.course.checks.trials import OnRanks, exercise
from tplab.memory import saved_for_backward
from tplab.runtime import device
from tplab.tensor.rng import seed_all

B, S, H, FFN, RATE = 2, 8, 4, 24, 0.4  # no tensor inside of `inner` has as many elements as [b, s, h], on any p
OWN = ("norm.weight", "norm.bias", "bias")  # replicated
SAVED = "full tensors [b, s, h] that are saved for the backward pass"
ALL_TOKENS = "self.inner receives all the tokens"
GETS_RNG = "self.inner receives rng"


@dataclass(frozen=True)
class Setting(Case):
    rate: float = 0.0
    training: bool = True
    tracker: bool = True  # whether the block is called with a tracker as rng

    def describe(self, name: str) -> str:
        rate = f"hidden_dropout={self.rate}" if self.rate else "without dropout"
        return rate + " in eval mode" * (not self.training) + ", without rng" * (not self.tracker)


class Inner(nn.Module):
    """All tokens [b, s, h] -> this rank's term [b, s, h]. It remembers what it was called with."""

    def __init__(self, up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(up), nn.Parameter(down)  # [f/p, h], [h, f/p]
        self.given: list[int] = []
        self.rng: Any = None

    def forward(self, x: Tensor, rng: Any = None) -> Tensor:
        self.given, self.rng = list(x.shape), rng
        return F.linear(F.gelu(F.linear(x, self.up)), self.down)


class Problem(NamedTuple):
    x: Tensor  # [b, s, h]
    dy: Tensor  # [b, s, h]
    weights: dict[str, Tensor]  # unsharded
    seed: int  # the tracker's seed


def draw(case: Setting, generator: torch.Generator, size: int) -> Problem:
    random = partial(random_tensor, generator)
    weights = {"up": random(FFN, H), "down": random(H, FFN), "norm.bias": random(H), "bias": random(H)}
    weights["norm.weight"] = 1 + 0.5 * random(H)
    return Problem(random(B, S, H), random(B, S, H), weights, int(torch.randint(10**6, (), generator=generator)))


def run(block_class: Any, case: Setting, given: Problem, group: Any) -> Observed:
    rank, size = dist.get_rank(group), dist.get_world_size(group)

    def mine(tensor: Tensor, dim: int) -> Tensor:
        return tensor.chunk(size, dim)[rank].contiguous().to(device())

    inner = Inner(mine(given.weights["up"], 0), mine(given.weights["down"], 1))
    block = block_class(H, inner, hidden_dropout=case.rate, group=group, device=device(), dtype=case.dtype)
    params = dict(block.named_parameters())
    with torch.no_grad():
        for name in OWN:
            params[name].copy_(given.weights[name].to(device()))
    block.train(case.training)
    tracker, mask = seed_all(given.seed, group), first_mask(given.seed, group, case)
    torch.manual_seed(dist.get_rank())
    rng = tracker if case.tracker else None
    watched = {name: params[name] for name in OWN} | {"up": inner.up, "down": inner.down}
    x, dy = mine(given.x, 1), mine(given.dy, 1)
    seen = observe(lambda x: block(x, rng=rng), dy, inputs={"x": x}, parameters=watched)
    for name in OWN:
        part = seen[f"d{name}"]
        total = part.clone() if isinstance(part, Tensor) else torch.zeros_like(params[name])
        dist.all_reduce(total, group=group)
        seen[f"d{name}"] = total if isinstance(part, Tensor) else part
    seen[ALL_TOKENS] = Claim("" if inner.given == [B, S, H] else f"it received {inner.given or 'nothing'}")
    seen[GETS_RNG] = Claim("" if inner.rng is rng else "it was called without rng")
    if size > 1:
        with saved_for_backward(block) as kept:
            block(x.clone().requires_grad_(), rng=rng)
        seen[SAVED] = sum(nbytes == B * S * H * x.element_size() for _, _, nbytes in kept.pieces)
    return seen | {"mask": mask}


def first_mask(seed: int, group: Any, case: Setting) -> Tensor:
    """Return the mask [b, s/p, h] that this rank's dropout should draw first."""
    ones = torch.ones(B, S // dist.get_world_size(group), H, device=device(), dtype=case.dtype)
    if case.tracker:
        with seed_all(seed, group).fork("sharded"):
            return F.dropout(ones, RATE)
    torch.manual_seed(dist.get_rank())  # without a tracker, dropout draws from torch's current state
    return F.dropout(ones, RATE)


def right(case: Setting, problem: Problem, place: Place) -> Observed:
    mask = torch.cat([seen["mask"].cpu().double() for seen in place.observed], 1)  # [b, s, h]
    leaves = {"x": problem.x, **problem.weights}
    leaves = {name: value.clone().requires_grad_() for name, value in leaves.items()}
    y = F.layer_norm(leaves["x"], (H,), leaves["norm.weight"], leaves["norm.bias"])
    y = F.linear(F.gelu(F.linear(y, leaves["up"])), leaves["down"]) + leaves["bias"]
    out = leaves["x"] + y * (mask if case.rate and case.training else 1.0)
    gradients = dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), problem.dy), strict=True))
    sent = place.traffic(("all_gather", out.numel()), ("reduce_scatter", out.numel()))
    return {
        "out": place.part(out.detach(), 1),
        "dx": place.part(gradients["x"], 1),
        **{f"d{name}": gradients[name] for name in OWN},
        "dup": place.part(gradients["up"], 0),
        "ddown": place.part(gradients["down"], 1),
        "forward traffic": sent,
        "backward traffic": sent,
        **({SAVED: 1} if place.size > 1 else {}),
    }


def block(*settings: Setting, **options: Any) -> OnRanks:
    return OnRanks(cases=settings, draw=draw, run=run, right=right, **options)


exercise(
    "12.1", "Take f and g apart", takes=["SequenceParallelBlock"],
    trials=[
        block(Setting(), Setting(groups=GROUPS), world_sizes=(2, 4, 1)),
        block(
            Setting(rate=RATE), Setting(rate=RATE, training=False), Setting(rate=RATE, tracker=False),
            world_sizes=(2, 4, 1), without=twins.DRAWS_ONCE,
        ),
    ],
    passed="Your block sends as many bytes as one with f and g. Between the matmuls, each rank works on its own tokens "
    "only, and the only full tensor that it saves is the one that inner reads.",
)  # fmt: skip
