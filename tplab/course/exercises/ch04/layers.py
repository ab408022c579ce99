"""Helpers for the checks of the parallel layers in exercises 4.1 and 4.2.

The checks compare each parallel layer with a plain linear layer, which runs in float64 in a single process.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tplab.course import checks
from tplab.runtime import device
from tplab.tensor.sharding import Sharding

IN, OUT = 12, 8  # divisible by every p, and different, so that the check notices if an answer mixes them up
NO_TRAFFIC = "no traffic"
NO_BIAS = "the correct output without the bias"
BIAS_TWICE = "the correct output with the bias added twice"
WITH_P_BIASES = "the output plus p times the bias, but it should not include the bias"
WITH_BIAS = "the output plus the bias, but it should not include the bias"
MARKED = "the attribute tensor_parallel says how each parameter is split"
REFUSED = "a size that isn't divisible by p is refused"
ACCEPTED = "only the dimension that's split has to be divisible by p"


@dataclass(frozen=True)
class Built(checks.Case):
    """A way to construct a layer, together with the shape and memory layout of the layer's input."""

    leading: tuple[int, ...] = (5,)
    bias: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    transposed: bool = False  # whether the input is transposed in memory, so that it isn't contiguous
    zero_bias: bool = False  # whether the bias is zero, as it is before the first training step

    def describe(self, name: str) -> str:
        options = ["bias=False"] * (not self.bias) + [f"{option}={value}" for option, value in self.options.items()]
        call = f"{name}({', '.join([str(IN), str(OUT), *options, *['group=group'] * bool(self.groups)])})"
        return call + " on a three-dimensional, non-contiguous x" * self.transposed + ", bias 0" * self.zero_bias

    @property
    def skipped(self) -> bool:
        """Whether the layer returns its bias instead of adding it."""
        return bool(self.options.get("skip_bias_add"))


class Problem(NamedTuple):
    """The weights, input, output and gradients of a linear layer that runs in a single process."""

    x: Tensor  # [..., i]
    weight: Tensor  # [o, i]
    bias: Tensor | None  # [o]
    product: Tensor  # [..., o], the output without the bias
    dy: Tensor  # [..., o]
    d_bias_out: Tensor  # [o], the gradient of the bias if the layer returns it
    dx: Tensor
    d_weight: Tensor
    d_bias: Tensor | None

    @property
    def out(self) -> Tensor:
        return self.product if self.bias is None else self.product + self.bias


def draw(case: Built, generator: torch.Generator, size: int) -> Problem:
    if case.transposed:
        x = checks.random_tensor(generator, IN, *case.leading).movedim(0, -1)
    else:
        x = checks.random_tensor(generator, *case.leading, IN)
    weight, bias = checks.random_tensor(generator, OUT, IN), checks.random_tensor(generator, OUT)
    bias = torch.zeros_like(bias) if case.zero_bias else bias
    dy, d_bias_out = checks.random_tensor(generator, *case.leading, OUT), checks.random_tensor(generator, OUT)
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    product = F.linear(x, weight)  # [..., o]
    dx, d_weight, d_bias = torch.autograd.grad(product + bias, leaves, dy)
    return Problem(
        x.detach(), weight.detach(), bias.detach() if case.bias else None, product.detach(), dy, d_bias_out,
        dx, d_weight, (d_bias_out if case.skipped else d_bias) if case.bias else None,
    )  # fmt: skip


def run(layer_class: Any, case: Built, given: dict[str, Any], group: Any) -> checks.Observed:
    options = {"group": group, "device": device(), "dtype": case.dtype, **case.options}
    layer = layer_class(IN, OUT, case.bias, **options)
    shapes: checks.Observed = {"shape of weight": shape(layer.weight), "shape of bias": shape(layer.bias)}
    if shapes != {"shape of weight": shape(given["W"]), "shape of bias": shape(given["b"])}:
        names = ("out", "dx", "dW", "db", "forward traffic", "backward traffic")
        return shapes | dict.fromkeys(names, checks.NotRun("a parameter has another shape"))
    with torch.no_grad():
        layer.weight.copy_(given["W"])
        if case.bias:
            layer.bias.copy_(given["b"])
    seen = checks.observe(
        layer,
        on_device(given["upstream"]),
        inputs={"x": given["x"].to(device())},
        parameters={"W": layer.weight, "b": layer.bias},
        any_size=0,
    )
    stride = case.options.get("stride", 1)
    wrong = ""
    for name in ("weight", "bias") if case.bias else ("weight",):
        found, dim = getattr(getattr(layer, name), "tensor_parallel", None), given["split along"][name]
        if found != (None if dim is None else Sharding(dim, stride)):
            wrong = wrong or f"{name}.tensor_parallel is {found}"
    return shapes | seen | {MARKED: checks.Claim(wrong)}


