"""What the check of exercise 11.3 asks when a backward pass is wrong, or right in the wrong order."""

from collections.abc import Callable

from tplab.course.checks import INPUTS_QUESTION, Differences, Question, has_kind, has_no_gradient

ORDER = "order of the backward pass"
NOT_SUMMED = "this rank's own part of dx, before the sum"
MEAN = "the mean over the ranks"
OWN_TIMES_P = "p times this rank's own part"
SUMMED_WEIGHTS = "the sum of dW over the ranks, whose shards are different ones"
LAST_TOKEN = "what the last token alone gives"

WHOSE_GROUP = "Which call was not given the group that forward was given?"
CRASH = (
    "Write the shapes next to each line: dy is [.., m/p], weight [m/p, h], x [.., h], and the three that you return "
    "belong to x, weight and group, in this order. What does dist.all_reduce give back with async_op=True?"
)
STUCK = "Does every rank start the all-reduce of dx, with the same shape, and wait for what it started?"


def _order(*parts: str) -> Callable[[Differences], bool]:
    """The order differs, and `got` holds these events one after the other."""
    return lambda d: ORDER in d.names and ", ".join(parts) in d.text(ORDER).partition(", right is")[0]


ORDER_QUESTIONS = (
    INPUTS_QUESTION,
    Question(
        lambda d: d.malformed and "out" in d.names, "forward is given. What does it return, and did you change it?"
    ),
    Question(
        has_no_gradient("dx", "dW"),
        "backward returns one gradient for each argument of forward: x, weight, group. Which one is None or zero, and "
        "should not be?",
    ),
    Question(
        lambda d: has_kind("backward traffic", "no traffic")(d),
        "Each rank's weight gives its own part of dx, and x went to every rank. Who adds the parts up?",
    ),
    Question(
        has_kind("dW", SUMMED_WEIGHTS),
        "The ranks hold different rows of the weight. Does the gradient of this rank's rows need anything from the "
        "others?",
    ),
    Question(
        has_kind("dW", LAST_TOKEN),
        "dW adds up over all tokens. Which of them are in your product, and how do you make x and dy two-dimensional?",
    ),
    Question(
        has_kind("dW", "transposed", "shape"),
        "weight is [m/p, h], and so is its gradient. Which of the two factors stands first, and is transposed?",
    ),
    Question(has_kind("dx", MEAN), "The chain rule adds over all uses of x. Does it take their mean?"),
    Question(
        has_kind("backward traffic", "never waited"),
        "The all-reduce was started and nobody waited for it: what you return may or may not be the sum, and that "
        "changes from run to run. What did dist.all_reduce give you, and what do you call on it before dx is read?",
    ),
    Question(
        lambda d: has_kind("dx", NOT_SUMMED, OWN_TIMES_P)(d) and "backward traffic" not in d.names,
        "An all-reduce ran, but the tensor that you return does not hold the sum. Which tensor did it write into?",
    ),
    Question(
        lambda d: "backward traffic" in d.names and ORDER not in d.names,
        "One all-reduce of dx, as large as x, is all that has to be sent. Which call sends more, or something else?",
    ),
    Question(
        lambda d: has_kind("backward traffic", "traffic")(d),
        "One all-reduce, of dx, as large as x, is all that has to be sent. What does your backward send?",
    ),
    Question(
        _order("all-reduce, wait, dW"),
        "The gradients are right, but the rank waits for the sum before it computes dW, so nothing runs beside it. "
        "Does dW need the sum? Where is the last line at which you may wait?",
    ),
    Question(
        _order("dW, all-reduce"),
        "The gradients are right, but by the time the all-reduce starts, dW is there already: nothing is left to do "
        "beside it. Which of the two products can be sent away while the other is computed?",
    ),
    Question(
        _order("dW, dx, all-reduce"),
        "The gradients are right, but dW was computed before there was anything to send. Which product comes first?",
    ),
    Question(
        lambda d: d.names == {ORDER},
        "The gradients are right. In which order should the rank compute dx, start its all-reduce, compute dW, wait?",
    ),
    Question(
        lambda d: "dx" in d.names and "dW" not in d.names,
        "dW is right. dx is dy times weight, [.., m/p] times [m/p, h], summed over the ranks: where does yours differ?",
    ),
    Question(
        lambda d: "dW" in d.names and "dx" not in d.names,
        "dx is right. dW is the sum over all tokens of dy's row times x's row: [m/p, b·s] times [b·s, h]. Where does "
        "yours differ?",
    ),
)
