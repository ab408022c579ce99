"""What the check of exercise 10.1 asks when a layer is wrong, and what it calls the mistakes."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from tplab.course.chapters.ch10 import plain
from tplab.course.checks import INPUTS_QUESTION, Question, has_kind, has_no_gradient

GETS_RNG = "the attention gets rng"
GETS_CACHE = "the attention gets the cache"
P_RESIDUALS = "what comes out when the residuals are added on every rank before the sum: p residuals"
P_BIASES = "what comes out when the last biases are added on every rank before the sum: p biases"
ONLY_MLP = " (in the MLP's block)"
P_OF_BOTH = f"{P_RESIDUALS}, and p biases{ONLY_MLP}"
NO_DROPOUT = "what comes out without dropout"
BEFORE_BIAS = "what comes out when dropout works on the blocks' outputs before their biases are added"
ON_THE_SUM = "what comes out when dropout works on the sums, the residuals included"

CRASH = (
    "With skip_bias_add=True a block returns two things, (y [b, s, h], bias [h]). What does each of your lines get, "
    "and what shape has it?"
)
CACHE = (
    "A cache holds the keys and values of the tokens before. Who reads it and writes into it, and which argument of "
    "your forward has to reach it?"
)
WHOSE_GROUP = "Which collective, or which call for a rank or a size, did you write that was not given `group`?"


def _ask(ask: str, *kinds: str) -> Question:
    return Question(has_kind("out", *kinds), ask)


QUESTIONS = (
    INPUTS_QUESTION,
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
    Question(
        has_kind("dmlp.down.bias", "1/p"),
        "A last bias is whole on every rank and added once, behind g, where nothing is summed any more. What of yours "
        "divides it by the number of ranks?",
    ),
    _ask(
        "A block returns its output without its last bias, and the bias beside it. How often do you add it?",
        "what comes out without the blocks' last biases",
        "what comes out with the blocks' last biases added twice",
    ),
    Question(
        lambda d: GETS_RNG in d.names and "out" not in d.names,
        "The attention has a dropout inside, of its probabilities, in which each rank drops for itself. From what "
        "shall it draw?",
    ),
    Question(
        lambda d: "out" not in d.names and {"forward traffic", "backward traffic"} & d.names != set(),
        "The output is right, the communication is not. Two all-reduces forward and two backward are in the blocks "
        "already; norms, biases, dropout and residuals need none. Which call of yours sends something?",
    ),
    Question(
        lambda d: "out" not in d.names and has_no_gradient("dx", *(f"d{name}.weight" for name in plain.LINEAR))(d),
        "The output is right and a gradient does not arrive. Which line does autograd not know about?",
    ),
    Question(
        lambda d: "out" not in d.names,
        "The output is right, a gradient is not. Which part of your forward pass is cut off from autograd?",
    ),
    Question(
        lambda d: True,
        "x -> norm -> attention, + bias, + residual -> norm -> MLP, + bias, + residual. Go through your lines one by "
        "one with p = 1: which tensor does each of them read?",
    ),
)

RANKS_DISAGREE = Question(
    lambda d: "out" in d.names,
    "The ranks hold different outputs now. The residual stream is replicated: all ranks must drop the same places of "
    "it. "
    'From which state of the tracker do you draw, "replicated" or "sharded", or from none of them?',
)
NO_MASK = Question(
    lambda d: "out" in d.names, "The layer is in eval mode, where nothing is dropped. What tells dropout so?"
)
DROPOUT = Question(
    lambda d: True,
    "dropout(y + bias) is added to the residual, for the attention first and then for the MLP, drawn from the state "
    '"replicated" of `rng`. Which of the three is different in your lines: what is dropped, the order, or the state?',
)


def before_the_sum(fixed: Mapping[str, Any], x: Tensor, q: int) -> dict[str, Tensor]:
    """What q ranks give that add the residuals or the last biases before the sum over the ranks."""
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


def dropout_mistakes(fixed: Mapping[str, Any], x: Tensor, masks: Sequence[Tensor]) -> dict[str, Tensor]:
    """What a layer gives that drops at the wrong place; `masks` are those that should have been drawn."""
    options: dict[str, Any] = {**fixed, "masks": tuple(mask.cpu() for mask in masks)}
    layer = plain.Layer(**options)
    normed = layer.norm1(x)
    undropped: dict[str, Any] = {**options, "masks": (1.0, 1.0)}
    bare = plain.Layer(**undropped)
    first = (bare.keep(x, normed) + bare.attention(normed)) * options["masks"][0]
    second = bare.norm2(first)
    return {
        NO_DROPOUT: bare(x),
        BEFORE_BIAS: plain.Layer(**options, drop=lambda y, bias, mask: y * mask + bias)(x),
        ON_THE_SUM: (bare.keep(first, second) + bare.mlp(second)) * options["masks"][1],
        "what comes out when it drops in eval mode too": layer(x),
    }
