"""Run one of the parallel layers of exercises 4.1 and 4.2 and compare it with a plain linear layer.

Every layer is run in several cases (with and without gather, bias, ...) on p = 1, 2, 4 ranks and, at p = 4, in two
groups of two ranks with data of their own. Right is what plain torch computes on one process in float64.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from tplab.course.checks import (
    IN_GROUPS,
    WORLD_SIZES,
    Claim,
    NotRun,
    Observed,
    Question,
    ask_about_group,
    by_name,
    fresh_generator,
    group_question,
    make_group,
    member_of,
    observe,
    run_cases,
    run_ranks,
    verify,
)
from tplab.runtime import device

IN, OUT = 12, 8  # divisible by every p, and different, so that a mix-up shows
NO_TRAFFIC = "no traffic"
NO_BIAS = "the right one without the bias"
BIAS_TWICE = "the right one with the bias added twice"
WITH_P_BIASES = "the output with the bias added p times, where it should be without"
WITH_BIAS = "the output with the bias, where it should be without"
SHARDED = "weight.tensor_parallel says how the weight is cut"
REFUSED = "a size that p does not divide is refused"


@dataclass(frozen=True)
class Case:
    """One way to build and run a layer. `groups`: the process groups, None: all ranks in the default group."""

    leading: tuple[int, ...] = (5,)
    bias: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    groups: tuple[tuple[int, ...], ...] | None = None
    transposed: bool = False  # the input is not contiguous

    def note(self, layer_class: Any) -> str:
        """The case as a learner would write it: "ColumnParallelLinear(12, 8, bias=False)"."""
        options = ["bias=False"] if not self.bias else []
        options += [f"{name}={value}" for name, value in self.options.items()] + ["group=group"] * bool(self.groups)
        call = f"{getattr(layer_class, '__name__', 'layer')}({', '.join([str(IN), str(OUT), *options])})"
        extra = " on a three-dimensional, non-contiguous x" if self.transposed else ""
        return call + extra + (f" {IN_GROUPS}" if self.groups else "")

    def crash(self, question: str) -> str:
        """What to ask where the layer raises: `question` is about shapes."""
        if self.groups:
            return ask_about_group(GROUP_CRASH)
        if self.bias:
            return question
        return f"{NO_BIAS_CRASH} If it is not about that: {question}"


def on_device(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(device())
    return tuple(on_device(item) for item in value) if isinstance(value, tuple) else value


def run_layer(layer_class: Any, cases: Sequence[Case], data: Sequence[Sequence[dict[str, Any]]]) -> list[Observed]:
    """On a rank: every case, one after the other. data[case][rank] has this rank's x, upstream, W and b."""
    return [run_case(layer_class, case, mine[dist.get_rank()]) for case, mine in zip(cases, data, strict=True)]


def run_case(layer_class: Any, case: Case, mine: dict[str, Any]) -> Observed:
    group = make_group(case.groups)
    options = {"group": group, "device": device(), "dtype": torch.float64, **case.options}
    layer = layer_class(IN, OUT, case.bias, **options)
    shapes: Observed = {"shape of weight": shape(layer.weight), "shape of bias": shape(layer.bias)}
    if shapes != {"shape of weight": shape(mine["W"]), "shape of bias": shape(mine["b"])}:
        names = ("out", "dx", "dW", "db", "forward traffic", "backward traffic")
        return shapes | dict.fromkeys(names, NotRun("a parameter has another shape"))
    with torch.no_grad():
        layer.weight.copy_(mine["W"])
        if case.bias:
            layer.bias.copy_(mine["b"])
    x = mine["x"].to(device())
    seen = observe(layer, on_device(mine["upstream"]), inputs={"x": x}, parameters={"W": layer.weight, "b": layer.bias})
    found = getattr(layer.weight, "tensor_parallel", None)
    return shapes | seen | {SHARDED: Claim("" if found == mine["sharding"] else f"it is {found}")}


def shape(tensor: Any) -> str:
    return str(list(tensor.shape)) if isinstance(tensor, Tensor) else str(tensor)


def refuses(layer_class: Any, in_features: int, out_features: int) -> Observed:
    """On a rank: what happens to a size that p does not divide."""
    try:
        layer_class(in_features, out_features)
    except ValueError:
        return {REFUSED: Claim("")}
    return {REFUSED: Claim("the layer was built, without a ValueError")}


def make_x(case: Case, generator: torch.Generator) -> Tensor:
    if case.transposed:
        return torch.randn(IN, *case.leading, generator=generator, dtype=torch.float64).movedim(0, -1)
    return torch.randn(*case.leading, IN, generator=generator, dtype=torch.float64)


