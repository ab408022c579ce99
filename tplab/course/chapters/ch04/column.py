"""The check for exercise 4.1, ColumnParallelLinear."""

from typing import Any

from torch import Tensor

from tplab.course import checks
from tplab.course.chapters.ch04.layers import (
    BIAS_TWICE,
    IN,
    NO_BIAS,
    NO_TRAFFIC,
    OUT,
    SHARDING_QUESTION,
    SKIPPED_BIAS_QUESTION,
    TRAFFIC_QUESTION,
    WAIT_QUESTION,
    WITH_BIAS,
    Built,
    Problem,
    check_layer,
    shape,
)
from tplab.tensor.sharding import Sharding

CASES = (
    Built(),
    Built(leading=(2, 3), transposed=True),
    Built(leading=(2, 3), options={"gather_output": True}),
    Built(bias=False),
    Built(leading=(2, 3), options={"skip_bias_add": True}),
    Built(bias=False, options={"skip_bias_add": True}),
    Built(leading=(2, 3), options={"gather_output": True, "skip_bias_add": True}),
    Built(options={"gather_output": True}, groups=checks.GROUPS),
)

OWN_PART = "the part that this rank's own columns contribute, before any sum"


def give(case: Built, problem: Problem, place: checks.Place) -> dict[str, Any]:
    dy = problem.dy if case.options.get("gather_output") else place.part(problem.dy, -1)
    d_bias = None if problem.bias is None else place.part(problem.d_bias_out)
    return {
        "x": problem.x,
        "W": place.part(problem.weight),
        "b": None if problem.bias is None else place.part(problem.bias),
        "upstream": (dy, d_bias) if case.skipped else dy,
        "sharding": Sharding(dim=0),
    }


def expect(case: Built, problem: Problem, place: checks.Place) -> checks.Expected:
    gathered, bias = bool(case.options.get("gather_output")), problem.bias
    own_weight, own_bias = place.part(problem.weight), None if bias is None else place.part(bias)

    def returned(out: Tensor) -> Any:
        """Return what the layer returns on this rank, given the full output [..., o]."""
        here = out if gathered else place.part(out, -1)
        return (here, own_bias) if case.skipped else here

    out = problem.product if case.skipped else problem.out
    right = {
        "shape of weight": shape(own_weight),
        "shape of bias": shape(own_bias),
        "out": returned(out),
        "dx": problem.dx,
        "dW": place.part(problem.d_weight),
        "db": None if problem.d_bias is None else place.part(problem.d_bias),
        "forward traffic": place.traffic(*[("all_gather", out.numel())] * gathered),
        "backward traffic": place.traffic(("all_reduce", problem.x.numel())),
    }
    own_dx = place.part(problem.dy, -1) @ own_weight
    mistakes: dict[str, dict[str, Any]] = {"dx": {OWN_PART: own_dx} if place.size > 1 else {}, "out": {}}
    if bias is not None and case.skipped:
        mistakes["out"] = {WITH_BIAS: returned(problem.out)}
    elif bias is not None:
        mistakes["out"] = {NO_BIAS: returned(problem.product), BIAS_TWICE: returned(problem.out + bias)}
    return checks.Expected(right, mistakes)


QUESTIONS = (
    checks.INPUTS_QUESTION,
    WAIT_QUESTION,
    checks.Question(
        checks.differs("shape of weight"),
        "`weight` is [output features, input features]. Which of the two does a column-parallel layer split, "
        "and how many does one rank keep?",
    ),
    checks.Question(
        checks.differs("shape of bias"),
        "The bias has one number per output feature. How many output features does this rank compute, and "
        "should there be a bias at all when `bias=False`?",
    ),
    checks.Question(
        checks.has_kind("out", "structure", "type"),
        "What does the layer return? The output alone, or with `skip_bias_add` the pair (output without the "
        "bias, bias), also when there is no bias.",
    ),
    checks.Question(
        checks.has_kind("out", "whole"),
        "Did anybody ask for the whole output? Without `gather_output` each rank returns only the columns it computed.",
    ),
    checks.Question(
        checks.has_kind("out", "part"),
        "With `gather_output` every rank returns all columns. Along which dimension, and with which operator, "
        "do the slices come together?",
    ),
    checks.Question(checks.has_kind("out", "none"), "Which of your branches ends without a `return`?"),
    SKIPPED_BIAS_QUESTION,
    checks.Question(checks.has_kind("out", NO_BIAS), "Where is this rank's slice of the bias added?"),
    checks.Question(
        checks.has_kind("out", BIAS_TWICE),
        "The bias is in the output twice. Which two lines add it? `F.linear` adds the bias that you give it.",
    ),
    checks.Question(
        checks.has_kind("out", "order", "other rank", "shape"),
        "Every slice of the output belongs in one place: rank 0's columns first, along the last dimension. "
        "Which operator puts them there?",
    ),
    checks.Question(
        checks.has_no_gradient("dW"),
        "No gradient reaches the weight. Which step of your forward pass does autograd not know about? `dist` "
        "calls, `.data` and `.detach()` are such steps; the operators of chapter 03 are not.",
    ),
    checks.Question(
        lambda d: "dx" in d.names and checks.has_kind("backward traffic", NO_TRAFFIC)(d) and "dW" not in d.names,
        "Each rank computes dx through its own columns only. Which operator adds up the p parts in the "
        "backward pass, and where does it stand?",
    ),
    checks.Question(
        lambda d: checks.has_kind("dx", "p times")(d) or d.names == {"dx", "backward traffic"},
        "How often is the gradient of x summed over the ranks? Look at the backward traffic: each sum is one "
        "all-reduce.",
    ),
    checks.Question(
        checks.has_kind("dx", "1/p"),
        "Is dx the sum of the ranks' parts, or their mean? Which of the two does the chain rule ask for?",
    ),
    checks.Question(
        checks.differs("dW", "db", "dx"),
        "All three gradients are wrong. The backward pass of an operator acts on the gradient of whatever it "
        "was applied to: did you apply f to the input, or to the output?",
    ),
    checks.Question(
        checks.has_no_gradient("dx"),
        "No gradient reaches the input. Which line cuts the way from the output back to x?",
    ),
    checks.Question(
        checks.has_no_gradient("db"),
        "No gradient reaches the bias. What is returned or added: the parameter, or a copy that autograd does not "
        "know?",
    ),
    checks.Question(
        checks.differs("out"),
        "What is Y = X A + b here, for the columns of this rank? Compute one number by hand with p = 1.",
    ),
    TRAFFIC_QUESTION,
    SHARDING_QUESTION,
)


@checks.exercise("4.1", "ColumnParallelLinear")
def column_parallel_linear(layer_class: Any) -> checks.Verdict:
    check_layer(
        "4.1",
        layer_class,
        CASES,
        give=give,
        expect=expect,
        questions=QUESTIONS,
        crash="Write the shapes of one rank next to your lines: x [..., i], weight [o/p, i], bias [o/p], out [..., "
        "o/p]. Which two do not fit together?",
        odd=(IN, OUT + 1),
        odd_question=checks.Question(
            lambda d: True,
            "With 9 output features on 2 ranks each would keep 4, and one feature would silently be lost. "
            "Which function refuses that?",
        ),
    )
    return checks.Verdict(
        "Each rank owns o/p output features. One all-reduce in the backward pass, nothing in the forward pass "
        "unless you gather."
    )
