"""What the check of exercise 15.3 calls the mistakes that it knows, and what it asks."""

from collections.abc import Callable

from tplab.course.chapters.ch15.small_model import CUTS, PARAMETERS
from tplab.course.checks import Differences, Question, changed, has_kind

SUM_OF_M = "what comes out when the micro-batches are added up, and not averaged"
SUM_OF_DP = "what comes out when the replicas are added up, and not averaged"
BY_M = "what comes out when the micro-batches are divided by their number twice"
BY_DP = "what comes out when the replicas are divided by their number twice"
WITHOUT_DP = "what this replica's sequences give alone"
LAST_OF_M = "what the last micro-batch gives alone"
NOT_CLIPPED = "what comes out without clipping"
UNCHANGED = "the weights before the step"
TWO_STEPS = "what comes out when the optimizer steps after each micro-batch"

NORM_OF_RANK = "the norm of what this rank holds"
REPLICATED = "the norm that counts the replicated parameters once for each tensor-parallel rank"
NORM_AFTER = "the norm after clipping"


LOSS_SUM = "the sum over the micro-batches"
LOSS_OF_LAST = "the loss of the last micro-batch alone"
LOSS_WORLD = "the mean, times the number of tensor-parallel ranks"
LOSS_OF_OWN = "the mean over this replica's sequences alone"

DP_ONCE = "each gradient crosses the replicas once in a step"
TWO = "two numbers come out"
TENSORS = "what comes out are plain floats"
MARKED_ONCE = "of the gradients only the marked ones travel over tp"

CRASH = (
    "`mesh.get_group('tp')` and `mesh.get_group('dp')` are the groups of this rank, `model(x, y)` is the mean loss of "
    "a micro-batch. Which line expects something else?"
)
STUCK = "Every rank must enter the same collectives in the same order. Which of yours depends on the rank?"


def weights_are(*kinds: str) -> Callable[[Differences], bool]:
    return lambda d: any(has_kind(name, *kinds)(d) for name in PARAMETERS)


def seen(*kinds: str) -> Callable[[Differences], bool]:
    """In the weights, or in the norm."""
    return lambda d: weights_are(*kinds)(d) or has_kind("norm", *kinds)(d)


def only_whole(differences: Differences) -> bool:
    """Of the weights only those differ that every tensor-parallel rank holds whole."""
    wrong = {name for name in PARAMETERS if name in differences.names}
    return bool(wrong) and not wrong & set(CUTS)


def only_cut(differences: Differences) -> bool:
    """Of the weights only those differ that are cut over the tensor-parallel ranks."""
    wrong = {name for name in PARAMETERS if name in differences.names}
    return wrong == set(CUTS)


def QUESTIONS(step: int) -> list[Question]:  # noqa: N802 (a table)
    first = [
        Question(changed, "The sequences belong to the caller. Which line of yours writes into them?"),
        Question(
            lambda d: TWO in d.names,
            "What comes out are two numbers, the loss and the norm. What does your last line return?",
        ),
    ]
    later = Question(
        lambda d: bool({"norm", *PARAMETERS} & d.names),
        "The first step was right, the second is not. What does the first one leave behind, in `param.grad`, that the "
        "second has to get rid of?",
    )
    return [*first, *([later] if step else []), *_WHAT]


