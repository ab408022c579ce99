"""What the checks of both MLPs, exercises 5.1 and 5.3, ask when one is wrong."""

from tplab.course.chapters.ch05.mlps import BIAS_P_TIMES, NO_ACTIVATION, PARTIAL
from tplab.course.checks import INPUTS_QUESTION, Question, has_kind, has_no_gradient

COMMON_QUESTIONS = (
    INPUTS_QUESTION,
    Question(
        has_kind("out", "none", "type", "structure"),
        "What does forward return? One tensor [..., h], the sum over all ranks with its bias.",
    ),
    Question(
        has_kind("out", NO_ACTIVATION),
        "Two linear maps with nothing between them are one linear map. Where does the activation stand?",
    ),
    Question(
        has_kind("out", PARTIAL),
        "Each rank has one term of the sum. Which layer adds up the terms, and is it that layer you use for `down`?",
    ),
    Question(has_kind("out", BIAS_P_TIMES), "How many times is the last bias added?"),
    Question(
        has_no_gradient("dA", "dB", "da", "dc"),
        "A parameter gets no gradient. Which line does autograd not know about?",
    ),
    Question(
        lambda d: "dx" in d.names and has_kind("backward traffic", "no traffic")(d),
        "dx is only this rank's part: f is missing. Which layer brings f with it, and do you go round its forward?",
    ),
    Question(
        lambda d: has_kind("dx", "p times")(d) and has_kind("backward traffic", "traffic")(d),
        "f is in the column-parallel layer already. Which line of yours sums dx over the ranks a second time?",
    ),
    Question(
        lambda d: bool({"forward traffic", "backward traffic"} & d.names) and "out" not in d.names,
        "The output is right, the communication is not: one all-reduce forward and one backward are enough. Which call "
        "gathers, scatters or sums what could stay where it is?",
    ),
    Question(
        lambda d: "out" not in d.names and bool({"dx", "dA", "dB"} & d.names),
        "The output is right, a gradient is not. Which part of the forward pass is cut off from autograd?",
    ),
    Question(
        lambda d: "sharding of up.weight" in d.names,
        "Loading a checkpoint reads the sharding of each parameter. How many matrices are fused in `up`, and which "
        "argument of ColumnParallelLinear says so?",
    ),
)
