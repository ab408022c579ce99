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
    Built(zero_bias=True),
    Built(leading=(2, 3), options={"skip_bias_add": True}),
    Built(bias=False, options={"skip_bias_add": True}),
    Built(leading=(2, 3), options={"gather_output": True, "skip_bias_add": True}),
    Built(options={"gather_output": True}, groups=checks.GROUPS),
)

OWN_PART = "the term from this rank's own columns, before any sum"


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
        "`weight` is [output features, input features]. Which of the two does a column-parallel layer split, and how "
        "many of them does each rank keep?",
    ),
    checks.Question(
        checks.differs("shape of bias"),
        "The bias has one element per output feature. How many output features does this rank compute? And should "
        "there be a bias at all if `bias=False`?",
    ),
    checks.Question(
        checks.has_kind("out", "structure", "type"),
        "What should the layer return? It's just the output, or with `skip_bias_add` the pair (output without the "
        "bias, bias), even if there's no bias.",
    ),
    checks.Question(
        checks.has_kind("out", "whole"),
        "Nobody asked for the full output. Without `gather_output`, each rank returns only the columns that it "
        "computed. Which line collects the others?",
    ),
    checks.Question(
        checks.has_kind("out", "part"),
        "With `gather_output`, every rank should return all columns. Which operator puts the slices together, and "
        "along which dimension?",
    ),
    checks.Question(checks.has_kind("out", "none"), "Which of your branches ends without a `return`?"),
    SKIPPED_BIAS_QUESTION,
    checks.Question(
        checks.has_kind("out", NO_BIAS), "The bias is missing. Which line should add this rank's slice of it?"
    ),
    checks.Question(
        checks.has_kind("out", BIAS_TWICE),
        "The bias is in the output twice. Which two lines add it? (`F.linear` adds the bias that you pass to it.)",
    ),
    checks.Question(
        checks.has_kind("out", "order", "other rank", "shape"),
        "The slices of the output should stand side by side along the last dimension, and rank 0's columns come "
        "first. Which operator puts them there?",
    ),
    checks.Question(
        checks.has_no_gradient("dW"),
        "No gradient reaches the weight. Which step of your forward pass is invisible to autograd? Calls to `dist`, "
        "`.data` and `.detach()` are, and the operators from chapter 03 aren't.",
    ),
    checks.Question(
        lambda d: "dx" in d.names and checks.has_kind("backward traffic", NO_TRAFFIC)(d) and "dW" not in d.names,
        "Each rank computes dx through its own columns only, so it has one of p terms. Which operator adds the terms "
        "in the backward pass, and where does it have to stand?",
    ),
    checks.Question(
        lambda d: checks.has_kind("dx", "p times")(d) or d.names == {"dx", "backward traffic"},
        "How often do you add up the gradient of x over the ranks? Look at the backward traffic, in which each sum "
        "is one all-reduce.",
    ),
    checks.Question(
        checks.has_kind("dx", "1/p"),
        "Should dx be the sum of the ranks' terms, or their mean? What does the chain rule say?",
    ),
    checks.Question(
        checks.differs("dW", "db", "dx"),
        "All three gradients are wrong. An operator's backward pass acts on the gradient of the tensor that the "
        "operator was applied to. So did you apply f to the input, or to the output?",
    ),
    checks.Question(
        checks.has_no_gradient("dx"),
        "No gradient reaches the input. Which line cuts the path from the output back to x?",
    ),
    checks.Question(
        checks.has_no_gradient("db"),
        "No gradient reaches the bias. Do you add and return the parameter itself, or a copy that autograd doesn't "
        "know?",
    ),
    checks.Question(
        checks.differs("out"),
        "What's Y = X A + b for the columns of this rank? Set p = 1 and work out one element by hand.",
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
        crash="Write one rank's shapes next to your lines: x [.., in], weight [out/p, in], bias [out/p], output [.., "
        "out/p]. Which two of them don't fit together?",
        odd=(IN, OUT + 1),
        odd_question=checks.Question(
            lambda d: True,
            "With 9 output features on 2 ranks, each rank would keep 4, and one feature would silently be lost. "
            "Which function refuses to do that?",
        ),
    )
    return checks.Verdict(
        "Each rank owns out/p of the output features. There's one all-reduce in the backward pass, and nothing in "
        "the forward pass unless you gather."
    )
