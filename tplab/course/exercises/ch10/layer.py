"""The check for exercise 10.1, the forward pass of a transformer layer.

A case's twins repeat the case in other ways, for example in bfloat16 or under torch.no_grad.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from tplab.course import checks
from tplab.course.exercises.ch10 import plain
from tplab.runtime import device
from tplab.tensor.full_state import load_full_state_dict
from tplab.tensor.rng import seed_all

HIDDEN, HEADS, BATCH, LENGTH, RATE = 8, 4, 2, 5, 0.4
PIECES = (3, 1, 1)
MASKS = "masks"

GETS_RNG = "the attention gets rng"
GETS_CACHE = "the attention gets the cache"
P_RESIDUALS = "what comes out when the residuals are added on every rank before the sum: p residuals"
P_BIASES = "what comes out when the last biases are added on every rank before the sum: p biases"
ONLY_MLP = " (in the MLP's block)"
P_OF_BOTH = f"{P_RESIDUALS}, and p biases{ONLY_MLP}"
NO_BIASES = "what comes out without the blocks' last biases"
TWO_BIASES = "what comes out with the blocks' last biases added twice"
NO_DROPOUT = "what comes out without dropout"
BEFORE_BIAS = "what comes out when dropout works on the blocks' outputs before their biases are added"
ON_THE_SUM = "what comes out when dropout works on the sums, the residuals included"


@dataclass(frozen=True)
class Call(checks.Case):
    """One way to build and run the layer. With `cached`, the text arrives in pieces, and the layer uses a cache."""

    post: bool = False
    causal: bool = True
    rate: float = 0.0
    training: bool = True
    cached: bool = False

    @property
    def options(self) -> dict[str, Any]:
        made: dict[str, Any] = {"hidden_dropout": self.rate} if self.rate else {}
        made |= {} if self.causal else {"causal": False}
        return made | ({"apply_residual_connection_post_layernorm": True} if self.post else {})

    def describe(self, name: str) -> str:
        options = [f"{key}={value}" for key, value in self.options.items()] + ["group=group"] * bool(self.groups)
        call = f"{name}({', '.join([str(HIDDEN), str(HEADS), *options])})"
        extra = " in eval mode" if not self.training else " in train mode" if self.cached else ""
        return call + extra + (f" with a cache, {' then '.join(map(str, PIECES))} tokens" if self.cached else "")


CASES = (
    Call(),
    Call(post=True),
    Call(causal=False),
    Call(cached=True, training=False),
    Call(cached=True),
    Call(post=True, groups=checks.GROUPS),
)
DROPPING = (Call(rate=RATE), Call(rate=RATE, training=False), Call(rate=RATE, cached=True))


class Problem(NamedTuple):
    full: dict[str, Tensor]  # the unsharded weights, by name
    x: Tensor  # [b, s, h]
    dy: Tensor  # [b, s, h]
    seed: int  # the tracker's seed


def draw(case: Call, generator: torch.Generator, size: int) -> Problem:
    x, dy = (checks.random_tensor(generator, BATCH, LENGTH, HIDDEN) for _ in range(2))
    seed = int(torch.randint(10**6, (), generator=generator))
    return Problem(plain.layer_weights(generator, HIDDEN), x, dy, seed)


def run(layer_class: Any, case: Call, given: Problem, group: Any) -> checks.Observed:
    place: dict[str, Any] = {"device": device(), "dtype": case.dtype}
    layer = layer_class(HIDDEN, HEADS, **case.options, group=group, **place)
    load_full_state_dict(layer, {name: value.to(device()) for name, value in given.full.items()}, group)
    layer.train(case.training)
    tracker, twin = seed_all(given.seed, group), seed_all(given.seed, group)
    lengths = PIECES if case.cached else (LENGTH,)
    with twin.fork("replicated"):
        drawn = [[F.dropout(torch.ones(BATCH, s, HIDDEN, **place), RATE) for _ in range(2)] for s in lengths]
    masks = [torch.cat(pieces, 1) for pieces in zip(*drawn, strict=True)]
    torch.manual_seed(dist.get_rank())  # so that a mask from the current state differs between ranks
    calls: list[dict[str, Any]] = []
    layer.attention.register_forward_pre_hook(lambda _, __, options: calls.append(dict(options)), with_kwargs=True)
    x = given.x.to(device())
    if case.cached:
        return in_pieces(layer, x, calls, tracker if case.rate else None) | {MASKS: masks}
    params = dict(layer.named_parameters())
    watched = {name: params.get(name) for name in given.full}
    seen = checks.observe(lambda x: layer(x, rng=tracker), given.dy.to(device()), inputs={"x": x}, parameters=watched)
    missed = any(options.get("rng") is not tracker for options in calls)
    return seen | {GETS_RNG: checks.Claim("self.attention was called without rng=rng" if missed else ""), MASKS: masks}


def in_pieces(layer: Any, x: Tensor, calls: list[dict[str, Any]], rng: Any) -> checks.Observed:
    """Return the layer's output for a text that arrives in pieces, computed with a cache."""
    layer_cache = layer.new_cache(BATCH, LENGTH)
    with torch.no_grad():
        outs = [layer(piece, cache=layer_cache, rng=rng) for piece in x.split(PIECES, dim=1)]
    missed = any(options.get("cache") is not layer_cache for options in calls)
    claim = checks.Claim("self.attention was called without cache=cache" if missed else "")
    fits = all(isinstance(out, Tensor) for out in outs)
    return {"out": torch.cat(outs, 1) if fits else outs[0], GETS_CACHE: claim}


