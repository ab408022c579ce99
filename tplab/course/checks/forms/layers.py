"""Check a layer that's split across ranks by comparing it with the same layer in a single process.

Each rank builds the layer, and the check copies the rank's shards of random full weights into its parameters. Then the
layer runs a forward and a backward pass. A formula that runs with the full weights in float64 says what's right:

    COLUMN = Layer(
        of="ColumnParallelLinear", sizes=(12, 8), width=12,
        weights={"weight": Weight("W", (8, 12), Sharding(0)), "bias": Weight("b", (8,), Sharding(0))},
        formula=lambda case, x, w: F.linear(x, w["W"], w.get("b")),
        out_split=lambda case: [Sharding(-1)],
        backward_traffic=lambda case, x, out: [("all_reduce", x.numel())],
    )
    exercise("4.1", "...", takes=["ColumnParallelLinear"], trials=COLUMN.trials([Built()]), passed="...")

A rank observes these values:

    "shape of weight", ...    the shape of each parameter of the formula, by its name in the module, or "None"
    "out"                     the output, or a tuple of outputs
    "dx", "dW", "db"          the gradients of the input and of this rank's shards, by the parameters' letters
    "forward traffic", "backward traffic", "inputs unchanged"    as in `observe`

and the statements below, such as MARKED. If a parameter has the wrong shape, the layer doesn't run.

An exercise has two tables of mistakes. Those that only show in statements about sizes that are refused are in "4.1
sizes", because nearly every mistake makes such a statement true or untrue in the same way, so the other mistakes would
explain too much.
"""

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tplab.course.checks.cases import Case, Place, random_tensor
from tplab.course.checks.forms.statements import Statement, refuses, statements
from tplab.course.checks.observation import Claim, NotRun, Observed, observe
from tplab.course.checks.run_answer import called_as
from tplab.course.checks.trials import OnRanks
from tplab.course.checks.twins import Twin
from tplab.runtime import device
from tplab.tensor.sharding import Sharding, shard

MARKED = "the attribute tensor_parallel says how each parameter is split"
NO_OTHERS = "the layer has no other parameters"
OWN_SHARDS = "each parameter keeps only its own shard in memory"
ZERO = "the bias starts at zero"
NO_LEAK = "no outputs of earlier calls stay in memory"
REFUSED = "a size that isn't divisible by p is refused"
PART = "sizes"  # the section of the table for the last one

Calls = Sequence[tuple[str, int]]  # the kind and the number of elements of each collective, as for Place.traffic


@dataclass(frozen=True)
class Built(Case):
    """A way to build the layer, together with the shape of its input.

    leading: all dimensions of the input except the last
    options: further keyword arguments. The layer has to store "stride" in the attribute tensor_parallel, and that's all
             that the argument does
    """

    leading: tuple[int, ...] = (5,)
    bias: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    sizes: tuple[int, ...] = ()  # for the headline

    def describe(self, name: str) -> str:
        options = ["bias=False"] * (not self.bias) + [f"{option}={value}" for option, value in self.options.items()]
        return f"{name}({', '.join([*map(str, self.sizes), *options, *['group=group'] * bool(self.groups)])})"

    def mark(self, split: Sharding | None) -> Sharding | None:
        """Return the attribute tensor_parallel of a parameter that's split like this."""
        return split and replace(split, stride=self.options.get("stride", split.stride))


class Weight(NamedTuple):
    """A parameter of the full layer. A bias is one whose name ends in "bias", and it's absent if the case says so.

    letter: its name in the formula
    shape:  the shape of the full tensor
    split:  how it's split across the ranks, or None if every rank has all of it
    scale:  the standard deviation of its random values
    """

    letter: str
    shape: tuple[int, ...]
    split: Sharding | None = None
    scale: float = 1.0


class Problem(NamedTuple):
    """The full tensors of a layer that runs in a single process."""

    x: Tensor  # [..., width]
    more: dict[str, Tensor]  # further inputs, by name
    weights: dict[str, Tensor]  # by the names in the module
    outs: tuple[Tensor | None, ...]
    upstream: tuple[Tensor | None, ...]  # the gradient of each output
    gradients: dict[str, Tensor]  # of "x", of further inputs, and of the weights, by the names in the module