@dataclass(frozen=True)
class Reference:
    """A plain linear layer on one process: its inputs, its output without the bias, its gradients."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    product: Tensor
    dy: Tensor
    d_bias_out: Tensor  # the gradient of the bias where the layer hands it back
    dx: Tensor
    d_weight: Tensor
    d_bias: Tensor | None

    @property
    def out(self) -> Tensor:
        return self.product if self.bias is None else self.product + self.bias


def reference(case: Case, generator: torch.Generator) -> Reference:
    x = make_x(case, generator).requires_grad_()
    weight = torch.randn(OUT, IN, generator=generator, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(OUT, generator=generator, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(*case.leading, OUT, generator=generator, dtype=torch.float64)
    d_bias_out = torch.randn(OUT, generator=generator, dtype=torch.float64)
    product = F.linear(x, weight)  # [..., o]
    (product + bias).backward(dy)
    assert x.grad is not None
    assert weight.grad is not None
    db = d_bias_out if case.options.get("skip_bias_add") else bias.grad
    return Reference(
        x.detach(),
        weight.detach(),
        bias.detach() if case.bias else None,
        product.detach(),
        dy,
        d_bias_out,
        x.grad,
        weight.grad,
        db if case.bias else None,
    )


def part(tensor: Tensor | None, dim: int, index: int, count: int) -> Tensor | None:
    return None if tensor is None else tensor.chunk(count, dim)[index]


def check_layer(
    number: str,
    layer_class: Any,
    cases: Sequence[Case],
    expect: Callable[[Case, Reference, int, tuple[int, ...]], tuple[dict[str, Any], dict[str, Any], dict[str, Any]]],
    questions: Sequence[Question],
    crash: str,
    odd: tuple[int, int],
    odd_question: Question,
) -> None:
    """All cases on p = 1, 2, 4. `expect` gives what a rank holds, what is right there, and what known mistakes give."""
    for p in WORLD_SIZES:
        generator = fresh_generator()
        here = [case for case in cases if case.groups is None or p == 4]
        held: list[list[dict[str, Any]]] = []
        right: list[list[dict[str, Any]]] = []
        alike: list[list[dict[str, Any]]] = []
        for case in here:
            references = [reference(case, generator) for _ in case.groups or (0,)]
            members = member_of(p, case.groups)
            rows = [expect(case, references[i], rank, ranks) for rank, (i, ranks) in enumerate(members)]
            for collection, column in zip((held, right, alike), zip(*rows, strict=True), strict=True):
                collection.append(list(column))
        for batch in (slice(0, 1), slice(1, None)):  # the plain case alone first: its message is the clearest
            runs = run_cases(
                run_layer,
                p,
                layer_class,
                here[batch],
                held[batch],
                note=lambda case: case.note(layer_class),
                question=lambda case: case.crash(crash),
                stuck=lambda case: ask_about_group(GROUP_CRASH) if case.groups else None,
            )
            for i, (case, seen) in enumerate(zip(here[batch], runs, strict=True)):
                verify(
                    number,
                    p,
                    seen,
                    right[batch][i],
                    questions=[GROUP_IGNORED, *questions] if case.groups else questions,
                    lookalikes=by_name(alike[batch][i]),
                    note=case.note(layer_class),
                )
    note = f"{getattr(layer_class, '__name__', 'layer')}({odd[0]}, {odd[1]})"
    refused = run_ranks(refuses, 2, layer_class, *odd, note=note)
    verify(number, 2, list(refused), [{}] * 2, questions=[odd_question], note=note)


NO_BIAS_CRASH = (
    "Here the layer was built with bias=False, so self.bias is None. Which line adds it, or asks something of it, all "
    "the same?"
)
GROUP_CRASH = (
    "Which of your calls takes its size or its rank from the default group of all ranks, or communicates in it, "
    "instead of `self.group`?"
)
GROUP_IGNORED = group_question(
    "Which of your calls communicates in the default group of all ranks instead of `self.group`?"
)


TRAFFIC_QUESTION = Question(
    lambda d: bool(d.names) and d.names <= {"forward traffic", "backward traffic"},
    "The numbers are right, the communication is not. Which collective has to run here and in which "
    "direction, by the table of the four operators, and which line runs another one?",
)

SHARDING_QUESTION = Question(
    SHARDED,
    "Loading and saving read `weight.tensor_parallel`. Is it still set in the constructor, on the parameter "
    "that the layer uses?",
)

SKIPPED_BIAS_QUESTION = Question(
    lambda d: bool({WITH_BIAS, WITH_P_BIASES} & d.kinds()),
    "With skip_bias_add=True the layer hands the bias back, and the caller adds it. So the output must be without it: "
    "which line adds it here?",
)

WAIT_QUESTION = Question(
    lambda d: "never waited" in d.kinds(),
    "A collective was started with async_op=True, and nobody waited for it. From when on may its result be used, and "
    "is it its result that you use?",
)
