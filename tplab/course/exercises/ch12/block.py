"""The check for exercise 12.2, a block that holds s/p tokens wherever no matmul needs all of them.

The check provides the middle of the block, which consists of two matmuls (split by columns and by rows) without any
communication. The reference is the same block in a single process, in plain PyTorch, where each rank's tokens go
through a separate copy of the norm's weights and of the bias. So the gradient of each copy is the one that its rank
must hold.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tplab.course import checks
from tplab.runtime import device
from tplab.tensor.rng import seed_all

B, S, H, FFN, RATE = 2, 8, 4, 8, 0.4
NORM = ("norm.weight", "norm.bias", "bias")
MASKS = "masks"

OWN_TOKENS = "the norm is given this rank's tokens"
ALL_TOKENS = "self.inner is given all tokens"
GETS_RNG = "self.inner is given rng"

P_BIASES = "what comes out when the bias is added on every rank before the sum: p biases"
P_RESIDUALS = "what comes out when the residual is added on every rank before the sum: p residuals"
P_BOTH = f"{P_RESIDUALS}, and p biases"
NO_BIAS = "what comes out without the bias"
NO_RESIDUAL = "what comes out without the residual"
NORMED_RESIDUAL = "what comes out when the residual is what the norm returned"
NO_NORM = "what comes out without the norm"
NORM_LAST = "what comes out when the norm works on what `inner` gave"
TERM = "one rank's summand, not the sum over the ranks"
NO_DROPOUT = "what comes out without dropout"
REPLICATED = 'what comes out with masks from the state "replicated": the same places of every rank\'s tokens'
BEFORE_BIAS = "what comes out when dropout works before the bias is added"
ON_THE_SUM = "what comes out when dropout works on the residual too"
IN_EVAL = "what comes out when it drops in eval mode too"

Weights = Mapping[str, Tensor]  # up [f, h], down [h, f], norm.weight, norm.bias and bias [h]


@dataclass(frozen=True)
class Setting(checks.Case):
    rate: float = 0.0
    training: bool = True
    tracker: bool = True  # whether the block is given a tracker as rng

    def describe(self, name: str) -> str:
        rate = f"hidden_dropout={self.rate}" if self.rate else "without dropout"
        return rate + " in eval mode" * (not self.training) + ", without rng" * (not self.tracker)


class LayerNorms(TorchDispatchMode):
    """Dispatch mode that records the input shape of every layer norm, no matter if a module or a function runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[list[int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.native_layer_norm.default:
            self.shapes.append(list(args[0].shape))
        return function(*args, **(kwargs or {}))


WITHOUT_DROPOUT = (Setting(), Setting(groups=checks.GROUPS))
WITH_DROPOUT = (Setting(rate=RATE), Setting(rate=RATE, training=False), Setting(rate=RATE, tracker=False))


class Inner(nn.Module):
    """Module that maps all tokens [b, s, h] to this rank's term of the sum [b, s, h]. It records its input's shape."""

    def __init__(self, up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(up), nn.Parameter(down)  # [f/p, h], [h, f/p]
        self.given: list[int] = []
        self.rng: Any = None

    def forward(self, x: Tensor, rng: Any = None) -> Tensor:
        self.given, self.rng = list(x.shape), rng
        return F.linear(F.gelu(F.linear(x, self.up)), self.down)


class Problem(NamedTuple):
    """The tensors and the seed that all ranks of one group share."""

    x: Tensor  # [b, s, h]
    dy: Tensor  # [b, s, h]
    weights: dict[str, Tensor]  # unsharded
    seed: int  # the tracker's seed


def draw(case: Setting, generator: torch.Generator, size: int) -> Problem:
    weights = {"up": checks.random_tensor(generator, FFN, H), "down": checks.random_tensor(generator, H, FFN)}
    weights |= {
        "norm.weight": 1 + 0.5 * checks.random_tensor(generator, H),
        "norm.bias": checks.random_tensor(generator, H),
    }
    weights["bias"] = checks.random_tensor(generator, H)
    x, dy = (checks.random_tensor(generator, B, S, H) for _ in range(2))
    return Problem(x, dy, weights, int(torch.randint(10**6, (), generator=generator)))


def run(block_class: Any, case: Setting, given: Problem, group: Any) -> checks.Observed:
    rank, size = dist.get_rank(group), dist.get_world_size(group)

    def mine(tensor: Tensor, dim: int) -> Tensor:
        return tensor.chunk(size, dim)[rank].contiguous().to(device())

    inner = Inner(mine(given.weights["up"], 0), mine(given.weights["down"], 1))
    block = block_class(H, inner, hidden_dropout=case.rate, group=group, device=device(), dtype=case.dtype)
    params = dict(block.named_parameters())
    with torch.no_grad():
        for name in NORM:
            params[name].copy_(given.weights[name].to(device()))
    block.train(case.training)
    tracker, masks = seed_all(given.seed, group), draw_masks(given.seed, group, case.dtype)
    torch.manual_seed(dist.get_rank())
    if not case.tracker:  # then dropout draws from torch's current state
        masks["sharded"] = F.dropout(torch.ones_like(masks["sharded"]), RATE)
        torch.manual_seed(dist.get_rank())
    rng = tracker if case.tracker else None
    watched = {name: params[name] for name in NORM} | {"up": inner.up, "down": inner.down}
    x, dy = mine(given.x, 1), mine(given.dy, 1)
    with LayerNorms() as norms:
        seen = checks.observe(lambda x: block(x, rng=rng), dy, inputs={"x": x}, parameters=watched)
    others = [shape for shape in norms.shapes if shape != [B, S // size, H]]
    seen[OWN_TOKENS] = checks.Claim(f"it was given {', '.join(map(str, others))}" if others else "")
    seen[ALL_TOKENS] = checks.Claim("" if inner.given == [B, S, H] else f"it was given {inner.given or 'nothing'}")
    seen[GETS_RNG] = checks.Claim("" if inner.rng is rng else "it was called without rng")
    return seen | {MASKS: masks}


def draw_masks(seed: int, group: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Draw the first mask [b, s/p, h] that dropout on this rank draws from each of the tracker's two states."""
    tracker, masks = seed_all(seed, group), {}
    ones = torch.ones(B, S // dist.get_world_size(group), H, device=device(), dtype=dtype)
    for state in ("sharded", "replicated"):
        with tracker.fork(state):
            masks[state] = F.dropout(ones, RATE)
    return masks


def plain_block(x: Tensor, w: dict[str, Tensor], parts: Sequence[dict[str, Tensor]], mask: Tensor | float) -> Tensor:
    """Run the block [b, s, h] -> [b, s, h] in a single process. `parts` has each rank's copy of the norm and bias."""
    tokens = x.chunk(len(parts), 1)
    normed = [F.layer_norm(t, (H,), own["norm.weight"], own["norm.bias"]) for t, own in zip(tokens, parts, strict=True)]
    y = F.linear(F.gelu(F.linear(torch.cat(normed, 1), w["up"])), w["down"])  # [b, s, h]
    y = torch.cat([t + own["bias"] for t, own in zip(y.chunk(len(parts), 1), parts, strict=True)], 1)
    return x + y * mask


def normed(x: Tensor, w: Weights) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w["norm.weight"], w["norm.bias"])


def inner(y: Tensor, w: Weights) -> Tensor:
    return F.linear(F.gelu(F.linear(y, w["up"])), w["down"])


def mistakes(x: Tensor, w: Weights, p: int) -> dict[str, Tensor]:
    """Return the outputs for all tokens of blocks (without dropout) that omit, repeat, or misplace a step."""
    y = inner(normed(x, w), w)
    wrong = {
        NO_BIAS: x + y,
        NO_RESIDUAL: y + w["bias"],
        NORMED_RESIDUAL: normed(x, w) + y + w["bias"],
        NO_NORM: x + inner(x, w) + w["bias"],
        NORM_LAST: x + normed(inner(x, w), w) + w["bias"],
    }
    if p == 1:
        return wrong
    first = {**w, "up": w["up"].chunk(p, 0)[0], "down": w["down"].chunk(p, 1)[0]}
    return wrong | {
        P_BIASES: x + y + p * w["bias"],
        P_RESIDUALS: p * x + y + w["bias"],
        P_BOTH: p * x + y + p * w["bias"],
        TERM: x + inner(normed(x, w), first) + w["bias"],  # seen only on rank 0, because it's rank 0's term
    }


def dropout_mistakes(x: Tensor, w: Weights, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the outputs for all tokens of blocks that drop in the wrong place or draw masks from the wrong state."""
    y, mask = inner(normed(x, w), w), masks["sharded"]
    return {
        NO_DROPOUT: x + y + w["bias"],
        REPLICATED: x + (y + w["bias"]) * masks["replicated"],
        IN_EVAL: x + (y + w["bias"]) * mask,
        BEFORE_BIAS: x + y * mask + w["bias"],
        ON_THE_SUM: (x + y + w["bias"]) * mask,
    }


def expect(case: Setting, problem: Problem, place: checks.Place) -> checks.Expected:
    x, dy, weights, _ = problem
    masks = {  # masks for all tokens, [b, s, h]
        state: torch.cat([seen[MASKS][state].cpu() for seen in place.observed], 1)
        for state in ("sharded", "replicated")
    }
    full = {"x": x, "up": weights["up"], "down": weights["down"]}
    leaves = {name: value.clone().requires_grad_() for name, value in full.items()}
    parts = [{name: weights[name].clone().requires_grad_() for name in NORM} for _ in place.ranks]
    out = plain_block(leaves["x"], leaves, parts, masks["sharded"] if case.rate and case.training else 1.0)
    wanted = {**leaves, **parts[place.index]}
    gradients = dict(zip(wanted, torch.autograd.grad(out, list(wanted.values()), dy), strict=True))
    sent = place.traffic(("all_gather", x.numel()), ("reduce_scatter", x.numel()))
    right = {
        "out": place.part(out.detach(), 1),
        "forward traffic": sent,
        "dx": place.part(gradients["x"], 1),
        "backward traffic": sent,
        **{f"d{name}": gradients[name] for name in NORM},
        "dup": place.part(gradients["up"], 0),
        "ddown": place.part(gradients["down"], 1),
    }
    wrong = dropout_mistakes(x, weights, masks) if case.rate else mistakes(x, weights, place.size)
    return checks.Expected(right, {"out": {label: place.part(value, 1) for label, value in wrong.items()}})


@checks.exercise("12.2", "A block on s/p tokens")
def sequence_parallel_block(block_class: Any) -> checks.Verdict:
    checks.check_cases(
        "12.2", block_class, WITHOUT_DROPOUT, draw=draw, run=run, expect=expect, questions=QUESTIONS, crash=CRASH,
        whose_group=WHOSE_GROUP,
    )  # fmt: skip
    checks.check_cases(
        "12.2", block_class, WITH_DROPOUT, draw=draw, run=run, expect=expect,
        questions=lambda case, observed: (*[WITHOUT_RNG] * (not case.tracker), *DROPOUT_QUESTIONS), crash=CRASH,
        world_sizes=(2, 4, 1),  # several ranks first, because they reveal a mask from the wrong state
        without=checks.twins.DRAWS_ONCE,
    )  # fmt: skip
    return checks.Verdict("The same bytes as with f and g, and only what the matrices read is [b, s, h].")


CRASH = (
    "Write the shape of each line's result beside it: [b, s/p, h] for this rank's tokens, [b, s, h] for all. Which "
    "line gets a shape that it does not expect?"
)
WHOSE_GROUP = "Which of the two mappings was not given `self.group`, and so works in the default group of all ranks?"


def _ask(ask: str, *kinds: str) -> checks.Question:
    return checks.Question(checks.has_kind("out", *kinds), ask)


QUESTIONS = (
    checks.INPUTS_QUESTION,
    _ask("What does forward return? One tensor, this rank's tokens [b, s/p, h].", "none", "type", "structure"),
    _ask(
        "The residual has been added p times. The reduce-scatter sums over the ranks whatever it gets. On which side "
        "of it does the residual belong?",
        P_RESIDUALS,
        P_BOTH,
    ),
    _ask("How many times does the sum contain the bias? On which side of the sum is it added?", P_BIASES),
    _ask("self.bias is no part of `inner`. Where do you add it?", NO_BIAS),
    _ask("What goes in is added to what comes out. Where is the residual?", NO_RESIDUAL),
    _ask("The residual is x, as it came in. Which tensor do you add?", NORMED_RESIDUAL),
    _ask("The norm stands before `inner`. What does `inner` read in yours?", NO_NORM, NORM_LAST),
    _ask(
        "This is one rank's summand. `inner` returns one term on each rank, for all tokens. Which mapping adds the "
        "terms and leaves each rank its tokens?",
        TERM,
        "whole",
    ),
    checks.Question(
        lambda d: ALL_TOKENS in d.names,
        "`inner` holds some columns or heads and needs all tokens, since every rank needs its columns of every token. "
        "Which mapping brings them together?",
    ),
    checks.Question(
        lambda d: "all_reduce" in d.text("forward traffic").partition("saw")[2],
        "An all-reduce gives every rank the sum for all tokens, and sends twice what a reduce-scatter sends. Which "
        "mapping gives this rank its tokens of the sum, and no more?",
    ),
    checks.Question(
        lambda d: d.names == {GETS_RNG},
        "An attention in `inner` drops probabilities, in its own heads. From which tracker shall it draw?",
    ),
    checks.Question(
        lambda d: OWN_TOKENS in d.names,
        "The norm works on each token alone. Gathered first, every rank computes all of it and keeps all of it for "
        "backward, and nothing is saved. On which side of the gather does the norm belong?",
    ),
    checks.Question(
        lambda d: (
            "out" not in d.names and bool({"forward traffic", "backward traffic"} & d.names) and "dx" not in d.names
        ),
        "The numbers are right, the communication is not: one all-gather and one reduce-scatter in each direction. "
        "Which call sends more, or another kind? An all-reduce whose result is then cut sends twice as much.",
    ),
    checks.Question(
        lambda d: "out" not in d.names and "dx" in d.names and "backward traffic" in d.names,
        "The output is right, dx is not. In `inner` each rank computes its own columns, so each has one term of the "
        "gradient of every token. What must the backward of the gather do with them? (See its argument partial_grad.)",
    ),
    checks.Question(
        lambda d: "out" not in d.names,
        "The output is right, a gradient is not. Which part of forward is cut off from autograd, or computed by other "
        "ranks than it should?",
    ),
    checks.Question(
        lambda d: True,
        "x -> norm -> gather -> inner -> reduce-scatter -> + bias -> dropout -> + x. Go through your lines one by one "
        "with p = 1: which tensor does each of them read?",
    ),
)

WITHOUT_RNG = checks.Question(
    lambda d: "out" in d.names,
    "Your block drops the right elements if it's given a tracker. Here rng is None, and the block is training, so it "
    "should still drop, with a mask from torch's current state. What does your forward do differently if rng is None?",
)
DROPOUT_QUESTIONS = (
    checks.INPUTS_QUESTION,
    _ask(
        'Each rank has tokens of its own here. From the state "replicated" all ranks draw the same mask, so the first '
        "token of rank 0 and the first of rank 1 lose the same places. Which state is another one on every rank?",
        REPLICATED,
    ),
    _ask(
        "Nothing was dropped. Which rate does your call of dropout get, and is it told that the block trains?",
        NO_DROPOUT,
    ),
    _ask("The block is in eval mode, where nothing is dropped. What tells dropout so?", IN_EVAL),
    _ask("First the bias, then dropout: what is dropped is y + bias.", BEFORE_BIAS),
    _ask("The residual is not dropped. What stands inside dropout's brackets?", ON_THE_SUM),
    checks.Question(
        lambda d: True,
        "residual + dropout(y + bias, self.hidden_dropout, self.training, sharded=.., rng=rng). From which state do "
        "you draw, and on a tensor of which shape? (A mask for all tokens, drawn before the reduce-scatter, is another "
        "one on every rank, and drops terms of a sum.)",
    ),
)
