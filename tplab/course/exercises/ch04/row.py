"""The check for exercise 4.2 (RowParallelLinear)."""

from typing import Any

from torch.nn import functional as F

from tplab.course import checks
from tplab.course.exercises.ch04.layers import (
    BIAS_TWICE,
    IN,
    NO_BIAS,
    OUT,
    SHARDING_QUESTION,
    SKIPPED_BIAS_QUESTION,
    TRAFFIC_QUESTION,
    WITH_BIAS,
    WITH_P_BIASES,
    Built,
    Problem,
    check_layer,
    shape,
)

CASES = (
    Built(),
    Built(leading=(2, 3), transposed=True),
    Built(leading=(2, 3), options={"input_is_parallel": False}),
    Built(bias=False),
    Built(zero_bias=True, options={"stride": 2}),
    Built(leading=(2, 3), options={"skip_bias_add": True}),
    Built(bias=False, options={"skip_bias_add": True}),
    Built(leading=(2, 3), options={"input_is_parallel": False, "skip_bias_add": True}),
    Built(options={"input_is_parallel": False}, groups=checks.GROUPS),
)

BIAS_P_TIMES = "the correct output with the bias added p times instead of once"
PARTIAL_SUM = "this rank's partial sum"
PARTIAL_SUM_AND_BIAS = "this rank's partial sum, plus the bias"
MEAN_OF_SUMS = "the mean of the partial sums, plus the bias"


def give(case: Built, problem: Problem, place: checks.Place) -> dict[str, Any]:
    d_bias = None if problem.bias is None else problem.d_bias_out
    return {
        "x": place.part(problem.x, -1) if sliced(case) else problem.x,
        "W": place.part(problem.weight, 1),
        "b": problem.bias,
        "upstream": (problem.dy, d_bias) if case.skipped else problem.dy,
        "split along": {"weight": 1, "bias": None},
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
    checks.Question(
        checks.differs("shape of weight"),
        "`weight` has the shape [output features, input features]. Does a row-parallel layer split the output features "
        "or the input features? How many input features and how many output features does each rank keep?",
    ),
    checks.Question(
        checks.differs("shape of bias"),
        "Every rank ends up with all the output features, so how many elements does its bias need? If `bias=False`, "
        "should the layer have a bias at all?",
    ),
    checks.Question(
        checks.has_kind("out", "structure", "type"),
        "What should the layer return? Without `skip_bias_add`, the layer should return only the output. With "
        "`skip_bias_add`, the layer should return the pair (output without the bias, bias), even if there's no bias. "
        "Remember that `dist.all_reduce` returns None.",
    ),
    checks.Question(
        checks.has_kind("out", "none"),
        "Your layer returned None. Which branch of `forward` is missing a `return`? (Remember that `dist.all_reduce` "
        "works in place and returns None.)",
    ),
    SKIPPED_BIAS_QUESTION,
    checks.Question(
        checks.has_kind("out", BIAS_P_TIMES),
        "How many times does your layer add the bias? If each rank adds the bias before the all-reduce, what does "
        "the all-reduce do with the p copies?",
    ),
    checks.Question(
        checks.has_kind("out", NO_BIAS), "The output doesn't include the bias. Which line should add the bias?"
    ),
    checks.Question(
        checks.has_kind("out", BIAS_TWICE), "The output includes the bias twice. Which two lines add the bias?"
    ),
    checks.Question(
        checks.has_kind("out", PARTIAL_SUM, PARTIAL_SUM_AND_BIAS),
        "Your output is only this rank's partial sum. Which operator sums the partial results from all ranks? Does "
        "your code use the tensor returned by this operator?",
    ),
    checks.Question(
        checks.has_kind("out", MEAN_OF_SUMS, "1/p"), "Should Y be the sum of the terms from all ranks or their mean?"
    ),
    checks.Question(
        lambda d: "out" not in d.names and checks.has_kind("db", "1/p")(d),
        "The output is correct, but each rank's bias receives only 1/p of its gradient, so it would learn p times "
        "too slowly. Which line divides the bias by p? Where could you add the bias without having to "
        "divide it?",
    ),
    checks.Question(
        lambda d: "out" not in d.names and checks.has_no_gradient("db")(d),
        "The output is correct, but the bias receives no gradient on some ranks. After one optimizer step, the ranks' "
        "copies of the bias will differ. Which ranks add the bias in your layer, and which ranks should add it?",
    ),
    checks.Question(
        checks.has_no_gradient("dW"),
        "No gradient reaches the weight. Which step of your forward pass is invisible to autograd? Autograd can "
        "follow the operators from chapter 03, but not `.data`, `.detach()`, or a new tensor filled by a "
        "function from `dist`.",
    ),
    checks.Question(
        checks.has_kind("dx", "partly zero"),
        "On each rank, dx is correct in the rank's own slice and zero everywhere else. Every rank has the full "
        "input, so every rank needs the full dx. Which operator takes a slice in the forward pass and "
        "gathers the gradient in the backward pass?",
    ),
    checks.Question(
        lambda d: (
            checks.has_kind("dx", "p times")(d)
            and "dW" not in d.names
            and _gathers_and_sums(d.text("backward traffic"))
        ),
        "The gradient dx is p times too large, but dW is correct, so the mistake is in what you do with x before the "
        "matmul. Your backward pass gathers dx, which gives every rank the complete gradient, but it also sums dx "
        "across ranks. Which operator in your code gathers dx, and which operator sums dx? Once every rank has all of "
        "dx, is there anything left to sum?",
    ),
    checks.Question(
        lambda d: checks.has_kind("dW", "p times")(d) or checks.has_kind("dx", "p times")(d),
        "At least one gradient is p times too large. Every rank already has the full dY, because every rank has "
        "the full output. What should the operator g do with dY in the backward pass? Look at the backward "
        "traffic.",
    ),
    checks.Question(
        lambda d: d.names == {"dx", "backward traffic"},
        "Each rank has a different slice of the input, and no other rank contributes to the gradient of that "
        "slice. Which line of your code sums the gradients of all these different slices in the backward "
        "pass?",
    ),
    checks.Question(
        checks.has_kind("db", "p times"),
        "The gradient of the bias is p times too large. Every rank already has the full dY, so its gradient of the "
        "bias is complete. Which line sums the bias gradients across ranks?",
    ),
    checks.Question(
        checks.differs("out"),
        "For this input, what should Y be, according to the formula Y = X₀ A₀ + X₁ A₁ + b? Which terms of this "
        "formula can this rank compute? What does your code do with the terms from the other ranks?",
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
        crash="Next to each line of your code, write down the tensor shapes on one rank. Before the matmul, x is "
        "[.., in/p], weight is [out, in/p], bias is [out], and the output is [.., out]. Which two tensor "
        "shapes in your code don't match? Is x already sharded when your layer receives it?",
        fine=(IN, OUT + 1),
        odd=(IN + 1, OUT),
        odd_question=checks.Question(
            lambda d: True,
            "With 13 input features on 2 ranks, each rank would keep 6 features, and one feature would be silently "
            "dropped. Which function raises a ValueError in this case?",
        ),
    )
    return checks.Verdict(
        "Each rank holds in/p of the input features. The forward pass needs one all-reduce, and the bias is added only "
        "once, after that all-reduce."
    )
