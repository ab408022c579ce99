"""What the check of exercise 12.2 asks, and what wrong blocks give."""

from collections.abc import Mapping

from torch import Tensor
from torch.nn import functional as F

from tplab.course.checks import INPUTS_QUESTION, Question, has_kind

OWN_TOKENS = "the norm is given this rank's tokens"
ALL_TOKENS = "self.inner is given all tokens"
GETS_RNG = "self.inner is given rng"
CRASH = (
    "Write the shape of each line's result beside it: [b, s/p, h] for this rank's tokens, [b, s, h] for all. Which "
    "line gets a shape that it does not expect?"
)
WHOSE_GROUP = "Which of the two mappings was not given `self.group`, and so works in the default group of all ranks?"

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

Weights = Mapping[str, Tensor]


def normed(x: Tensor, w: Weights) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w["norm.weight"], w["norm.bias"])


def inner(y: Tensor, w: Weights) -> Tensor:
    return F.linear(F.gelu(F.linear(y, w["up"])), w["down"])


def mistakes(x: Tensor, w: Weights, p: int) -> dict[str, Tensor]:
    """What a block without dropout gives, whole, when one of its steps is missing, doubled or elsewhere."""
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
        TERM: x + inner(normed(x, w), first) + w["bias"],  # seen on rank 0, whose summand this is
    }


def dropout_mistakes(x: Tensor, w: Weights, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a block gives that drops at another place or draws from another state."""
    y, mask = inner(normed(x, w), w), masks["sharded"]
    return {
        NO_DROPOUT: x + y + w["bias"],
        REPLICATED: x + (y + w["bias"]) * masks["replicated"],
        IN_EVAL: x + (y + w["bias"]) * mask,
        BEFORE_BIAS: x + y * mask + w["bias"],
        ON_THE_SUM: (x + y + w["bias"]) * mask,
    }


def _ask(ask: str, *kinds: str) -> Question:
    return Question(has_kind("out", *kinds), ask)


QUESTIONS = (
    INPUTS_QUESTION,
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
    Question(
        lambda d: ALL_TOKENS in d.names,
        "`inner` holds some columns or heads and needs all tokens, since every rank needs its columns of every token. "
        "Which mapping brings them together?",
    ),
    Question(
        lambda d: "all_reduce" in d.text("forward traffic").partition("saw")[2],
        "An all-reduce gives every rank the sum for all tokens, and sends twice what a reduce-scatter sends. Which "
        "mapping gives this rank its tokens of the sum, and no more?",
    ),
    Question(
        lambda d: d.names == {GETS_RNG},
        "An attention in `inner` drops probabilities, in its own heads. From which tracker shall it draw?",
    ),
    Question(
        lambda d: OWN_TOKENS in d.names,
        "The norm works on each token alone. Gathered first, every rank computes all of it and keeps all of it for "
        "backward, and nothing is saved. On which side of the gather does the norm belong?",
    ),
    Question(
        lambda d: (
            "out" not in d.names and bool({"forward traffic", "backward traffic"} & d.names) and "dx" not in d.names
        ),
        "The numbers are right, the communication is not: one all-gather and one reduce-scatter in each direction. "
        "Which call sends more, or another kind? An all-reduce whose result is then cut sends twice as much.",
    ),
    Question(
        lambda d: "out" not in d.names and "dx" in d.names and "backward traffic" in d.names,
        "The output is right, dx is not. In `inner` each rank computes its own columns, so each has one term of the "
        "gradient of every token. What must the backward of the gather do with them? (See its argument partial_grad.)",
    ),
    Question(
        lambda d: "out" not in d.names,
        "The output is right, a gradient is not. Which part of forward is cut off from autograd, or computed by other "
        "ranks than it should?",
    ),
    Question(
        lambda d: True,
        "x -> norm -> gather -> inner -> reduce-scatter -> + bias -> dropout -> + x. Go through your lines one by one "
        "with p = 1: which tensor does each of them read?",
    ),
)

DROPOUT_QUESTIONS = (
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
    Question(
        lambda d: True,
        "residual + dropout(y + bias, self.hidden_dropout, self.training, sharded=.., rng=rng). From which state do "
        "you draw, and on a tensor of which shape? (A mask for all tokens, drawn before the reduce-scatter, is another "
        "one on every rank, and drops terms of a sum.)",
    ),
)
