"""What the check of exercise 9.4 compares, under which names, and what it asks when a block is wrong."""

from collections.abc import Callable
from typing import Any

from tplab.course.chapters.ch09.masks import CURRENT, REPLICATED, SHARDED
from tplab.course.checks import INPUTS_QUESTION, Question, has_kind

OUT, SECOND, EVAL, AFTERWARDS = "out", "out of a second pass", "out in eval mode", "numbers drawn afterwards"
NONE = "what comes out without any dropout"
NO_INNER = "what comes out without dropout inside"
NO_OUTER = "what comes out without dropout at the end"
RESIDUAL_TOO = "what comes out when x is dropped as well"
NOT_SCALED = "what comes out when the places that are kept stay as they are, not divided by 1 - rate"
BEFORE_GELU = "what comes out when the first dropout stands before GELU"
STREAMS = {  # (inside, at the end)
    (REPLICATED, REPLICATED): "what comes out when both masks are drawn from 'replicated'",
    (SHARDED, SHARDED): "what comes out when both masks are drawn from 'sharded'",
    (REPLICATED, SHARDED): "what comes out when 'sharded' and 'replicated' change places",
    (CURRENT, CURRENT): "what comes out when both masks are drawn from torch's current state",
    (CURRENT, REPLICATED): "what comes out when the mask inside is drawn from torch's current state",
    (SHARDED, CURRENT): "what comes out when the mask at the end is drawn from torch's current state",
}


def out_is(*labels: str) -> Callable[[Any], bool]:
    return has_kind(OUT, *labels)


WHOSE_GROUP = "Which layer was not given `group`, and so works with all ranks?"
CRASH = (
    "Write the shape of one rank's tensor next to each line: [..., h], [..., m/p], [..., m/p], [..., h]. And what does "
    "`fork` want: a `with`, and the name of a state?"
)
QUESTIONS = (
    INPUTS_QUESTION,
    Question(
        out_is(STREAMS[REPLICATED, SHARDED]),
        "The two names have changed places. Which of the two tensors is the same on all ranks: the one inside, "
        "[..., m/p], or the one after g, [..., h]?",
    ),
    Question(
        out_is(STREAMS[REPLICATED, REPLICATED]),
        "Inside the MLP all ranks drop the same places of different columns. Is [..., m/p] the same tensor on all "
        "ranks, or has each rank its own part?",
    ),
    Question(
        out_is(STREAMS[SHARDED, SHARDED]),
        "After g every rank holds the same [..., h], and each drops other places of it: from here on they hold "
        "different tensors. Which state is alike on all ranks?",
    ),
    Question(
        out_is(*(label for streams, label in STREAMS.items() if CURRENT in streams)),
        "A mask comes from torch's current state, outside of any fork. Does the dropout stand within the `with`?",
    ),
    Question(
        out_is(RESIDUAL_TOO),
        "Only what the MLP adds is dropped; x itself goes on as it is. Where does the last dropout stand?",
    ),
    Question(
        out_is(NOT_SCALED),
        "The right places are dropped, but what is kept has to be divided by 1 - rate, so that the mean stays what it "
        "was. `F.dropout` does that.",
    ),
    Question(
        out_is(BEFORE_GELU),
        "The first dropout works on GELU's output. On which side of GELU does yours stand?",
    ),
    Question(
        out_is(NONE, NO_INNER, NO_OUTER),
        "A dropout is missing while the block trains. There are two: one behind GELU, one behind `down`.",
    ),
    Question(
        lambda d: EVAL in d.names and not has_kind(OUT, "value")(d),
        "In eval mode nothing is dropped. Which argument of `F.dropout` says whether the block is training?",
    ),
    Question(
        lambda d: d.names == {SECOND},
        "The first pass is right, the second is not: its masks have to go on where the first pass, and nothing else, "
        "left the states. What draws more than once in a pass, or in eval mode, or seeds anew?",
    ),
    Question(
        lambda d: AFTERWARDS in d.names and OUT not in d.names,
        "The outputs are right, but torch's current state has moved or was seeded anew. Who draws outside of the "
        "forks?",
    ),
    Question(
        lambda d: bool({"forward traffic", "backward traffic"} & d.names) and OUT not in d.names,
        "The numbers are right, the communication is not. Random numbers need none: what is sent beside g and f?",
    ),
    Question(
        lambda d: bool({"dx", "dA", "dB", "da", "dc"} & d.names) and OUT not in d.names,
        "The output is right, a gradient is not. Which step does autograd not know about?",
    ),
    Question(
        lambda d: OUT in d.names and not has_kind(OUT, "zeros")(d) and not d.malformed,
        "x + dropout(down(dropout(GELU(up(x))))), each dropout in its own state, with the rate `self.rate`, which is "
        "the part that is dropped. Where do your steps, or their order, differ?",
    ),
)
