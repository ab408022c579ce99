"""Chapter 04, exercises 4.1 and 4.2: the checks of the two parallel layers.

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

from tplab.course.checking import (
    WORLD_SIZES,
    Differences,
    Question,
    Traffic,
    Verdict,
    exercise,
    fresh_generator,
    observe,
    run_ranks,
    verify,
)
from tplab.course.observing import NotRun, Observed
from tplab.runtime import device
from tplab.sharding import Sharding

IN, OUT = 12, 8  # divisible by every p, and different, so that a mix-up shows
NO_TRAFFIC = "no traffic"


@dataclass(frozen=True)
class Case:
    """One way to build and run a layer. `groups`: the process groups, None: all ranks in the default group."""

    note: str
    leading: tuple[int, ...] = (5,)
    bias: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    groups: tuple[tuple[int, ...], ...] | None = None
    transposed: bool = False  # the input is not contiguous


def member_of(p: int, groups: Sequence[Sequence[int]] | None) -> list[tuple[int, tuple[int, ...]]]:
    """For each rank: the number of its group, and the ranks in it."""
    groups = groups or (tuple(range(p)),)
    return [next((i, tuple(g)) for i, g in enumerate(groups) if rank in g) for rank in range(p)]


def make_group(groups: Sequence[Sequence[int]] | None) -> Any:
    """On a rank: its process group; every rank makes all of them, as `new_group` wants."""
    made = [dist.new_group(list(ranks)) for ranks in groups or ()]
    return next((group for group, ranks in zip(made, groups or (), strict=True) if dist.get_rank() in ranks), None)


def on_device(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(device())
    return tuple(on_device(item) for item in value) if isinstance(value, tuple) else value


def run_cases(layer_class: Any, cases: Sequence[Case], data: Sequence[Sequence[dict[str, Any]]]) -> list[Observed]:
    """On a rank: every case, one after the other. data[case][rank] has this rank's x, upstream, W and b."""
    return [run_case(layer_class, case, mine[dist.get_rank()]) for case, mine in zip(cases, data, strict=True)]


def run_case(layer_class: Any, case: Case, mine: dict[str, Any]) -> Observed:
    group = make_group(case.groups)
    options = {"group": group, "device": device(), "dtype": torch.float64, **case.options}
    layer = layer_class(IN, OUT, case.bias, **options)
    shapes: Observed = {"shape of weight": shape(layer.weight), "shape of bias": shape(layer.bias)}
    if shapes != {"shape of weight": shape(mine["W"]), "shape of bias": shape(mine["b"])}:
        names = ("out", "dx", "dW", "db", "forward traffic", "backward traffic", "sharding of weight")
        return shapes | dict.fromkeys(names, NotRun("a parameter has another shape"))
    with torch.no_grad():
        layer.weight.copy_(mine["W"])
        if case.bias:
            layer.bias.copy_(mine["b"])
    x = mine["x"].to(device())
    seen = observe(layer, on_device(mine["upstream"]), inputs={"x": x}, parameters={"W": layer.weight, "b": layer.bias})
    return shapes | seen | {"sharding of weight": str(getattr(layer.weight, "tensor_parallel", None))}


def shape(tensor: Any) -> str:
    return str(list(tensor.shape)) if isinstance(tensor, Tensor) else str(tensor)


def refuses(layer_class: Any, in_features: int, out_features: int) -> Observed:
    """On a rank: what happens to a size that p does not divide."""
    try:
        layer_class(in_features, out_features)
    except ValueError:
        return {"an odd size": "ValueError"}
    return {"an odd size": "accepted"}


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
            seen = run_ranks(run_cases, p, layer_class, here[batch], held[batch], question=crash)
            for i, case in enumerate(here[batch]):
                verify(
                    number,
                    p,
                    [mine[i] for mine in seen],
                    right[batch][i],
                    questions=[GROUP_QUESTION, *questions] if case.groups else questions,
                    lookalikes=by_name(alike[batch][i]),
                    note=case.note,
                )
    seen = run_ranks(refuses, 2, layer_class, *odd)
    note = f"with {odd[0]} inputs and {odd[1]} outputs"
    verify(number, 2, seen, [{"an odd size": "ValueError"}] * 2, questions=[odd_question], note=note)


