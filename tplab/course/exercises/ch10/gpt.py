"""The check for exercise 10.2, the forward pass of a full GPT with tied logits and a loss.

A case's twins repeat the case in other ways, for example in bfloat16 or under torch.no_grad.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from tplab.course import checks
from tplab.course.exercises.ch10 import plain
from tplab.memory.config import GPTConfig
from tplab.plain import GPT
from tplab.runtime import device
from tplab.tensor.full_state import load_full_state_dict
from tplab.tensor.rng import seed_all

LAYERS, HIDDEN, HEADS, VOCAB, BATCH, LENGTH, RATE = 2, 8, 4, 37, 2, 6, 0.4
PIECES = (3, 1, 2)
PAST = 2
CONFIG = GPTConfig(
    num_layers=LAYERS, hidden_size=HIDDEN, num_heads=HEADS, vocab_size=VOCAB, seq_length=LENGTH,
    activation="gelu_tanh", dropout=0.0,
)  # fmt: skip
MASK = "mask"
GETS_RNG = "the layers get rng"
GETS_CACHE = "each layer fills its cache"
NO_NORM = "what comes out without the final norm"
NO_POSITIONS = "what comes out without the positions"
PADDING_TOO = "what comes out when the padding enters the softmax"
SUM = "the sum of the losses, not their mean"
IGNORED_TOO = "what comes out when the ignored token counts in the mean"


@dataclass(frozen=True)
class Call(checks.Case):
    """One call to the model. `what` is "logits", "loss", "dropout" (with stand-ins for the layers), "cache", or "past".

    In a "past" call, the text continues PAST earlier tokens without a cache, so only its positions depend on them.
    """

    what: str
    training: bool = True

    def describe(self, name: str) -> str:
        calls = {
            "logits": "model(ids)",
            "loss": "model(ids, targets)",
            "dropout": "model(ids, rng=rng) with dropout, and a layer of the check's",
            "cache": f"model(ids, cache=cache, past=past) with {', '.join(map(str, PIECES))} tokens",
            "past": f"model(ids, past={PAST}) without a cache",
        }
        mode = ", in eval mode" if not self.training else ", in train mode" if self.what == "cache" else ""
        return calls[self.what] + mode


CASES = (
    Call("logits"),
    Call("loss"),
    Call("dropout"),
    Call("dropout", training=False),
    Call("cache", training=False),
    Call("cache"),
    Call("past"),
    Call("loss", groups=checks.GROUPS),
)


def stand_in(x: Tensor) -> Tensor:
    """Compute something simple that takes the place of a layer, from [b, s, h] to [b, s, h]."""
    return 2 * x.tanh() + x.roll(1, -1)


class StandIn(nn.Module):
    """A stand-in for a layer. It records the options of its calls and sends nothing."""

    def __init__(self, hidden_size: int, num_heads: int, **options: Any) -> None:
        super().__init__()
        self.given: list[dict[str, Any]] = []

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        self.given.append(options)
        return stand_in(x)

    def new_cache(self, batch_size: int, max_length: int) -> None:
        return None


class Problem(NamedTuple):
    full: dict[str, Tensor]  # the unsharded weights, by name
    ids: Tensor  # [b, s]
    targets: Tensor  # [b, s], where one target is ignored
    dlogits: Tensor  # [b, s, v]; a rank receives its shard, [b, s, padded v / p]
    dloss: Tensor  # []
    seed: int  # the tracker's seed


def draw(case: Call, generator: torch.Generator, size: int) -> Problem:
    full = plain.gpt_weights(generator, LAYERS, HIDDEN, VOCAB, LENGTH)
    ids, targets = (torch.randint(VOCAB, (BATCH, LENGTH), generator=generator) for _ in range(2))
    ids[0, 0], ids[1, -1], targets[0, 1], targets[1, 2] = 0, VOCAB - 1, VOCAB - 1, -100
    if case.what == "past":
        ids = ids[:, PAST:]
    dlogits, (dloss,) = checks.random_tensor(generator, *ids.shape, VOCAB), checks.random_tensor(generator, 1)
    return Problem(full, ids, targets, dlogits, dloss, int(torch.randint(10**6, (), generator=generator)))


def padded(logits: Tensor, size: int) -> Tensor:
    """Pad logits [..., v] with zeros up to a multiple of 8 columns per rank."""
    return F.pad(logits, (0, -VOCAB % (8 * size)))


def zeros_in_padding(out: Any) -> Any:
    """Replace -inf, which `parallel_logits` returns for padding, by 0, which a matmul with the padded table returns."""
    return out.masked_fill(out.isneginf(), 0) if isinstance(out, Tensor) else out


def shard_of(logits: Tensor, place: checks.Place) -> Tensor:
    return place.part(padded(logits, place.size), -1)


def give(case: Call, problem: Problem, place: checks.Place) -> Problem:
    return problem._replace(dlogits=shard_of(problem.dlogits, place))


def run(gpt_class: Any, case: Call, given: Problem, group: Any) -> checks.Observed:
    replaced = case.what == "dropout"
    config = replace(CONFIG, dropout=RATE) if replaced else CONFIG
    place: dict[str, Any] = {"device": device(), "dtype": case.dtype}
    model = gpt_class(config, StandIn if replaced else None, group=group, **place)
    full = {k: v.to(device()) for k, v in given.full.items() if not (replaced and k.startswith("layers."))}
    load_full_state_dict(model, full, group)
    model.train(case.training and case.twin is not checks.Twin.EVALUATION)
    ids, targets = given.ids.to(device()), given.targets.to(device())
    if case.what == "cache":
        return in_pieces(model, ids)
    tracker, twin = seed_all(given.seed, group), seed_all(given.seed, group)
    with twin.fork("replicated"):
        mask = F.dropout(torch.ones(BATCH, LENGTH, HIDDEN, **place), RATE)
    torch.manual_seed(dist.get_rank())
    watched = {name: param for name, param in model.named_parameters() if name in full}
    arguments = {"ids": ids, "targets": targets} if case.what == "loss" else {"ids": ids}
    upstream = given.dloss if case.what == "loss" else given.dlogits
    options = {"past": PAST} if case.what == "past" else {}
    seen = checks.observe(
        lambda *inputs: zeros_in_padding(model(*inputs, rng=tracker, **options)),
        upstream.to(device()),
        inputs=arguments,
        parameters=watched,
    )
    if case.what == "loss":
        seen["out"] = checks.twins.loss_in(case.twin, seen["out"])
    if replaced:
        calls = [options for layer in model.layers for options in layer.given]
        missed = any(options.get("rng") is not tracker for options in calls)
        seen[GETS_RNG] = checks.Claim("a layer was called without rng=rng" if missed else "")
    return seen | {MASK: mask}


def in_pieces(model: Any, ids: Tensor) -> checks.Observed:
    """Return the logits of a text that arrives in pieces, computed with a cache."""
    cache, outs, past = model.new_cache(BATCH, LENGTH), [], 0
    with torch.no_grad():
        for piece in ids.split(PIECES, dim=1):
            outs.append(zeros_in_padding(model(piece, cache=cache, past=past)))
            past += piece.shape[1]
    kept = [layer.text.length for layer in cache]
    wrong = f"after {LENGTH} tokens the layers' caches hold {kept}" if set(kept) != {LENGTH} else ""
    fits = all(isinstance(out, Tensor) and out.dim() == 3 for out in outs)
    return {"out": torch.cat(outs, 1) if fits else outs[0], GETS_CACHE: checks.Claim(wrong)}


def logits_of(w: plain.Weights, ids: Tensor) -> Tensor:
    """Return the logits [b, s, v] of a plain GPT with these weights."""
    return functional_call(GPT(CONFIG, device="meta"), dict(w), ids)


def expect(case: Call, problem: Problem, place: checks.Place) -> checks.Expected:
    full, ids = problem.full, problem.ids
    leaves = {name: value.clone().requires_grad_() for name, value in full.items()}
    if case.what == "dropout":
        x = leaves["embedding.weight"][ids] + leaves["positions.weight"][:LENGTH]
        x = stand_in(stand_in(x * place.observed[place.index][MASK].cpu() if case.training else x))
        logits = plain.final_norm(leaves, x) @ leaves["embedding.weight"].t()  # [b, s, v]
    else:
        past = PAST if case.what == "past" else 0
        logits = logits_of({**leaves, "positions.weight": leaves["positions.weight"][past:]}, ids)  # [b, s, v]
    if case.what == "cache":
        return checks.Expected(
            {"out": shard_of(logits.detach(), place)}, {"out": logits_mistakes(problem, place, cached=True)}
        )
    mistakes: dict[str, dict[str, Tensor]] = {}
    if case.what == "loss":
        out = F.cross_entropy(logits.flatten(0, 1), problem.targets.flatten())
        out.backward(problem.dloss)
        mistakes["out"] = loss_mistakes(problem, place.size)
    else:
        out = shard_of(logits, place)
        logits.backward(problem.dlogits)
        mistakes |= {"out": logits_mistakes(problem, place)} if case.what == "logits" else {}
    right: checks.Observed = {"out": out.detach()}
    for name, leaf in leaves.items():
        if case.what == "dropout" and name.startswith("layers."):
            continue  # stand-ins replace the layers
        assert leaf.grad is not None
        right[f"d{name}"] = plain.cut(name, leaf.grad, place.index, place.size)
    tokens = ids.numel()
    blocks = [("all_reduce", tokens * HIDDEN)] * (1 if case.what == "dropout" else 1 + 2 * LAYERS)
    loss_calls = [("all_reduce", tokens), ("all_reduce", tokens + 1)] if case.what == "loss" else []
    right["forward traffic"] = place.traffic(*blocks, *loss_calls)
    right["backward traffic"] = place.traffic(*blocks)
    return checks.Expected(right, mistakes)


def logits_mistakes(problem: Problem, place: checks.Place, cached: bool = False) -> dict[str, Tensor]:
    w, ids = problem.full, problem.ids
    without_norm = GPT(CONFIG, device="meta")
    without_norm.final_norm = nn.Identity()
    made = {
        NO_NORM: functional_call(without_norm, {name: w[name] for name in without_norm.state_dict()}, ids),
        NO_POSITIONS: logits_of({**w, "positions.weight": torch.zeros(LENGTH, HIDDEN, dtype=torch.float64)}, ids),
    }
    if cached:
        again = {**w, "positions.weight": torch.cat([w["positions.weight"][:n] for n in PIECES])}
        made["what comes out when the positions begin at 0 again in every call"] = logits_of(again, ids)
        parts = [logits_of(w, piece) for piece in ids.split(PIECES, 1)]
        made["what comes out when no call knows of those before"] = torch.cat(parts, 1)
    return {label: shard_of(value, place) for label, value in made.items()}


def loss_mistakes(problem: Problem, size: int) -> dict[str, Tensor]:
    logits = logits_of(problem.full, problem.ids).flatten(0, 1)
    targets = problem.targets.flatten()
    total = F.cross_entropy(logits, targets, reduction="sum")
    return {
        PADDING_TOO: F.cross_entropy(padded(logits, size), targets),
        SUM: total,
        IGNORED_TOO: total / len(targets),
    }


def without(case: Call) -> Collection[checks.Twin]:
    if case.what == "past" or (case.what == "cache" and case.training):  # the case in eval mode has all twins
        return tuple(checks.Twin)
    return checks.twins.DRAWS_ONCE if case.what == "dropout" else ()


@checks.exercise("10.2", "ParallelGPT")
def gpt(gpt_class: Any) -> checks.Verdict:
    checks.check_cases(
        "10.2", gpt_class, CASES, draw=draw, give=give, run=run, expect=expect, questions=questions,
        crash=lambda case: {"cache": CACHE, "past": NO_CACHE}.get(case.what, CRASH), whose_group=WHOSE_GROUP,
        without=without,
    )  # fmt: skip
    return checks.Verdict(
        "One all-reduce for the embedding, one for the logits' backward, four a layer, two small ones for the loss."
    )


CRASH = (
    "Write the shape next to each line: ids [b, s], both embeddings [b, s, h], every layer [b, s, h], logits [b, s, "
    "v/p], loss a single number. Which line gets another one?"
)
CACHE = (
    "Here the text comes in several calls. At which place of the text does the first of `ids` stand, and which of the "
    "caches belongs to which layer?"
)
CACHE_IN_TRAINING = (
    "Your model uses the cache in eval mode but not in train mode. The caller decides whether there's a cache, in "
    "either mode. Which of your lines looks at self.training before it passes the cache on, or before it reads `past`?"
)
NO_CACHE = (
    "Here the tokens before came in earlier calls, and there's no cache. The first of `ids` still stands at place "
    "`past` of the text. Which line looks at `cache` to find the positions?"
)
DROPOUT = (
    "With the rate config.dropout, what is dropped in front of the first layer, and from which state of `rng`? The "
    "layers draw from the same `rng`: do they get it? In eval mode nothing is dropped."
)
WHOSE_GROUP = "Which call works over the ranks and was not given `group=self.group`?"


def _ask(ask: str, *kinds: str) -> checks.Question:
    return checks.Question(checks.has_kind("out", *kinds), ask)


QUESTIONS = (
    checks.INPUTS_QUESTION,
    _ask(
        "What does forward return? Logits [b, s, v/p], or with targets the loss, a single number.",
        "none",
        "type",
        "structure",
        "shape",
    ),
    _ask(
        "The logits of a rank are those of its own rows of the table, [b, s, v/p]. Which option gathered them?", "whole"
    ),
    _ask("Behind the last layer stands a norm. What do your logits read?", NO_NORM),
    _ask(
        "Attention does not know the order of its tokens. Which vector tells a token its place?",
        NO_POSITIONS,
    ),
    _ask(
        "The table is padded until p divides it, and the padding is no token. Which argument tells the loss how many "
        "tokens there are?",
        PADDING_TOO,
    ),
    _ask(
        "The mean is over the tokens that have a target. What does the loss of chapter 08 return without further "
        "options?",
        SUM,
        IGNORED_TOO,
    ),
    checks.Question(
        lambda d: (
            "out" not in d.names and {"forward traffic", "backward traffic"} & d.names != set() and len(d.names) < 3
        ),
        "The numbers are right, the communication is not. The modules send what is needed. Which call of yours sends "
        "more?",
    ),
    checks.Question(
        lambda d: "dembedding.weight" in d.names and d.names <= {"dembedding.weight", "backward traffic"},
        "The table is used twice, for the look-up and for the logits, and both uses add to its gradient. Is the "
        "weight that your logits read the parameter itself, and does its f, which parallel_logits has inside, see "
        "your x?",
    ),
    checks.Question(
        lambda d: "out" not in d.names,
        "The output is right, gradients are not. Where in your forward pass does autograd lose the way, or where is "
        "the f in front of the logits?",
    ),
    checks.Question(
        lambda d: True,
        "Embedding + positions -> layers -> final norm -> logits with the embedding's rows -> loss. Go through your "
        "lines: does each layer read what the one before it has left?",
    ),
)


def questions(case: Call, observed: Sequence[checks.Observed]) -> tuple[checks.Question, ...]:
    cache = CACHE_IN_TRAINING if case.training else CACHE
    special = {"dropout": DROPOUT, "cache": cache, "past": NO_CACHE}.get(case.what)
    return (checks.INPUTS_QUESTION, checks.Question(lambda d: True, special)) if special else QUESTIONS
