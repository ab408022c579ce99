"""A case: one thing done twice, by parallel layers and by plain torch, and how far apart the results are."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.reference import random
from tplab import device
from tplab.tensor.full_state import full_state_dict, load_full_state_dict

Tensors = dict[str, Tensor]
SINGLE, HALF, DOUBLE = torch.float32, torch.bfloat16, torch.float64
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Place:
    """Where a case runs. Its random numbers are the same everywhere, rounded to the place's dtype."""

    device: torch.device
    dtype: torch.dtype

    def random(self, shape: tuple[int, ...], *key: object) -> Tensor:
        return random(shape, *key, dtype=self.dtype).to(self.device)

    def integers(self, high: int, shape: tuple[int, ...], seed: int) -> Tensor:
        return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed)).to(self.device)

    @property
    def options(self) -> dict[str, Any]:
        return {"device": self.device, "dtype": self.dtype}


@dataclass(frozen=True)
class Case:
    """parallel and plain: place -> tensors with the same names and shapes, the same on every rank.

    messages    it sends from rank to rank, which gloo can't do with a tensor of a GPU
    draws       it draws numbers on the device, and so has others on a GPU than on the CPU
    rounds      the coarsest dtype that it computes in whatever comes in, if that is known
    dtypes      that it runs in
    """

    parallel: Callable[[Place], Tensors]
    plain: Callable[[Place], Tensors]
    messages: bool = False
    draws: bool = False
    rounds: torch.dtype | None = None
    dtypes: tuple[torch.dtype, ...] = (DOUBLE, SINGLE, HALF)


@dataclass(frozen=True)
class Difference:
    """How far a result of the parallel program is from plain torch: the largest error over the largest number.

    alike    from plain torch on the same device, in the same dtype
    exact    from plain torch in float64 on the CPU (None: that draws other numbers)
    plain    of plain torch on the same device, from plain torch in float64 on the CPU
    """

    alike: float
    exact: float | None
    plain: float | None
    device: str
    dtype: torch.dtype

    def problem(self) -> str | None:
        """What is wrong with it, if anything."""
        if self.dtype == HALF and self.exact is not None and self.plain is not None:
            # rounding depends on the order of sums: the parallel program may be as far from the truth as plain torch
            bound = max(3 * self.plain, 0.02)
            return None if self.exact <= bound else f"{self.exact:.1e} from float64, plain torch {self.plain:.1e}"
        bound = {DOUBLE: 1e-9, SINGLE: 1e-4, HALF: 0.05}[self.dtype]
        values = {f"plain torch on {self.device}": self.alike, "float64 on the CPU": self.exact}
        far = [f"{value:.1e} from {name}" for name, value in values.items() if value is not None and value > bound]
        return ", ".join(far) or None


def differences(case: Case, dtype: torch.dtype) -> dict[str, Difference]:
    """On every rank: run the case in this dtype, on this rank's device."""
    place = Place(device(), dtype)
    found, alike = case.parallel(place), case.plain(place)
    exact = alike if case.draws else case.plain(Place(CPU, DOUBLE))
    if not found.keys() == alike.keys() == exact.keys():
        raise ValueError(f"the parallel program gives {sorted(found)}, plain torch {sorted(alike)}")
    for name, tensor in found.items():
        if tensor.device != place.device:
            raise ValueError(f"{name} is on {tensor.device}, not on {place.device}")
    return {
        name: Difference(
            apart(found[name], alike[name]),
            None if case.draws else apart(found[name], exact[name]),
            None if case.draws else apart(alike[name], exact[name]),
            str(place.device),
            max(dtype, case.rounds or dtype, key=lambda one: torch.finfo(one).eps),
        )
        for name in found
    }


def apart(found: Tensor, expected: Tensor) -> float:
    """The largest difference, over the largest expected number (or 1e-3, if that is larger). NaN becomes infinite."""
    if found.shape != expected.shape:
        return math.inf
    found, expected = (tensor.detach().to(CPU, DOUBLE) for tensor in (found, expected))
    if not found.numel():
        return 0.0
    error = float((found - expected).abs().max()) / max(float(expected.abs().max()), 1e-3)
    return error if error == error else math.inf


# A layer: output, and the gradients of all that goes in


def layer(
    shapes: Mapping[str, tuple[int, ...]],
    inputs: Mapping[str, tuple[int, ...]],
    make: Callable[[Place], nn.Module],
    plain: Callable[..., Tensor],
    *,
    call: Callable[..., Tensor] | None = None,
    finish: Callable[[nn.Module], None] | None = None,
    ids: Mapping[str, tuple[int, tuple[int, ...]]] | None = None,
    **options: Any,
) -> Case:
    """The case of a layer with whole weights of these `shapes`, called with random numbers of the shapes of `inputs`.

    make      the parallel layer; its weights are put in by `load_full_state_dict`
    plain     (weights, *inputs, *ids) -> what it should give, whole
    call      (module, *inputs, *ids) -> what it gives, whole; None: calls it
    finish    what is to be done after backward
    ids       integers that go in after the numbers: how many there are to choose from, and their shape
    """

    def values(place: Place) -> tuple[Tensors, list[Tensor], list[Tensor]]:
        weights = {name: place.random(shape, "weight", name) / math.sqrt(shape[-1]) for name, shape in shapes.items()}
        numbers = [place.random(shape, "input", name).requires_grad_() for name, shape in inputs.items()]
        whole = [place.integers(high, shape, seed) for seed, (high, shape) in enumerate((ids or {}).values())]
        return weights, numbers, whole

    def gradients(out: Tensor, numbers: list[Tensor], place: Place) -> Tensors:
        dy = place.random(tuple(out.shape), "dy").to(out.dtype)
        (out * dy).sum().backward()
        result = {f"d {name}": x.grad for name, x in zip(inputs, numbers, strict=True) if x.grad is not None}
        return {"out": out, **result}

    def parallel(place: Place) -> Tensors:
        weights, numbers, whole = values(place)
        module = make(place)
        group = getattr(module, "group", None)
        load_full_state_dict(module, weights, group)
        out = call(module, *numbers, *whole) if call else module(*numbers, *whole)
        result = gradients(out, numbers, place)
        if finish:
            finish(module)
        return result | whole_gradients(module)

    def by_plain_torch(place: Place) -> Tensors:
        weights, numbers, whole = values(place)
        for weight in weights.values():
            weight.requires_grad_()
        result = gradients(plain(weights, *numbers, *whole), numbers, place)
        return result | {f"d {name}": weight.grad for name, weight in weights.items() if weight.grad is not None}

    return Case(parallel, by_plain_torch, **options)


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def random_weights(module: nn.Module, place: Place, divisor: int) -> Tensors:
    """Weights for a module, which may be on device "meta"."""
    return {name: place.random(shape, name) / divisor for name, shape in shapes_of(module).items()}


def of_weights(module: nn.Module) -> Callable[..., Tensor]:
    """A module, which may be on device "meta", as a function of its weights and its inputs."""
    return lambda weights, *inputs: torch.func.functional_call(module, weights, inputs)


@torch.no_grad()
def whole_gradients(module: nn.Module) -> Tensors:
    """The gradients of the whole weights, gathered as the weights are. The weights are gone afterwards."""
    for parameter in module.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    return {f"d {name}": gradient for name, gradient in full_state_dict(module).items()}
