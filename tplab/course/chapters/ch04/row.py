"""The check for exercise 4.2, RowParallelLinear."""

from typing import Any

from torch.nn import functional as F

from tplab.course import checks
from tplab.course.chapters.ch04.layers import (
    BIAS_TWICE,
    IN,
    NO_BIAS,
    OUT,
    SHARDING_QUESTION,
    SKIPPED_BIAS_QUESTION,
    TRAFFIC_QUESTION,
    WAIT_QUESTION,
    WITH_BIAS,
    WITH_P_BIASES,
    Built,
    Problem,
    check_layer,
    shape,
)
from tplab.tensor.sharding import Sharding

CASES = (
    Built(),
    Built(leading=(2, 3), transposed=True),
    Built(leading=(2, 3), options={"input_is_parallel": False}),
    Built(bias=False),
    Built(leading=(2, 3), options={"skip_bias_add": True}),
    Built(bias=False, options={"skip_bias_add": True}),
    Built(leading=(2, 3), options={"input_is_parallel": False, "skip_bias_add": True}),
    Built(options={"input_is_parallel": False}, groups=checks.GROUPS),
)

BIAS_P_TIMES = "the right one with the bias added p times instead of once"
PARTIAL_SUM = "this rank's partial sum"
PARTIAL_SUM_AND_BIAS = "this rank's partial sum plus the bias"
MEAN_OF_SUMS = "the mean of the partial sums plus the bias"


def give(case: Built, problem: Problem, place: checks.Place) -> dict[str, Any]:
    d_bias = None if problem.bias is None else problem.d_bias_out
    return {
        "x": place.part(problem.x, -1) if sliced(case) else problem.x,
        "W": place.part(problem.weight, 1),
        "b": problem.bias,
        "upstream": (problem.dy, d_bias) if case.skipped else problem.dy,
        "sharding": Sharding(dim=1),
    }


def sliced(case: Built) -> bool:
    """Return whether each rank receives only its slice of x."""
    return bool(case.options.get("input_is_parallel", True))


def expect(case: Built, problem: Problem, place: checks.Place) -> checks.Expected:
    product, bias, size = problem.product, problem.bias, place.size
    own_weight = place.part(problem.weight, 1)
    right = {
        "shape of weight": shape(own_weight),
        "shape of bias": shape(bias),
        "out": (product, bias) if case.skipped else problem.out,
        "dx": place.part(problem.dx, -1) if sliced(case) else problem.dx,
        "dW": place.part(problem.d_weight, 1),
        "db": problem.d_bias,
        "forward traffic": place.traffic(("all_reduce", product.numel())),
        "backward traffic": place.traffic(*[("all_gather", problem.x.numel())] * (not sliced(case))),
    }
    mistakes: dict[str, Any] = {}
    if bias is not None and case.skipped:
        mistakes[WITH_BIAS] = (problem.out, bias)
        if size > 1:
            mistakes[WITH_P_BIASES] = (product + size * bias, bias)
    elif bias is not None:
        if size > 1:
            own = F.linear(place.part(problem.x, -1), own_weight)
            mistakes[BIAS_P_TIMES] = product + size * bias
            mistakes |= {PARTIAL_SUM: own, PARTIAL_SUM_AND_BIAS: own + bias, MEAN_OF_SUMS: product / size + bias}
        mistakes |= {NO_BIAS: product, BIAS_TWICE: problem.out + bias}
    return checks.Expected(right, {"out": mistakes})


def _gathers_and_sums(traffic: str) -> bool:
    seen = traffic.partition("saw")[2]
    return "all_gather" in seen and "all_reduce" in seen


