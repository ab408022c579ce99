"""The check for exercise 4.1 (ColumnParallelLinear)."""

from typing import Any

from torch import Tensor

from tplab.course import checks
from tplab.course.exercises.ch04.layers import (
    BIAS_TWICE,
    IN,
    NO_BIAS,
    NO_TRAFFIC,
    OUT,
    SHARDING_QUESTION,
    SKIPPED_BIAS_QUESTION,
    TRAFFIC_QUESTION,
    WITH_BIAS,
    Built,
    Problem,
    check_layer,
    shape,
)

CASES = (
    Built(),
    Built(leading=(2, 3), transposed=True),
    Built(leading=(2, 3), options={"gather_output": True}),
    Built(bias=False),
    Built(zero_bias=True, options={"stride": 2}),
    Built(leading=(2, 3), options={"skip_bias_add": True}),
    Built(bias=False, options={"skip_bias_add": True}),
    Built(leading=(2, 3), options={"gather_output": True, "skip_bias_add": True}),
    Built(options={"gather_output": True}, groups=checks.GROUPS),
)

OWN_PART = "the term from this rank's own columns, before the sum across ranks"


def give(case: Built, problem: Problem, place: checks.Place) -> dict[str, Any]:
    dy = problem.dy if case.options.get("gather_output") else place.part(problem.dy, -1)
    d_bias = None if problem.bias is None else place.part(problem.d_bias_out)
    return {
        "x": problem.x,
        "W": place.part(problem.weight),
        "b": None if problem.bias is None else place.part(problem.bias),
        "upstream": (dy, d_bias) if case.skipped else dy,
        "split along": {"weight": 0, "bias": 0},
    }


def expect(case: Built, problem: Problem, place: checks.Place) -> checks.Expected:
    gathered, bias = bool(case.options.get("gather_output")), problem.bias
    own_weight, own_bias = place.part(problem.weight), None if bias is None else place.part(bias)

    def returned(out: Tensor) -> Any:
        """Return what the layer should return on this rank if `out` is the full output [..., o]."""
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
    checks.Question(
        checks.differs("shape of weight"),
        "`weight` has the shape [output features, input features]. Does a column-parallel layer split the output "
        "features or the input features? How many input features and how many output features does each rank keep?",
    ),
    checks.Question(
        checks.differs("shape of bias"),
        "The bias has one element per output feature. How many output features does this rank compute? If "
        "`bias=False`, should the layer have a bias at all?",
    ),
    checks.Question(
        checks.has_kind("out", "structure", "type"),
        "What should the layer return? Without `skip_bias_add`, the layer should return only the output. With "
        "`skip_bias_add`, the layer should return the pair (output without the bias, bias), even if there's no bias.",
    ),
    checks.Question(
        checks.has_kind("out", "whole"),
        "Without `gather_output`, each rank should return only the columns that it computed itself. Which line of your "
        "code collects the other ranks' columns?",
    ),
    checks.Question(
        checks.has_kind("out", "part"),
        "With `gather_output`, every rank should return all columns of the output. Which operator concatenates the "
        "ranks' slices along the last dimension?",
    ),
    checks.Question(
        checks.has_kind("out", "none"), "Your layer returned None. Which branch of `forward` is missing a `return`?"
    ),
    SKIPPED_BIAS_QUESTION,
    checks.Question(
        checks.has_kind("out", NO_BIAS),
        "The output doesn't include the bias. Which line should add this rank's slice of the bias?",
    ),
    checks.Question(
        checks.has_kind("out", BIAS_TWICE),
        "The output includes the bias twice. Which two lines add the bias? (Remember that `F.linear` adds any bias you "
        "pass to it.)",
    ),
    checks.Question(
        checks.has_kind("out", "order", "other rank", "shape"),
        "The ranks' slices of the output should be concatenated along the last dimension, with rank 0's columns first. "
        "Which operator does exactly that?",
    ),
    checks.Question(
        checks.has_no_gradient("dW"),
        "No gradient reaches the weight. Which step of your forward pass is invisible to autograd? Autograd can "
        "follow the operators from chapter 03, but not `.data`, `.detach()`, or a new tensor filled by a "
        "function from `dist`.",
    ),
    checks.Question(
        lambda d: "dx" in d.names and checks.has_kind("backward traffic", NO_TRAFFIC)(d) and "dW" not in d.names,
        "Each rank computes dx from its own columns only, so it has just one of the p terms of the sum. Which operator "
        "sums these terms across ranks in the backward pass? Where does that operator go in `forward`?",
    ),
    checks.Question(
        lambda d: checks.has_kind("dx", "p times")(d) or d.names == {"dx", "backward traffic"},
        "How many times does your layer sum the gradient of x across ranks? Look at the communication in the "
        "backward pass, where each sum shows up as one all-reduce.",
    ),
    checks.Question(
        checks.has_kind("dx", "1/p"),
        "According to the chain rule, should dx be the sum of the terms from all ranks or their mean?",
    ),
    checks.Question(
        checks.differs("dW", "db", "dx"),
        "All three gradients are wrong. In the backward pass, the operator f all-reduces the gradient of the "
        "tensor you passed to it in the forward pass. Did you apply the operator f to the layer's input or "
        "to its output?",
    ),
    checks.Question(
        checks.has_no_gradient("dx"),
        "No gradient reaches the input. Which line breaks the autograd path from the output back to x?",
    ),
    checks.Question(
        checks.has_no_gradient("db"),
        "No gradient reaches the bias. Does your layer use the parameter `self.bias` itself, or a copy that autograd "
        "doesn't know about?",
    ),
    checks.Question(
        checks.differs("out"),
        "What should this rank's columns of Y = X A + b contain? Set p = 1, and work out one element by hand.",
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
        crash="Next to each line of your code, write down the tensor shapes on one rank. For this layer, x is [.., "
        "in], weight is [out/p, in], bias is [out/p], and the output is [.., out/p]. Which two tensor "
        "shapes in your code don't match?",
        fine=(IN + 1, OUT),
        odd=(IN, OUT + 1),
        odd_question=checks.Question(
            lambda d: True,
            "With 9 output features on 2 ranks, each rank would keep 4 features, and one feature would be silently "
            "dropped. Which function raises a ValueError in this case?",
        ),
    )
    return checks.Verdict(
        "Each rank holds out/p of the output features. The backward pass needs one all-reduce, and the forward pass "
        "doesn't communicate at all unless you gather the output."
    )
