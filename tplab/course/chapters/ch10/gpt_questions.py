"""What the check of exercise 10.2 asks when a GPT is wrong."""

from tplab.course.checks import INPUTS_QUESTION, Question, has_kind

GETS_RNG = "the layers get rng"
GETS_CACHE = "each layer fills its cache"

CRASH = (
    "Write the shape next to each line: ids [b, s], both embeddings [b, s, h], every layer [b, s, h], logits [b, s, "
    "v/p], loss a single number. Which line gets another one?"
)
CACHE = (
    "Here the text comes in several calls. At which place of the text does the first of `ids` stand, and which of the "
    "caches belongs to which layer?"
)
DROPOUT = (
    "With the rate config.dropout, what is dropped in front of the first layer, and from which state of `rng`? The "
    "layers draw from the same `rng`: do they get it? In eval mode nothing is dropped."
)
WHOSE_GROUP = "Which call works over the ranks and was not given `group=self.group`?"


def _ask(ask: str, *kinds: str) -> Question:
    return Question(has_kind("out", *kinds), ask)


QUESTIONS = (
    INPUTS_QUESTION,
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
    _ask("Behind the last layer stands a norm. What do your logits read?", "what comes out without the final norm"),
    _ask(
        "Attention does not know the order of its tokens. Which vector tells a token its place?",
        "what comes out without the positions",
    ),
    _ask(
        "The table is padded until p divides it, and the padding is no token. Which argument tells the loss how many "
        "tokens there are?",
        "what comes out when the padding enters the softmax",
    ),
    _ask(
        "The mean is over the tokens that have a target. What does the loss of chapter 08 return without further "
        "options?",
        "the sum of the losses, not their mean",
        "what comes out when the ignored token counts in the mean",
    ),
    Question(
        lambda d: (
            "out" not in d.names and {"forward traffic", "backward traffic"} & d.names != set() and len(d.names) < 3
        ),
        "The numbers are right, the communication is not. The modules send what is needed. Which call of yours sends "
        "more?",
    ),
    Question(
        lambda d: "dembedding.weight" in d.names and d.names <= {"dembedding.weight", "backward traffic"},
        "The table is used twice, for the look-up and for the logits, and both uses add to its gradient. Is the "
        "weight that your logits read the parameter itself, and does its f, which parallel_logits has inside, see "
        "your x?",
    ),
    Question(
        lambda d: "out" not in d.names,
        "The output is right, gradients are not. Where in your forward pass does autograd lose the way, or where is "
        "the f in front of the logits?",
    ),
    Question(
        lambda d: True,
        "Embedding + positions -> layers -> final norm -> logits with the embedding's rows -> loss. Go through your "
        "lines: does each layer read what the one before it has left?",
    ),
)