_WHAT = (
    Question(
        weights_are(UNCHANGED),
        "The weights are as before. Who changes them, and which line of yours calls it?",
    ),
    Question(
        only_whole,
        "Only what every tensor-parallel rank holds whole is wrong. Which of these parameters are marked "
        "`sequence_parallel`, over which group are their gradients added up, added up or averaged, before or after the "
        "norm, and once a step or once a micro-batch?",
    ),
    Question(
        only_cut,
        "Only what is cut over the tensor-parallel ranks is wrong. Each of these ranks has other columns and rows. "
        "Over which group are gradients averaged, and which ranks are in it?",
    ),
    Question(
        weights_are(TWO_STEPS),
        "The micro-batches make one step together. After which of them does the optimizer step?",
    ),
    Question(
        seen(SUM_OF_M),
        "`backward` adds to what is in `param.grad`, and each micro-batch's loss is a mean. What turns the sum of m "
        "means into their mean?",
    ),
    Question(
        seen(SUM_OF_DP),
        "An all-reduce adds up. Each replica has the mean over its own sequences; what makes one mean of them?",
    ),
    Question(
        seen(BY_M),
        "The gradients are smaller than they should be, by the number of micro-batches. How often do you divide by it?",
    ),
    Question(
        seen(BY_DP),
        "The gradients are smaller than they should be, by the number of replicas. How often do you divide by it?",
    ),
    Question(
        seen(LAST_OF_M, f"{LAST_OF_M} "),
        "The micro-batches before the last one have no effect. Where are their gradients thrown away?",
    ),
    Question(
        weights_are(WITHOUT_DP),
        "Each replica has learned from its own sequences alone, and they drift apart. Over which group are gradients "
        "averaged, and do the means arrive in `param.grad`?",
    ),
    Question(
        weights_are(NOT_CLIPPED),
        "The gradient is longer than `max_norm` here, and the step was made with all of it. When is it shortened, and "
        "when does the optimizer step?",
    ),
    Question(
        lambda d: DP_ONCE in d.names,
        "Each micro-batch could send its gradients, but all of them together make one gradient. When is it complete, "
        "and how often does it have to travel then?",
    ),
    Question(
        has_kind("norm", NORM_AFTER, f"{NORM_AFTER} "),
        "That is how long the gradient is once it is shortened. The log wants to know how long it was.",
    ),
    Question(
        has_kind("norm", NORM_OF_RANK),
        "That is the norm of this rank's parts alone. Whose parts come in over which group, and what do ranks do that "
        "clip by different factors?",
    ),
    Question(
        has_kind("norm", REPLICATED),
        "Some parameters are whole on every tensor-parallel rank, and they count once for the model. Which of the "
        "ranks counts them?",
    ),
    Question(
        lambda d: MARKED_ONCE in d.names,
        "More travels over the tensor-parallel ranks than has to. Which gradients are whole there already?",
    ),
    Question(has_kind("loss", LOSS_SUM), "Each micro-batch's loss is a mean. What is the mean over all of them?"),
    Question(
        has_kind("loss", LOSS_OF_LAST, f"{LOSS_OF_LAST} "),
        "That is the loss of the last micro-batch. Which variable did the others' go into?",
    ),
    Question(
        has_kind("loss", LOSS_OF_OWN),
        "That is the loss of this replica. The log has one line for all of them. Which collective makes it?",
    ),
    Question(has_kind("loss", SUM_OF_DP), "The replicas' losses were added up. How many replicas are there?"),
    Question(
        lambda d: d.names - {TENSORS} == {"loss"},
        "Only the loss is wrong. It is the same on all ranks of `tp` already; over which group is there something to "
        "average?",
    ),
    Question(
        lambda d: d.names == {TENSORS},
        "The values are right. What comes out are two floats, for a log that outlives the step: what makes a float of "
        "a tensor with one number?",
    ),
    Question(
        lambda d: {"loss", "norm"} <= d.names,
        "Loss and gradient are wrong together. By which number do you divide them: is it that of the micro-batches "
        "that there are? And is every message finished when you go on with what it brings?",
    ),
    Question(
        lambda d: "norm" in d.names,
        "The norm is not that of the gradient that one process would have. In which order do you average over the "
        "replicas, add up what sequence parallelism has left apart, and take the norm?",
    ),
    Question(
        lambda d: True,
        "A step is: zero the gradients, run each micro-batch forward and backward, add up and average over the ranks, "
        "take the norm, shorten, step. Which of them does yours do in another order, or not at all?",
    ),
)