def on_device(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(device())
    return tuple(on_device(item) for item in value) if isinstance(value, tuple) else value


def shape(tensor: Any) -> str:
    return str(list(tensor.shape)) if isinstance(tensor, Tensor) else str(tensor)


def built_with(layer_class: Any, odd: tuple[int, int], fine: tuple[int, int]) -> list[checks.Observed]:
    """On every rank, construct two layers that have a dimension whose size isn't divisible by p.

    The first layer should raise ValueError, because it would have to split this dimension. The second layer should not
    raise an error, because every rank keeps this dimension in full.
    """
    refused = accepted = ""
    try:
        layer_class(*odd)
        refused = "the layer was built without a ValueError"
    except ValueError:
        pass
    except AssertionError:
        refused = "it raised AssertionError instead of ValueError"
    try:
        layer_class(*fine)
    except ValueError as error:
        accepted = f"ValueError: {error}"
    return [{REFUSED: checks.Claim(refused)}, {ACCEPTED: checks.Claim(accepted)}]


def check_layer(
    number: str,
    layer_class: Any,
    cases: Sequence[Built],
    *,
    give: Callable[[Built, Problem, checks.Place], dict[str, Any]],
    expect: Callable[[Built, Problem, checks.Place], checks.Expected],
    questions: Sequence[checks.Question],
    crash: str,
    odd: tuple[int, int],
    odd_question: checks.Question,
    fine: tuple[int, int],
) -> None:
    """Check all cases, and then check that two ranks reject a layer only if they can't split it evenly.

    `odd` and `fine` are (input features, output features) pairs. The ranks must reject `odd` but accept `fine`.
    """

    def in_group(case: Built) -> str | None:
        return checks.ask_about_group(GROUP_CRASH) if case.groups else None

    def without_bias(case: Built) -> str:
        return crash if case.bias else f"{NO_BIAS_CRASH} {crash}"

    checks.check_cases(
        number, layer_class, cases, draw=draw, give=give, run=run, expect=expect,
        questions=lambda case, observed: [GROUP_IGNORED, *questions] if case.groups else questions,
        crash=lambda case: in_group(case) or without_bias(case), stuck=in_group,
    )  # fmt: skip
    notes = [f"{getattr(layer_class, '__name__', 'layer')}({i}, {o})" for i, o in (odd, fine)]
    seen = checks.run_ranks(built_with, 2, layer_class, odd, fine, note=" and ".join(notes))
    for one, note, question in zip(zip(*seen, strict=True), notes, (odd_question, FINE_QUESTION), strict=True):
        checks.verify(number, 2, list(one), [{}] * 2, questions=[question], note=note)


NO_BIAS_CRASH = (
    "This time, the layer was built with `bias=False`, so `self.bias` is None. Which line uses the bias anyway? If "
    "there's no such line, look for two tensor shapes that don't match."
)
GROUP_CRASH = (
    "Which of your calls uses the default group of all ranks instead of `self.group`? Check every call that "
    "communicates, and every call that looks up a rank or a world size."
)
GROUP_IGNORED = checks.group_question(
    "Which of your calls communicates over the default group, which contains all ranks, instead of `self.group`?"
)


TRAFFIC_QUESTION = checks.Question(
    lambda d: bool(d.names) and d.names <= {"forward traffic", "backward traffic"},
    "The values are all correct, but your layer doesn't run the expected collectives. According to the table of "
    "operators, which collectives should run in each pass? Where does your code differ from this table?",
)

SHARDING_QUESTION = checks.Question(
    MARKED,
    "Loading and saving rely on each parameter's `tensor_parallel` attribute. Does the constructor still set "
    "`tensor_parallel` correctly on the parameters that the layer actually uses? For a sharded parameter, "
    "the attribute also needs the stride. A replicated parameter must not have the attribute at all.",
)

FINE_QUESTION = checks.Question(
    ACCEPTED,
    "This layer has one odd size, but it's along the dimension that every rank keeps in full. Which line requires "
    "the odd size to be divisible by p, too?",
)

SKIPPED_BIAS_QUESTION = checks.Question(
    lambda d: bool({WITH_BIAS, WITH_P_BIASES} & d.kinds()),
    "With `skip_bias_add=True`, the layer returns its bias, and the caller adds it later. That's why the output that "
    "you return must not include the bias. Which line adds the bias anyway?",
)