def expect(case: Call, problem: Problem, place: checks.Place) -> checks.Expected:
    full, x, dy, _ = problem
    first, second = (mask.cpu() for mask in place.observed[place.index][MASKS])
    masks = (first, second) if case.rate and case.training else (1.0, 1.0)
    fixed: dict[str, Any] = {"w": full, "heads": HEADS, "causal": case.causal, "post": case.post, "masks": masks}
    leaves = {name: value.clone().requires_grad_() for name, value in {"x": x, **full}.items()}
    out = plain.Layer(**{**fixed, "w": leaves})(leaves["x"])
    out.backward(dy)
    right: checks.Observed = {"out": out.detach()}
    if not case.cached:
        for name, leaf in leaves.items():
            assert leaf.grad is not None
            right[f"d{name}"] = plain.cut(name, leaf.grad, place.index, place.size)
        right["forward traffic"] = right["backward traffic"] = place.traffic(*[("all_reduce", x.numel())] * 2)
    mistakes = {label: mistake(plain.Layer(**fixed), x) for label, mistake in plain.MISTAKES.items()}
    mistakes |= {label: plain.Layer(**fixed, bias=times)(x) for label, times in ((NO_BIASES, 0.0), (TWO_BIASES, 2.0))}
    if place.size > 1:
        mistakes |= before_the_sum(fixed, x, place.size)
    if case.rate:
        mistakes |= dropout_mistakes({**fixed, "masks": (first, second)}, x)
    return checks.Expected(right, {"out": mistakes})


def before_the_sum(fixed: Mapping[str, Any], x: Tensor, q: int) -> dict[str, Tensor]:
    """Return the outputs if each of q ranks adds a block's residual or final bias before the sum over the ranks."""
    layer = plain.Layer(**fixed)
    normed = layer.norm1(x)
    after = layer.keep(x, normed) + layer.attention(normed)
    normed = layer.norm2(after)
    right, more, bias = layer(x), (q - 1) * layer.keep(after, normed), (q - 1) * layer.w["mlp.down.bias"]
    return {
        P_RESIDUALS: plain.Layer(**fixed, residual=float(q))(x),
        P_BIASES: plain.Layer(**fixed, bias=float(q))(x),
        P_RESIDUALS + ONLY_MLP: right + more,
        P_BIASES + ONLY_MLP: right + bias,
        P_OF_BOTH: right + more + bias,
    }


