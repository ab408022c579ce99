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
    Built(zero_bias=True),
    Built(leading=(2, 3), options={"skip_bias_add": True}),
    Built(bias=False, options={"skip_bias_add": True}),
    Built(leading=(2, 3), options={"input_is_parallel": False, "skip_bias_add": True}),
    Built(options={"input_is_parallel": False}, groups=checks.GROUPS),
)

BIAS_P_TIMES = "the right one with p times the bias instead of once"
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
        "`weight` is [output features, input features]. Which of the two does a row-parallel layer split, and how "
        "many of them does each rank keep?",
    ),
    checks.Question(
        checks.differs("shape of bias"),
        "Every rank ends up with every output feature. So how many elements does its bias need? And should there be "
        "a bias at all if `bias=False`?",
    ),
    checks.Question(
        checks.has_kind("out", "structure", "type"),
        "What should the layer return? It's just the output, or with `skip_bias_add` the pair (output without the "
        "bias, bias), even if there's no bias. Remember that `dist.all_reduce` returns None.",
    ),
    checks.Question(
        checks.has_kind("out", "none"),
        "Which of your branches ends without a `return`? (`dist.all_reduce` works in place and returns None.)",
    ),
    SKIPPED_BIAS_QUESTION,
    checks.Question(
        checks.has_kind("out", BIAS_P_TIMES),
        "How often is the bias added? If each rank adds it before the all-reduce, what does the all-reduce do with p "
        "copies of it?",
    ),
    checks.Question(checks.has_kind("out", NO_BIAS), "The bias is missing. Which line should add it?"),
    checks.Question(checks.has_kind("out", BIAS_TWICE), "The bias is in the output twice. Which two lines add it?"),
    checks.Question(
        checks.has_kind("out", PARTIAL_SUM, PARTIAL_SUM_AND_BIAS),
        "Your output is only this rank's share of the sum. Which operator adds the shares of all ranks, and are you "
        "using the tensor it returns?",
    ),
    checks.Question(
        checks.has_kind("out", MEAN_OF_SUMS, "1/p"), "Should Y be the sum of the ranks' terms, or their mean?"
    ),
    checks.Question(
        lambda d: "out" not in d.names and checks.has_kind("db", "1/p")(d),
        "The output is right, but each rank's bias gets just 1/p of its gradient, so it would learn p times too "
        "slowly. What do you divide the bias by, and where could you add it without dividing?",
    ),
    checks.Question(
        lambda d: "out" not in d.names and checks.has_no_gradient("db")(d),
        "The output is right, but on some ranks the bias gets no gradient. After one optimizer step, the ranks' "
        "copies of it will differ. Which rank adds the bias in your layer, and which ranks should?",
    ),
    checks.Question(
        checks.has_no_gradient("dW"),
        "No gradient reaches the weight. Which step of your forward pass is invisible to autograd? Calls to `dist`, "
        "`.data` and `.detach()` are, and the operators from chapter 03 aren't.",
    ),
    checks.Question(
        checks.has_kind("dx", "partly zero"),
        "dx is right in this rank's slice and zero everywhere else. But every rank had the full input, so every rank "
        "needs all of dx. What's the backward of taking a slice, and which operator knows that?",
    ),
    checks.Question(
        lambda d: (
            checks.has_kind("dx", "p times")(d)
            and "dW" not in d.names
            and _gathers_and_sums(d.text("backward traffic"))
        ),
        "dx is p times too large and dW is right, so it happens before the matmul. There, the backward pass gathers "
        "dx, so that every rank has all of it, and then also adds it up over the ranks. Which operator on x does "
        "which of these, and once every rank has all of dx, is there anything left to add?",
    ),
    checks.Question(
        lambda d: checks.has_kind("dW", "p times")(d) or checks.has_kind("dx", "p times")(d),
        "The gradients are p times too large. After the sum, every rank already has the full dY. What should the "
        "backward pass of g do with it? Look at the backward traffic.",
    ),
    checks.Question(
        lambda d: d.names == {"dx", "backward traffic"},
        "dx belongs to this rank's slice of the input, and no other rank has a term of it. Which line adds up the "
        "slices of different ranks in the backward pass?",
    ),
    checks.Question(
        checks.has_kind("db", "p times"),
        "The gradient of the bias is p times too large. Every rank already has the full dY, so which line adds up "
        "the ranks' gradients, and why would that be needed?",
    ),
    checks.Question(
        checks.differs("out"),
        "What's Y = X_0 A_0 + X_1 A_1 + b here? Which of those terms can this rank compute, and what happens to the "
        "others?",
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
        crash="Write one rank's shapes next to your lines: x [.., in/p], weight [out, in/p], bias [out], output [.., "
        "out]. Which two of them don't fit together? And is the input already split when it arrives?",
        odd=(IN + 1, OUT),
        odd_question=checks.Question(
            lambda d: True,
            "With 13 input features on 2 ranks, each rank would keep 6, and one feature would silently be lost. "
            "Which function refuses to do that?",
        ),
    )
    return checks.Verdict(
        "Each rank owns in/p of the input features. There's one all-reduce in the forward pass, and the bias comes "
        "after it, just once."
    )