class Given(NamedTuple):
    """What a rank receives: its slices of the input and of the upstream gradients, and its shards of the weights."""

    x: Tensor
    more: dict[str, Tensor]
    weights: dict[str, Tensor]
    upstream: tuple[Tensor | None, ...]
    full: dict[str, Tensor]  # the full weights, if the layer is composed of others


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The same layer in a single process, and how the ranks share its tensors and its work.

    of:        the name of the class. The constructor also takes group=, device=, dtype= and, if there's a bias, bias=
    sizes:     the positional arguments of the constructor
    width:     the size of the input's last dimension
    weights:   the parameters by their names in the module, as in {"up.weight": Weight("A", (20, 6), Sharding(0))}
    formula:   (case, x, {letter: full weight}) -> the output, or a tuple of outputs. An output may be None. Further
               inputs are among the weights
    more:      (case, generator, width) -> further inputs by name. Every rank has all of them
    any_size:  the dimension along which the inputs may have any size
    x_split:   (case) -> how the input is split, or None if every rank has all of it
    out_split: (case) -> the same for each output
    forward_traffic, backward_traffic: (case, the full x, the first full output) -> the collectives that are needed
    composed:  whether the layer consists of other layers, which initialize their parameters and say how they're split.
               If so, each parameter gets its shard as its own attribute tensor_parallel says, as from a checkpoint,
               which means that a wrong attribute leads to a wrong output. And a bias may start with any values
    odd:       sizes with which the layer can be built, too, although p doesn't divide the dimension that isn't split
    terms:     as in `OnRanks`, with a `Problem`
    """

    of: str
    sizes: tuple[int, ...]
    width: int
    weights: Mapping[str, Weight]
    formula: Callable[[Any, Tensor, Mapping[str, Tensor]], Any]
    more: Callable[[Any, torch.Generator, int], Mapping[str, Tensor]] = lambda case, generator, width: {}
    any_size: int = 0
    x_split: Callable[[Any], Sharding | None] = lambda case: None
    out_split: Callable[[Any], Sequence[Sharding | None]] = lambda case: [None]
    forward_traffic: Callable[[Any, Tensor, Tensor], Calls] = lambda case, x, out: []
    backward_traffic: Callable[[Any, Tensor, Tensor], Calls] = lambda case, x, out: []
    composed: bool = False
    odd: tuple[int, ...] = ()
    terms: Callable[[Any, Problem, int], Mapping[str, Sequence[Any]]] = lambda case, problem, size: {}

    def trials(self, cases: Sequence[Built], *, refused: tuple[int, ...] = ()) -> list[OnRanks]:
        """Return trials that run the layer in these cases on 1, 2 and 4 ranks.

        refused: sizes that must raise ValueError on two ranks
        """
        compared = OnRanks(
            of=self.of, cases=[replace(case, sizes=self.sizes) for case in cases], draw=self._draw, give=self._give,
            run=partial(_run, self), right=self._right, terms=self.terms,
            world_sizes=(2, 4, 1),  # two ranks come first, as they reveal the most about a mistake
        )  # fmt: skip
        if not refused:
            return [compared]
        said = Statement(REFUSED, refuses(lambda layer_class: layer_class(*refused)), f"{self.of}{refused}")
        return [compared, statements(said, of=self.of, part=PART)]

    def present(self, case: Built) -> dict[str, Weight]:
        """Return the weights that the layer has in this case."""
        return {name: weight for name, weight in self.weights.items() if case.bias or not name.endswith("bias")}

    def options(self, case: Built) -> dict[str, Any]:
        """Return the keyword arguments with which a case builds the layer."""
        bias = {"bias": case.bias} if any(name.endswith("bias") for name in self.weights) else {}
        return {**bias, "device": device(), "dtype": case.dtype, **case.options}

    def _draw(self, case: Built, generator: torch.Generator, size: int) -> Problem:
        random = partial(random_tensor, generator)
        x = random(*case.leading, self.width)
        full = {name: random(*weight.shape) * weight.scale for name, weight in self.weights.items()}
        full = {name: full[name] for name in self.present(case)}
        more = dict(self.more(case, generator, self.width))
        leaves = {"x": x, **full, **{name: value for name, value in more.items() if value.is_floating_point()}}
        for leaf in leaves.values():
            leaf.requires_grad_()
        by_letter = {self.weights[name].letter: value for name, value in full.items()}
        outs = as_tuple(self.formula(case, x, by_letter | more))
        upstream = tuple(None if out is None else random(*out.shape) for out in outs)
        pairs = [(out, dy) for out, dy in zip(outs, upstream, strict=True) if out is not None]
        gradients = torch.autograd.grad([out for out, _ in pairs], list(leaves.values()), [dy for _, dy in pairs])
        detached, others = ({name: value.detach() for name, value in each.items()} for each in (full, more))
        plain = tuple(None if out is None else out.detach() for out in outs)
        return Problem(x.detach(), others, detached, plain, upstream, dict(zip(leaves, gradients, strict=True)))

    def _give(self, case: Built, problem: Problem, place: Place) -> Given:
        return Given(
            _part(problem.x, self.x_split(case), place),
            problem.more,
            {name: _part(problem.weights[name], weight.split, place) for name, weight in self.present(case).items()},
            self._outs(case, problem.upstream, place),
            problem.weights if self.composed else {},
        )

    def _right(self, case: Built, problem: Problem, place: Place) -> Observed:
        gradients, present = problem.gradients, self.present(case)
        given, outs = self._give(case, problem, place), self._outs(case, problem.outs, place)
        full = problem.outs[0]
        assert full is not None  # only a bias that's returned may be missing
        return {
            **{f"shape of {name}": _shape(given.weights.get(name)) for name in self.weights},
            "out": outs if len(outs) > 1 else outs[0],
            "dx": _part(gradients["x"], self.x_split(case), place),
            **{f"d{name}": gradients[name] for name in problem.more if name in gradients},
            **{
                f"d{weight.letter}": _part(gradients[name], weight.split, place) if name in present else None
                for name, weight in self.weights.items()
            },
            "forward traffic": place.traffic(*self.forward_traffic(case, problem.x, full)),
            "backward traffic": place.traffic(*self.backward_traffic(case, problem.x, full)),
        }

    def _outs(self, case: Built, full: Sequence[Tensor | None], place: Place) -> tuple[Tensor | None, ...]:
        splits = zip(full, self.out_split(case), strict=True)
        return tuple(None if value is None else _part(value, split, place) for value, split in splits)


def _part(full: Tensor, split: Sharding | None, place: Place) -> Tensor:
    return full if split is None else place.part(full, split.dim, split.stride)


def as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _run(layer: Layer, layer_class: Any, case: Built, given: Given, group: Any) -> Observed:
    build = partial(layer_class, group=group, **layer.options(case))
    built = build(*layer.sizes)
    parameters = {name: _parameter(built, name) for name in layer.weights}
    seen: Observed = {f"shape of {name}": _shape(parameter) for name, parameter in parameters.items()}
    others = [name for name, _ in built.named_parameters() if name not in layer.weights]
    seen[NO_OTHERS] = Claim(f"it also has {', '.join(others)}" if others else "")
    if seen != seen | {f"shape of {name}": _shape(given.weights.get(name)) for name in layer.weights}:
        letters = [f"d{weight.letter}" for weight in layer.weights.values()]
        more = [f"d{name}" for name in given.more]
        names = ("out", "dx", *more, *letters, "forward traffic", "backward traffic")
        return seen | dict.fromkeys(names, NotRun("a parameter has another shape"))
    seen |= _state(layer, case, parameters)
    outs: list[weakref.ref[Tensor]] = []

    def note(module: nn.Module, inputs: Any, out: Any) -> None:
        outs.extend(weakref.ref(each) for each in as_tuple(out)[:1] if isinstance(each, Tensor))

    if case.twin is Twin.BETWEEN:  # a layer with other sizes, in case that something is kept on the class
        build(*(2 * size for size in layer.sizes))
        built.register_forward_hook(note)
    with torch.no_grad():
        for name, value in (given.weights | _loaded(given.full, parameters, group)).items():
            parameters[name].copy_(value)
    upstream = tuple(None if dy is None else dy.to(device()) for dy in given.upstream)
    seen |= observe(
        built,
        upstream if len(upstream) > 1 else upstream[0],
        inputs={name: value.to(device()) for name, value in {"x": given.x, **given.more}.items()},
        parameters={weight.letter: parameters[name] for name, weight in layer.weights.items()},
        any_size=layer.any_size,
    )
    if outs and outs[0]() is not None:
        gc.collect()  # a cycle may have kept it
        if outs[0]() is not None:
            seen[NO_LEAK] = Claim("the output of the first call is still in memory after later calls")
    if layer.odd and case.twin is None:
        with called_as(f"{layer.of}{layer.odd}, with an odd size along the dimension that isn't split"):
            build(*layer.odd)
    return seen


def _loaded(full: Mapping[str, Tensor], parameters: Mapping[str, Any], group: Any) -> dict[str, Tensor]:
    """Return this rank's shards of full weights, for those parameters that say how they're split."""
    marks = {name: getattr(parameters[name], "tensor_parallel", None) for name in full}
    rank, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    return {
        name: shard(full[name], mark.dim, rank, size, stride=mark.stride)
        for name, mark in marks.items()
        if isinstance(mark, Sharding)
    }


def _state(layer: Layer, case: Built, parameters: Mapping[str, Any]) -> Observed:
    """Return the statements about the parameters of a layer that was just built."""
    marks, sizes, values = [], [], []
    for name, weight in layer.present(case).items():
        parameter = parameters[name]
        mark, kept = getattr(parameter, "tensor_parallel", None), parameter.untyped_storage().nbytes()
        needed = parameter.numel() * parameter.element_size()
        marks += [f"{name}.tensor_parallel is {mark}"] * (mark != case.mark(weight.split))
        sizes += [f"{name} keeps {kept} bytes alive but needs only {needed}"] * (kept > needed)
        values += [name] * (name.endswith("bias") and bool(parameter.detach().any()))
    of_others = any("." in name for name in layer.weights)  # the layers that it consists of decide how they start
    zero = {} if of_others else {ZERO: Claim(f"{', '.join(values)} doesn't" if values else "")}
    return {MARKED: Claim("; ".join(marks)), OWN_SHARDS: Claim("; ".join(sizes)), **zero}


def _parameter(module: nn.Module, name: str) -> Any:
    try:
        return attrgetter(name)(module)
    except AttributeError:
        return None


def _shape(tensor: Any) -> str:
    return str(list(tensor.shape)) if isinstance(tensor, Tensor) else str(tensor)