def dropout_mistakes(fixed: Mapping[str, Any], x: Tensor) -> dict[str, Tensor]:
    """Return the outputs of layers that apply the right masks in the wrong place or mode, or no masks at all."""
    layer, bare = plain.Layer(**fixed), plain.Layer(**{**fixed, "masks": (1.0, 1.0)})
    normed = bare.norm1(x)
    first = (bare.keep(x, normed) + bare.attention(normed)) * layer.masks[0]
    second = bare.norm2(first)
    return {
        NO_DROPOUT: bare(x),
        BEFORE_BIAS: plain.Layer(**fixed, drop=lambda y, bias, mask: y * mask + bias)(x),
        ON_THE_SUM: (bare.keep(first, second) + bare.mlp(second)) * layer.masks[1],
        "what comes out when it drops in eval mode too": layer(x),
    }


def without(case: Call) -> Collection[checks.Twin]:
    if case.cached and case.training:  # the case in eval mode has all twins
        return tuple(checks.Twin)
    return checks.twins.DRAWS_ONCE if case.rate else ()


@checks.exercise("10.1", "ParallelTransformerLayer")
def transformer_layer(layer_class: Any) -> checks.Verdict:
    def check(cases: Sequence[Call], world_sizes: Sequence[int]) -> None:
        checks.check_cases(
            "10.1", layer_class, cases, draw=draw, run=run, expect=expect, questions=questions,
            crash=lambda case: CACHE if case.cached else CRASH, whose_group=WHOSE_GROUP, world_sizes=world_sizes,
            without=without,
        )  # fmt: skip

    check(CASES, checks.WORLD_SIZES)
    check(DROPPING, (2, 4, 1))  # several ranks first, because a wrong random state makes them disagree
    return checks.Verdict(
        "Two all-reduces of b·s·h numbers forward and two backward; norms, biases and dropout send nothing."
    )


CRASH = (
    "With skip_bias_add=True a block returns two things, (y [b, s, h], bias [h]). What does each of your lines get, "
    "and what shape has it?"
)
CACHE = (
    "A cache holds the keys and values of the tokens before. Who reads it and writes into it, and which argument of "
    "your forward has to reach it?"
)
CACHE_IN_TRAINING = (
    "Your layer uses the cache in eval mode but not in train mode. The caller decides whether there's a cache, in "
    "either mode. Which of your lines looks at self.training before it passes the cache to the attention?"
)
WHOSE_GROUP = "Which collective, or which call for a rank or a size, did you write that was not given `group`?"


def _ask(ask: str, *kinds: str) -> checks.Question:
    return checks.Question(checks.has_kind("out", *kinds), ask)


