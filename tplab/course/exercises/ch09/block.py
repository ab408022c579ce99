"""The check for exercise 9.4, a block that applies dropout to a sharded tensor and to a replicated tensor.

The reference is the same block in a single process, in float64. Inside the block, it drops the elements that each rank
drops in its own columns. At the end of the block, it drops the elements that all ranks drop.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from tplab.course import checks
from tplab.course.exercises.ch09.masks import CURRENT, REPLICATED, SHARDED, draw_masks
from tplab.runtime import device
from tplab.tensor.full_state import load_full_state_dict
from tplab.tensor.rng import seed_all

HIDDEN, FFN, LEADING, RATE = 8, 16, (4, 5), 0.4
NAMES = {"A": "up.weight", "a": "up.bias", "B": "down.weight", "c": "down.bias"}
SHARDED_DIM = {"A": 0, "a": 0, "B": 1}
MASKS = "masks"
RIGHT_STREAMS = (SHARDED, REPLICATED)  # the states that the two masks are drawn from: (inside, at the end)

OUT, SECOND = "out", "out of a second pass, under torch.no_grad"
EVAL, AFTERWARDS = "out in eval mode", "numbers drawn afterwards"
NONE = "what comes out without any dropout"
NO_INNER = "what comes out without dropout inside"
NO_OUTER = "what comes out without dropout at the end"
RESIDUAL_TOO = "what comes out when x is dropped as well"
NOT_SCALED = "what comes out when the places that are kept stay as they are, not divided by 1 - rate"
BEFORE_GELU = "what comes out when the first dropout stands before GELU"
WRONG_STREAMS = {  # the states that the two masks are drawn from: (inside, at the end)
    (REPLICATED, REPLICATED): "what comes out when both masks are drawn from 'replicated'",
    (SHARDED, SHARDED): "what comes out when both masks are drawn from 'sharded'",
    (REPLICATED, SHARDED): "what comes out when 'sharded' and 'replicated' change places",
    (CURRENT, CURRENT): "what comes out when both masks are drawn from torch's current state",
    (CURRENT, REPLICATED): "what comes out when the mask inside is drawn from torch's current state",
    (SHARDED, CURRENT): "what comes out when the mask at the end is drawn from torch's current state",
}


class Passes(checks.Case):
    """Two training passes, the second under no_grad, with a pass in eval mode between them."""

    def describe(self, name: str) -> str:
        return ""


CASES = (Passes(), Passes(groups=checks.GROUPS))


class Problem(NamedTuple):
    full: dict[str, Tensor]  # the weights: A [m, h], a [m], B [h, m], c [h]
    x: Tensor  # [..., h]
    second: Tensor  # [..., h], the input of the second pass
    dy: Tensor  # [..., h]
    seed: int  # the tracker's seed


def draw(case: Passes, generator: torch.Generator, size: int) -> Problem:
    shapes = {"A": (FFN, HIDDEN), "a": (FFN,), "B": (HIDDEN, FFN), "c": (HIDDEN,)}
    full = {name: checks.random_tensor(generator, *shape) for name, shape in shapes.items()}
    x, second, dy = (checks.random_tensor(generator, *LEADING, HIDDEN) for _ in range(3))
    return Problem(full, x, second, dy, int(torch.randint(10**6, (), generator=generator)))


def run(block_class: Any, case: Passes, given: Problem, group: Any) -> checks.Observed:
    tracker = seed_all(given.seed, group)
    state = torch.get_rng_state()
    with checks.called_as(f"ParallelBlock({HIDDEN}, {FFN}, {RATE}, tracker, group=group)"):
        block = block_class(HIDDEN, FFN, RATE, tracker, group=group, device=device(), dtype=case.dtype)
    load_full_state_dict(block, {NAMES[name]: value.to(device()) for name, value in given.full.items()}, group)
    torch.set_rng_state(state)
    x, second = given.x.to(device()), given.second.to(device())
    params = dict(block.named_parameters())
    watched = {letter: params[name] for letter, name in NAMES.items()}
    seen = checks.observe(block, given.dy.to(device()), inputs={"x": x}, parameters=watched)
    block.eval()
    before = checks.Snapshot(x=x, **{"x of the second pass": second})
    seen[EVAL] = block(x)  # with gradients enabled, because only self.training may turn dropout off
    block.train()
    with torch.no_grad():
        seen[SECOND] = block(second)
    seen["inputs unchanged"] = seen.get("inputs unchanged") or before.changed()
    seen[AFTERWARDS] = torch.rand(4)
    return seen | {MASKS: masks(given.seed, group)}


def masks(seed: int, group: Any) -> dict[tuple[str, str], list[Tensor]]:
    """Draw this rank's masks with plain PyTorch for each choice of states: inside and at the end, in both passes."""
    index, size = dist.get_rank(group), dist.get_world_size(group)
    inner, outer = (*LEADING, FFN // size), (*LEADING, HIDDEN)
    return {
        (inside, end): draw_masks([(inside, inner), (end, outer)] * 2, seed, index, RATE)
        for inside, end in (RIGHT_STREAMS, *WRONG_STREAMS)
    }


def forward(
    w: Mapping[str, Tensor], x: Tensor, inner: Tensor | float, outer: Tensor | float, before_gelu: bool = False
) -> Tensor:
    """Run the block in a single process. `inner` is the mask for all columns [..., m]. `outer` is the output's mask."""
    z = F.linear(x, w["A"], w["a"])  # [..., m]
    z = F.gelu(z * inner) if before_gelu else F.gelu(z) * inner
    return x + F.linear(z, w["B"], w["c"]) * outer  # [..., h]


def expect(case: Passes, problem: Problem, place: checks.Place) -> checks.Expected:
    full, x, second, dy, seed = problem

    def drawn(streams: tuple[str, str], number: int = 0) -> tuple[Tensor, Tensor]:
        """Return a pass's masks: all ranks' inner masks side by side [..., m], and this rank's outer mask [..., h]."""
        ranks = [seen[MASKS][streams] for seen in place.observed]
        return torch.cat([rank[2 * number] for rank in ranks], -1), ranks[place.index][2 * number + 1]

    inner, outer = drawn(RIGHT_STREAMS)
    leaves = {name: value.clone().requires_grad_() for name, value in {"x": x, **full}.items()}
    out = forward(leaves, leaves["x"], inner, outer)
    out.backward(dy)
    right: checks.Observed = {
        OUT: out.detach(),
        SECOND: forward(full, second, *drawn(RIGHT_STREAMS, 1)),
        EVAL: forward(full, x, 1.0, 1.0),
    }
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        right[f"d{name}"] = place.part(leaf.grad, SHARDED_DIM[name]) if name in SHARDED_DIM else leaf.grad
    right[AFTERWARDS] = torch.rand(4, generator=torch.Generator().manual_seed(seed))
    right["forward traffic"] = right["backward traffic"] = place.traffic(("all_reduce", x.numel()))
    mistakes = {label: forward(full, x, *drawn(streams)) for streams, label in WRONG_STREAMS.items()}
    mistakes |= {
        NONE: forward(full, x, 1.0, 1.0),
        NO_INNER: forward(full, x, 1.0, outer),
        NO_OUTER: forward(full, x, inner, 1.0),
        RESIDUAL_TOO: forward(full, x, inner, 1.0) * outer,
        NOT_SCALED: forward(full, x, inner * (1 - RATE), outer * (1 - RATE)),
        BEFORE_GELU: forward(full, x, inner, outer, before_gelu=True),
    }
    return checks.Expected(right, {OUT: mistakes, SECOND: {NONE: forward(full, second, 1.0, 1.0)}})


@checks.exercise("9.4", "A block that drops in both kinds of places")
def block(block_class: Any) -> checks.Verdict:
    checks.check_cases(
        "9.4", block_class, CASES, draw=draw, run=run, expect=expect, questions=QUESTIONS, crash=CRASH,
        whose_group=WHOSE_GROUP, without=checks.twins.DRAWS_ONCE,  # because every call draws random numbers
        values_on_cpu=True,
    )  # fmt: skip
    return checks.Verdict("Inside the MLP each rank drops its own places, at the end all ranks drop the same ones.")


def out_is(*labels: str) -> Callable[[checks.Differences], bool]:
    return checks.has_kind(OUT, *labels)


WHOSE_GROUP = "Which layer was not given `group`, and so works with all ranks?"
CRASH = (
    "Write the shape of one rank's tensor next to each line: [..., h], [..., m/p], [..., m/p], [..., h]. And what does "
    "`fork` want: a `with`, and the name of a state?"
)
QUESTIONS = (
    checks.INPUTS_QUESTION,
    checks.Question(
        out_is(WRONG_STREAMS[REPLICATED, SHARDED]),
        "The two names have changed places. Which of the two tensors is the same on all ranks: the one inside, "
        "[..., m/p], or the one after g, [..., h]?",
    ),
    checks.Question(
        out_is(WRONG_STREAMS[REPLICATED, REPLICATED]),
        "Inside the MLP all ranks drop the same places of different columns. Is [..., m/p] the same tensor on all "
        "ranks, or has each rank its own part?",
    ),
    checks.Question(
        out_is(WRONG_STREAMS[SHARDED, SHARDED]),
        "After g every rank holds the same [..., h], and each drops other places of it: from here on they hold "
        "different tensors. Which state is alike on all ranks?",
    ),
    checks.Question(
        out_is(*(label for streams, label in WRONG_STREAMS.items() if CURRENT in streams)),
        "A mask comes from torch's current state, outside of any fork. Does the dropout stand within the `with`?",
    ),
    checks.Question(
        out_is(RESIDUAL_TOO),
        "Only what the MLP adds is dropped; x itself goes on as it is. Where does the last dropout stand?",
    ),
    checks.Question(
        out_is(NOT_SCALED),
        "The right places are dropped, but what is kept has to be divided by 1 - rate, so that the mean stays what it "
        "was. `F.dropout` does that.",
    ),
    checks.Question(
        out_is(BEFORE_GELU),
        "The first dropout works on GELU's output. On which side of GELU does yours stand?",
    ),
    checks.Question(
        out_is(NONE, NO_INNER, NO_OUTER),
        "A dropout is missing while the block trains. There are two: one behind GELU, one behind `down`.",
    ),
    checks.Question(
        lambda d: SECOND in d.names and checks.has_kind(SECOND, NONE)(d) and OUT not in d.names,
        "In the second pass the block is in training mode, but runs under torch.no_grad, and nothing was dropped. Only "
        "`self.training` decides whether to drop. What else does your code look at?",
    ),
    checks.Question(
        lambda d: EVAL in d.names and not checks.has_kind(OUT, "value")(d),
        "In eval mode nothing is dropped. Which argument of `F.dropout` says whether the block is training?",
    ),
    checks.Question(
        lambda d: d.names == {SECOND},
        "The first pass is right, the second is not: its masks have to go on where the first pass, and nothing else, "
        "left the states. What draws more than once in a pass, or in eval mode, or seeds anew?",
    ),
    checks.Question(
        lambda d: AFTERWARDS in d.names and OUT not in d.names,
        "The outputs are right, but torch's current state has moved or was seeded anew. Who draws outside of the "
        "forks?",
    ),
    checks.Question(
        lambda d: bool({"forward traffic", "backward traffic"} & d.names) and OUT not in d.names,
        "The numbers are right, the communication is not. Random numbers need none: what is sent beside g and f?",
    ),
    checks.Question(
        lambda d: bool({"dx", "dA", "dB", "da", "dc"} & d.names) and OUT not in d.names,
        "The output is right, a gradient is not. Which step does autograd not know about?",
    ),
    checks.Question(
        lambda d: OUT in d.names and not checks.has_kind(OUT, "zeros")(d) and not d.malformed,
        "x + dropout(down(dropout(GELU(up(x))))), each dropout in its own state, with the rate `self.rate`, which is "
        "the part that is dropped. Where do your steps, or their order, differ?",
    ),
)