QUESTIONS = (
    checks.INPUTS_QUESTION,
    WAIT_QUESTION,
    checks.Question(
        checks.differs("shape of weight"),
        "`weight` is [output features, input features]. Which of the two does a row-parallel layer split, and "
        "how many does one rank keep?",
    ),
    checks.Question(
        checks.differs("shape of bias"),
        "Every rank ends up with every output feature. How many numbers must its bias have then, and should "
        "there be a bias at all when `bias=False`?",
    ),
    checks.Question(
        checks.has_kind("out", "structure", "type"),
        "What does the layer return? The output alone, or with `skip_bias_add` the pair (output without the "
        "bias, bias), also when there is no bias. Remember that `dist.all_reduce` returns None.",
    ),
    checks.Question(
        checks.has_kind("out", "none"),
        "Which of your branches ends without a `return`? `dist.all_reduce` works in place and returns None.",
    ),
    SKIPPED_BIAS_QUESTION,
    checks.Question(
        checks.has_kind("out", BIAS_P_TIMES),
        "How many times is the bias added: once, or once by every rank? What does the all-reduce do with p "
        "copies of it?",
    ),
    checks.Question(checks.has_kind("out", NO_BIAS), "Where is the bias added?"),
    checks.Question(checks.has_kind("out", BIAS_TWICE), "The bias is in the output twice. Which two lines add it?"),
    checks.Question(
        checks.has_kind("out", PARTIAL_SUM, PARTIAL_SUM_AND_BIAS),
        "X_r A_r is one term of the sum. Which operator adds up the terms of all ranks, and do you use what "
        "it returns?",
    ),
    checks.Question(checks.has_kind("out", MEAN_OF_SUMS, "1/p"), "Is Y the sum of the partial sums, or their mean?"),
    checks.Question(
        lambda d: "out" not in d.names and checks.has_kind("db", "1/p")(d),
        "The output is right, but each rank's bias gets only 1/p of its gradient, so it would learn p times "
        "too slowly. What is the bias divided by, and could it be added where no division is needed?",
    ),
    checks.Question(
        lambda d: "out" not in d.names and checks.has_no_gradient("db")(d),
        "The output is right, but on some rank the bias gets no gradient: after one optimizer step the ranks' "
        "copies of it differ. Who adds the bias, and who should?",
    ),
    checks.Question(
        checks.has_no_gradient("dW"),
        "No gradient reaches the weight. Which step of your forward pass does autograd not know about? `dist` "
        "calls, `.data` and `.detach()` are such steps; the operators of chapter 03 are not.",
    ),
    checks.Question(
        checks.has_kind("dx", "partly zero"),
        "dx is right in this rank's slice and zero elsewhere, but the input was replicated, so every rank "
        "needs all of dx. What is the backward of taking a slice, and which operator knows it?",
    ),
    checks.Question(
        lambda d: (
            checks.has_kind("dx", "p times")(d)
            and "dW" not in d.names
            and _gathers_and_sums(d.text("backward traffic"))
        ),
        "dx is p times too large and dW is right, so it happens in front of the product. There the backward pass "
        "gathers dx, whole on every rank, and then sums it over the ranks. Which operator on x does which of the two, "
        "and is there anything left to sum once the whole dx is there?",
    ),
    checks.Question(
        lambda d: checks.has_kind("dW", "p times")(d) or checks.has_kind("dx", "p times")(d),
        "The gradients are p times too large. Every rank already holds the whole dY after the sum: what "
        "should the backward pass of g do with it? Look at the backward traffic.",
    ),
    checks.Question(
        lambda d: d.names == {"dx", "backward traffic"},
        "dx belongs to this rank's slice of the input, and no other rank has a part of it. Who adds up the "
        "slices of different ranks in the backward pass?",
    ),
    checks.Question(
        checks.has_kind("db", "p times"),
        "The gradient of the bias is p times too large. Who sums it over the ranks, and why would that be needed "
        "when every rank has the whole dY?",
    ),
    checks.Question(
        checks.differs("out"),
        "What is Y = X_0 A_0 + X_1 A_1 + b here? Which of the terms has your rank, and what happens to the others?",
    ),
    TRAFFIC_QUESTION,
    SHARDING_QUESTION,
)


@checks.exercise("4.2", "RowParallelLinear")
def row_parallel_linear(layer_class: Any) -> checks.Verdict:
    check_layer(
        "4.2",
        layer_class,
        CASES,
        give=give,
        expect=expect,
        questions=QUESTIONS,
        crash="Write the shapes of one rank next to your lines: x [..., i/p], weight [o, i/p], bias [o], out [..., "
        "o]. Which two do not fit together? Is the input sliced already when it arrives?",
        odd=(IN + 1, OUT),
        odd_question=checks.Question(
            lambda d: True,
            "With 13 input features on 2 ranks each would keep 6, and one feature would silently be lost. "
            "Which function refuses that?",
        ),
    )
    return checks.Verdict(
        "Each rank owns i/p input features. One all-reduce in the forward pass, and the bias after it, once."
    )