def by_name(rows: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, list[Any]]]:
    """{name: {description: value}} of each rank -> {name: {description: [value on rank 0, ...]}}."""
    return {name: {label: [row[name][label] for row in rows] for label in rows[0][name]} for name in rows[0]}


GROUP_QUESTION = Question(
    lambda d: True,
    "Here the four ranks work as two groups of two, each with data of its own. Which of your calls communicates in the "
    "default group of all ranks instead of `self.group`?",
)

GROUPS = ((0, 2), (1, 3))

COLUMN_CASES = (
    Case("with gather_output=False"),
    Case("with a three-dimensional, non-contiguous input", leading=(2, 3), transposed=True),
    Case("with gather_output=True", leading=(2, 3), options={"gather_output": True}),
    Case("with bias=False", bias=False),
    Case("with skip_bias_add=True", leading=(2, 3), options={"skip_bias_add": True}),
    Case("with skip_bias_add=True and bias=False", bias=False, options={"skip_bias_add": True}),
    Case("in groups [0, 2] and [1, 3]", options={"gather_output": True}, groups=GROUPS),
)

OWN_PART = "the part that this rank's own columns contribute, before any sum"
NO_BIAS = "the right one without the bias"
BIAS_TWICE = "the right one with the bias added twice"


def expect_column(
    case: Case, plain: Reference, rank: int, ranks: tuple[int, ...]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    index, q, p = ranks.index(rank), len(ranks), len(ranks) * len(case.groups or (0,))
    gathered = bool(case.options.get("gather_output"))
    skipped = bool(case.options.get("skip_bias_add"))

    def mine(tensor: Tensor | None, dim: int = -1) -> Tensor | None:
        return part(tensor, dim, index, q)

    out = plain.product if skipped else plain.out
    dy = plain.dy if gathered else mine(plain.dy)
    out_here = out if gathered else mine(out)
    bias_gradient = mine(plain.d_bias_out) if case.bias else None
    own = F.linear(mine(plain.dy), mine(plain.weight, 0).T)  # type: ignore[arg-type, union-attr]
    held = {
        "x": plain.x,
        "W": mine(plain.weight, 0),
        "b": mine(plain.bias, 0),
        "upstream": (dy, bias_gradient) if skipped else dy,
    }
    right = {
        "shape of weight": shape(held["W"]),
        "shape of bias": shape(held["b"]),
        "out": (out_here, mine(plain.bias)) if skipped else out_here,
        "dx": plain.dx,
        "dW": mine(plain.d_weight, 0),
        "db": mine(plain.d_bias, 0),
        "forward traffic": Traffic.expected(p, ("all_gather", out.numel()), group=ranks) if gathered else Traffic(),
        "backward traffic": Traffic.expected(p, ("all_reduce", plain.x.numel()), group=ranks),
        "sharding of weight": str(Sharding(dim=0)),
    }
    alike: dict[str, dict[str, Any]] = {"dx": {OWN_PART: own} if q > 1 else {}, "out": {}}
    if plain.bias is not None and not skipped:
        for label, times in ((NO_BIAS, -1), (BIAS_TWICE, 1)):
            shifted = plain.out + times * plain.bias
            alike["out"][label] = shifted if gathered else mine(shifted)
    return held, right, alike


def differs(*names: str) -> Callable[[Differences], bool]:
    """Every one of these observations differs, perhaps others too."""
    return lambda d: set(names) <= d.names


def has_kind(name: str, *kinds: str) -> Callable[[Differences], bool]:
    """The observation differs in one of these ways, on some rank."""
    return lambda d: any(difference.name == name and difference.kind in kinds for difference in d)


def has_no_gradient(*names: str) -> Callable[[Differences], bool]:
    """A gradient is None somewhere, or there was no way back at all."""
    return lambda d: any(
        difference.name in names and (difference.kind in ("none", "zeros") or difference.kind == "not run")
        for difference in d
    )


def changed(differences: Differences) -> bool:
    """The learner's code wrote into a tensor of the caller."""
    return "changed" in differences.kinds()


INPUTS_QUESTION = Question(
    changed,
    "The caller goes on using the tensors that it handed to you, in a residual connection for example. Which "
    "line writes into one of them instead of making a new one?",
)
TRAFFIC_QUESTION = Question(
    lambda d: bool(d.names) and d.names <= {"forward traffic", "backward traffic"},
    "The numbers are right, the communication is not. Which collective has to run here and in which "
    "direction, by the table of the four operators, and which line runs another one?",
)
SHARDING_QUESTION = Question(
    "sharding of weight",
    "Loading and saving read `weight.tensor_parallel`. Is it still set in the constructor, on the parameter "
    "that the layer uses?",
)

WAIT_QUESTION = Question(
    lambda d: "never waited" in d.kinds(),
    "A collective was started with async_op=True, and nobody waited for it. From when on may its result be used, and "
    "is it its result that you use?",
)

COLUMN_QUESTIONS = (
    INPUTS_QUESTION,
    WAIT_QUESTION,
    Question(
        differs("shape of weight"),
        "`weight` is [output features, input features]. Which of the two does a column-parallel layer split, "
        "and how many does one rank keep?",
    ),
    Question(
        differs("shape of bias"),
        "The bias has one number per output feature. How many output features does this rank compute, and "
        "should there be a bias at all when `bias=False`?",
    ),
    Question(
        has_kind("out", "structure", "type"),
        "What does the layer return? The output alone, or with `skip_bias_add` the pair (output without the "
        "bias, bias), also when there is no bias.",
    ),
    Question(
        has_kind("out", "whole"),
        "Did anybody ask for the whole output? Without `gather_output` each rank returns only the columns it computed.",
    ),
    Question(
        has_kind("out", "part"),
        "With `gather_output` every rank returns all columns. Along which dimension, and with which operator, "
        "do the slices come together?",
    ),
    Question(has_kind("out", "none"), "Which of your branches ends without a `return`?"),
    Question(has_kind("out", NO_BIAS), "Where is this rank's slice of the bias added?"),
    Question(
        has_kind("out", BIAS_TWICE),
        "The bias is in the output twice. Which two lines add it? `F.linear` adds the bias that you give it.",
    ),
    Question(
        has_kind("out", "order", "other rank", "shape"),
        "Every slice of the output belongs in one place: rank 0's columns first, along the last dimension. "
        "Which operator puts them there?",
    ),
    Question(
        has_no_gradient("dW"),
        "No gradient reaches the weight. Which step of your forward pass does autograd not know about? `dist` "
        "calls, `.data` and `.detach()` are such steps; the operators of chapter 03 are not.",
    ),
    Question(
        lambda d: "dx" in d.names and has_kind("backward traffic", NO_TRAFFIC)(d) and "dW" not in d.names,
        "Each rank computes dx through its own columns only. Which operator adds up the p parts in the "
        "backward pass, and where does it stand?",
    ),
    Question(
        lambda d: has_kind("dx", "p times")(d) or d.names == {"dx", "backward traffic"},
        "How often is the gradient of x summed over the ranks? Look at the backward traffic: each sum is one "
        "all-reduce.",
    ),
    Question(
        has_kind("dx", "1/p"),
        "Is dx the sum of the ranks' parts, or their mean? Which of the two does the chain rule ask for?",
    ),
    Question(
        differs("dW", "db", "dx"),
        "All three gradients are wrong. The backward pass of an operator acts on the gradient of whatever it "
        "was applied to: did you apply f to the input, or to the output?",
    ),
    Question(
        has_no_gradient("dx"), "No gradient reaches the input. Which line cuts the way from the output back to x?"
    ),
    Question(
        has_no_gradient("db"),
        "No gradient reaches the bias. What is returned or added: the parameter, or a copy that autograd does not "
        "know?",
    ),
    Question(
        differs("out"), "What is Y = X A + b here, for the columns of this rank? Compute one number by hand with p = 1."
    ),
    TRAFFIC_QUESTION,
    SHARDING_QUESTION,
)


@exercise("4.1", "ColumnParallelLinear")
def column_parallel_linear(layer_class: Any) -> Verdict:
    check_layer(
        "4.1",
        layer_class,
        COLUMN_CASES,
        expect_column,
        COLUMN_QUESTIONS,
        crash="Write the shapes of one rank next to your lines: x [..., i], weight [o/p, i], bias [o/p], out [..., "
        "o/p]. Which two do not fit together?",
        odd=(IN, OUT + 1),
        odd_question=Question(
            lambda d: True,
            "With 9 output features on 2 ranks each would keep 4, and one feature would silently be lost. "
            "Which function refuses that?",
        ),
    )
    return Verdict(
        "Each rank owns o/p output features. One all-reduce in the backward pass, nothing in the forward pass "
        "unless you gather."
    )


ROW_CASES = (
    Case("with input_is_parallel=True"),
    Case("with a three-dimensional, non-contiguous input", leading=(2, 3), transposed=True),
    Case("with input_is_parallel=False", leading=(2, 3), options={"input_is_parallel": False}),
    Case("with bias=False", bias=False),
    Case("with skip_bias_add=True", leading=(2, 3), options={"skip_bias_add": True}),
    Case("with skip_bias_add=True and bias=False", bias=False, options={"skip_bias_add": True}),
    Case("in groups [0, 2] and [1, 3]", options={"input_is_parallel": False}, groups=GROUPS),
)

BIAS_P_TIMES = "the right one with the bias added p times instead of once"
PARTIAL_SUM = "this rank's partial sum"
PARTIAL_SUM_AND_BIAS = "this rank's partial sum plus the bias"
MEAN_OF_SUMS = "the mean of the partial sums plus the bias"


def expect_row(
    case: Case, plain: Reference, rank: int, ranks: tuple[int, ...]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    index, q, p = ranks.index(rank), len(ranks), len(ranks) * len(case.groups or (0,))
    sliced = bool(case.options.get("input_is_parallel", True))
    skipped = bool(case.options.get("skip_bias_add"))

    def mine(tensor: Tensor, dim: int = -1) -> Tensor:
        return tensor.chunk(q, dim)[index]

    out = plain.product if skipped else plain.out
    held = {
        "x": mine(plain.x) if sliced else plain.x,
        "W": mine(plain.weight, 1),
        "b": plain.bias,
        "upstream": (plain.dy, plain.d_bias_out if case.bias else None) if skipped else plain.dy,
    }
    right = {
        "shape of weight": shape(held["W"]),
        "shape of bias": shape(held["b"]),
        "out": (out, plain.bias) if skipped else out,
        "dx": mine(plain.dx) if sliced else plain.dx,
        "dW": mine(plain.d_weight, 1),
        "db": plain.d_bias,
        "forward traffic": Traffic.expected(p, ("all_reduce", out.numel()), group=ranks),
        "backward traffic": Traffic() if sliced else Traffic.expected(p, ("all_gather", plain.x.numel()), group=ranks),
        "sharding of weight": str(Sharding(dim=1)),
    }
    alike: dict[str, dict[str, Any]] = {"out": {}}
    if plain.bias is not None and not skipped:
        own = F.linear(mine(plain.x), mine(plain.weight, 1))
        alike["out"] = {NO_BIAS: plain.product, BIAS_TWICE: plain.out + plain.bias}
        if q > 1:
            alike["out"] = {
                BIAS_P_TIMES: plain.product + q * plain.bias,
                PARTIAL_SUM: own,
                PARTIAL_SUM_AND_BIAS: own + plain.bias,
                MEAN_OF_SUMS: plain.product / q + plain.bias,
                **alike["out"],
            }
    return held, right, alike


ROW_QUESTIONS = (
    INPUTS_QUESTION,
    WAIT_QUESTION,
    Question(
        differs("shape of weight"),
        "`weight` is [output features, input features]. Which of the two does a row-parallel layer split, and "
        "how many does one rank keep?",
    ),
    Question(
        differs("shape of bias"),
        "Every rank ends up with every output feature. How many numbers must its bias have then, and should "
        "there be a bias at all when `bias=False`?",
    ),
    Question(
        has_kind("out", "structure", "type"),
        "What does the layer return? The output alone, or with `skip_bias_add` the pair (output without the "
        "bias, bias), also when there is no bias. Remember that `dist.all_reduce` returns None.",
    ),
    Question(
        has_kind("out", "none"),
        "Which of your branches ends without a `return`? `dist.all_reduce` works in place and returns None.",
    ),
    Question(
        has_kind("out", BIAS_P_TIMES),
        "How many times is the bias added: once, or once by every rank? What does the all-reduce do with p "
        "copies of it?",
    ),
    Question(has_kind("out", NO_BIAS), "Where is the bias added?"),
    Question(has_kind("out", BIAS_TWICE), "The bias is in the output twice. Which two lines add it?"),
    Question(
        has_kind("out", PARTIAL_SUM, PARTIAL_SUM_AND_BIAS),
        "X_r A_r is one term of the sum. Which operator adds up the terms of all ranks, and do you use what "
        "it returns?",
    ),
    Question(has_kind("out", MEAN_OF_SUMS, "1/p"), "Is Y the sum of the partial sums, or their mean?"),
    Question(
        lambda d: "out" not in d.names and has_kind("db", "1/p")(d),
        "The output is right, but each rank's bias gets only 1/p of its gradient, so it would learn p times "
        "too slowly. What is the bias divided by, and could it be added where no division is needed?",
    ),
    Question(
        lambda d: "out" not in d.names and has_no_gradient("db")(d),
        "The output is right, but on some rank the bias gets no gradient: after one optimizer step the ranks' "
        "copies of it differ. Who adds the bias, and who should?",
    ),
    Question(
        has_no_gradient("dW"),
        "No gradient reaches the weight. Which step of your forward pass does autograd not know about? `dist` "
        "calls, `.data` and `.detach()` are such steps; the operators of chapter 03 are not.",
    ),
    Question(
        has_kind("dx", "partly zero"),
        "dx is right in this rank's slice and zero elsewhere, but the input was replicated, so every rank "
        "needs all of dx. What is the backward of taking a slice, and which operator knows it?",
    ),
    Question(
        lambda d: has_kind("dW", "p times")(d) or has_kind("dx", "p times")(d),
        "The gradients are p times too large. Every rank already holds the whole dY after the sum: what "
        "should the backward pass of g do with it? Look at the backward traffic.",
    ),
    Question(
        lambda d: d.names == {"dx", "backward traffic"},
        "dx belongs to this rank's slice of the input, and no other rank has a part of it. Who adds up the "
        "slices of different ranks in the backward pass?",
    ),
    Question(
        has_kind("db", "p times"),
        "The gradient of the bias is p times too large. Who sums it over the ranks, and why would that be needed "
        "when every rank has the whole dY?",
    ),
    Question(
        differs("out"),
        "What is Y = X_0 A_0 + X_1 A_1 + b here? Which of the terms has your rank, and what happens to the others?",
    ),
    TRAFFIC_QUESTION,
    SHARDING_QUESTION,
)


@exercise("4.2", "RowParallelLinear")
def row_parallel_linear(layer_class: Any) -> Verdict:
    check_layer(
        "4.2",
        layer_class,
        ROW_CASES,
        expect_row,
        ROW_QUESTIONS,
        crash="Write the shapes of one rank next to your lines: x [..., i/p], weight [o, i/p], bias [o], out [..., "
        "o]. Which two do not fit together? Is the input sliced already when it arrives?",
        odd=(IN + 1, OUT),
        odd_question=Question(
            lambda d: True,
            "With 13 input features on 2 ranks each would keep 6, and one feature would silently be lost. "
            "Which function refuses that?",
        ),
    )
    return Verdict(
        "Each rank owns i/p input features. One all-reduce in the forward pass, and the bias after it, once."
    )