QUESTIONS = (
    checks.INPUTS_QUESTION,
    _ask("What does forward return? One tensor [b, s, h].", "none", "type", "structure"),
    _ask(
        "p residuals have been added up. g sums over the ranks whatever it gets. On which side of g must a tensor be "
        "added that every rank holds whole?",
        P_RESIDUALS,
        P_RESIDUALS + ONLY_MLP,
        P_OF_BOTH,
    ),
    _ask(
        "How many times does the sum over the ranks contain the bias? On which side of g is it added?",
        P_BIASES,
        P_BIASES + ONLY_MLP,
    ),
    _ask(
        "With apply_residual_connection_post_layernorm the residual is what the norm returned, without it what the "
        "norm was given. Which of the two do you keep, and when?",
        plain.OTHER_LN,
    ),
    _ask(
        "Here a norm stands before its block, for both settings; the setting only says which side of the norm the "
        "residual is taken from. Where does your norm stand?",
        plain.VASWANI,
        plain.NORM_OF_BLOCK,
    ),
    _ask("The residual around the MLP starts behind the attention. To which tensor do you add it?", plain.ONE_RESIDUAL),
    _ask("The MLP reads what the attention has left, x + attention. What does yours read?", plain.BESIDE),
    _ask(
        "Each block has a norm of its own: attention_norm before the attention, mlp_norm before the MLP. Which block "
        "reads a tensor that went through another norm, or through none?",
        plain.NO_SECOND_NORM,
        plain.NO_FIRST_NORM,
        plain.SAME_NORM,
        plain.SWAPPED_NORMS,
    ),
    _ask(
        "A residual is missing: what goes in is added to what comes out, around each of the two blocks. Around which "
        "one do you leave it out?",
        plain.NO_RESIDUAL,
        plain.NO_FIRST_RESIDUAL,
        plain.NO_SECOND_RESIDUAL,
    ),
    _ask("First the attention, then the MLP. In which order do yours run?", plain.MLP_FIRST),
    checks.Question(
        checks.has_kind("dmlp.down.bias", "1/p"),
        "A last bias is whole on every rank and added once, behind g, where nothing is summed any more. What of yours "
        "divides it by the number of ranks?",
    ),
    _ask(
        "A block returns its output without its last bias, and the bias beside it. How often do you add it?",
        NO_BIASES,
        TWO_BIASES,
    ),
    checks.Question(
        lambda d: GETS_RNG in d.names and "out" not in d.names,
        "The attention has a dropout inside, of its probabilities, in which each rank drops for itself. From what "
        "shall it draw?",
    ),
    checks.Question(
        lambda d: "out" not in d.names and {"forward traffic", "backward traffic"} & d.names != set(),
        "The output is right, the communication is not. Two all-reduces forward and two backward are in the blocks "
        "already; norms, biases, dropout and residuals need none. Which call of yours sends something?",
    ),
    checks.Question(
        lambda d: (
            "out" not in d.names and checks.has_no_gradient("dx", *(f"d{name}.weight" for name in plain.LINEAR))(d)
        ),
        "The output is right and a gradient does not arrive. Which line does autograd not know about?",
    ),
    checks.Question(
        lambda d: "out" not in d.names,
        "The output is right, a gradient is not. Which part of your forward pass is cut off from autograd?",
    ),
    checks.Question(
        lambda d: True,
        "x -> norm -> attention, + bias, + residual -> norm -> MLP, + bias, + residual. Go through your lines one by "
        "one with p = 1: which tensor does each of them read?",
    ),
)

RANKS_DISAGREE = checks.Question(
    lambda d: "out" in d.names,
    "The ranks hold different outputs now. The residual stream is replicated: all ranks must drop the same places of "
    "it. "
    'From which state of the tracker do you draw, "replicated" or "sharded", or from none of them?',
)
NO_MASK = checks.Question(
    lambda d: "out" in d.names, "The layer is in eval mode, where nothing is dropped. What tells dropout so?"
)
DROPS_WITH_CACHE = (
    "The layer is in training mode, and it was given a cache. It drops correctly without a cache. Only self.training "
    "decides whether to drop. Which of your lines also looks at the cache, or at whether autograd is on?"
)
DROPOUT = checks.Question(
    lambda d: True,
    "dropout(y + bias) is added to the residual, for the attention first and then for the MLP, drawn from the state "
    '"replicated" of `rng`. Which of the three is different in your lines: what is dropped, the order, or the state?',
)


def questions(case: Call, observed: Sequence[checks.Observed]) -> tuple[checks.Question, ...]:
    if case.cached:
        ask = DROPS_WITH_CACHE if case.rate else CACHE_IN_TRAINING if case.training else CACHE
        return checks.INPUTS_QUESTION, checks.Question(lambda d: True, ask)
    if not case.rate:
        return QUESTIONS
    outs = [rank["out"] for rank in observed]
    ranks_agree = all(isinstance(out, Tensor) and torch.equal(out, outs[0]) for out in outs)
    special = [*[NO_MASK] * (not case.training), *[RANKS_DISAGREE] * (not ranks_agree)]
    return checks.INPUTS_QUESTION, *special, DROPOUT
