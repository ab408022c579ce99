"""What the checks of several operators of chapter 03 ask, and the names of mistakes that they share."""

from collections.abc import Callable

from tplab.course.checks import Differences, Question, kind_is


def traffic_too(name: str, kind: str, traffic: str) -> Callable[[Differences], bool]:
    """`name` is wrong in this way, and `traffic` differs as well."""
    return lambda differences: differences.kind(name) == kind and traffic in differences.names


FORWARD_SENDS = Question(
    lambda d: "forward traffic" in d.names and d.kind("forward traffic") == "traffic" and not d.malformed,
    "What does this operator have to send in the forward pass? Read its row in the table again.",
)

BACKWARD_SENDS = Question(
    lambda d: d.names == {"backward traffic"},
    "The gradient is right. What has to be sent for it in the backward pass? Read the operator's row in the table "
    "again.",
)

ROUNDED = Question(
    lambda d: bool({"rounded", "dtype"} & d.kinds()),
    "Which step leaves the dtype of the tensor? Fewer bytes are sent that way, and digits are lost.",
)

WROTE = Question(
    lambda d: any(d.kind(name) == "changed" for name in d.names),
    "A collective writes into the tensor it is given. Was that one yours? The caller still needs x, and autograd the "
    "upstream gradient: what has to be made first? (.contiguous() makes no copy of a tensor that is contiguous "
    "already.)",
)

NO_GRADIENT = Question(
    kind_is("dx", "none"),
    "backward returned nothing for x. What is its last line? (dist.all_reduce changes its argument and returns None.)",
)

ZERO_GRADIENT = Question(kind_is("dx", "zeros"), "The gradient has the right shape. Which line puts numbers in?")
ZERO_OUT = Question(kind_is("out", "zeros"), "The output has the right shape. Which line puts numbers in?")
ONLY_ROOT = "Rank 0 is right, the others are not. Which collective gives its result to one rank only, and which to all?"
OWN_X = "this rank's own x"
COPIES = "p copies of this rank's part"
SUM_PARTS = "the sum of the parts of all ranks"
STACKED = "the parts of all ranks, one after another along dimension 0"
