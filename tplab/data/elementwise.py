"""Chapter 14: can an optimizer update shards? We try it out on small tensors.

A rank that has only a part of a matrix can update it if the optimizer is elementwise, which means that a weight's new
value depends on the weight itself, its own gradients, and no other element. SGD, Adam, AdamW and most others are
elementwise. Adafactor, Muon, LAMB and LARS aren't: they use means over rows, products of full matrices, or norms.
Such an optimizer doesn't fail on shards. It computes the norm of the shard, so the result depends on the number of
ranks. Some optimizers, such as Prodigy, even derive one step size from all parameters, so they can't be divided over
pipeline stages either.

Anyone can write an optimizer, so a list of names can't tell. Instead, we run a few steps on small tensors, and again on
their parts, with one optimizer per part, as two ranks would:

    full      [m, n]      -> steps -> split into parts -+
    part 0    [m/2, n]    -> steps ---------------------+- equal, except for rounding?
    part 1    [m/2, n]    -> steps ---------------------+
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes  # so that memory meters don't count the trial

from tplab.tensor.sharding import Sharding

STEPS = 3
LARGEST = 32  # the longest side that a small tensor takes from its parameter
LR = 0.1  # instead of the real one, which may be 0 at the beginning of a schedule
TOLERANCE = 1e-3  # relative to the largest change of a weight; rounding makes much less
ROUNDING = 1e-6  # of weights around 1 in float32

Groups = Sequence[Mapping[str, Any]]
Tensors = list[Tensor]
Split = Callable[[list[nn.Parameter], Tensors], tuple[Tensors, Tensors]]


def check_flat_shards(optimizer_class: Callable[..., Optimizer], groups: Groups, defaults: Mapping[str, Any]) -> None:
    """Raise ValueError unless an optimizer works on shards of a flat vector, as in ZeRO.

    groups      the param groups, whose "params" are lists of the model's parameters
    defaults    the optimizer's options

    The trial changes neither these parameters nor torch's random state. If it fails, the optimizer is refused. If you
    know that an optimizer is elementwise although the trial can't show it, because it adds noise, for example, set
    `elementwise = True` on the `optimizer_class`, and it is accepted.
    """

    def split(_: list[nn.Parameter], tensors: Tensors) -> tuple[Tensors, Tensors]:
        vector = torch.cat([tensor.reshape(len(tensor), -1) for tensor in tensors], 1)
        border = -(-vector.shape[1] // 3)  # inside of a tensor
        return [vector[:, :border]], [vector[:, border:]]

    _check(optimizer_class, groups, defaults, split, "ZeRO splits parameters as parts of flat vectors", "zero=0")


def check_mesh_shards(
    optimizer_class: Callable[..., Optimizer], groups: Groups, defaults: Mapping[str, Any], mesh: DeviceMesh | None
) -> None:
    """Raise ValueError unless an optimizer works on the shards and the pipeline stages of a mesh.

    The arguments and the exception are as in `check_flat_shards`. If there is one stage, and no trained parameter is
    sharded, every optimizer is accepted.
    """

    def halves(parameters: list[nn.Parameter], tensors: Tensors) -> tuple[Tensors, Tensors]:
        dims = [_sharded_dim(parameter) for parameter in parameters]
        pairs = [(t, t) if dim is None else t.chunk(2, 1 + dim) for t, dim in zip(tensors, dims, strict=True)]
        return [first for first, _ in pairs], [second for _, second in pairs]

    def stages(_: list[nn.Parameter], tensors: Tensors) -> tuple[Tensors, Tensors]:
        return tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]

    sizes = {} if mesh is None else dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    sharded = [p for group in groups for p in group["params"] if p.requires_grad and _sharded_dim(p) is not None]
    if (tp := sizes.get("tp", 1)) > 1 and sharded:
        such_as = f"{len(sharded)} of these parameters, such as the one that is {list(sharded[0].shape)} on this rank"
        _check(
            optimizer_class, groups, defaults, halves, f"tensor parallelism over {tp} ranks splits {such_as}", "tp=1"
        )
    if (pp := sizes.get("pp", 1)) > 1:
        _check(optimizer_class, groups, defaults, stages, f"each of {pp} stages has an optimizer of its own", "pp=1")


def _check(
    optimizer_class: Callable[..., Optimizer],
    groups: Groups,
    defaults: Mapping[str, Any],
    split: Split,
    why: str,
    otherwise: str,
) -> None:
    """Compare how the optimizer updates small tensors with how it updates the pieces that `split` makes of them."""
    kinds = [_kinds(group["params"]) for group in groups]
    if getattr(optimizer_class, "elementwise", False) or not any(kinds):
        return

    def make(weights: list[list[nn.Parameter]]) -> Optimizer:
        return optimizer_class([{**g, "params": own} for g, own in zip(groups, weights, strict=True)], **defaults)

    def parts(data: list[Tensors]) -> list[list[Tensors]]:
        pairs = [split(*of_group) if of_group[0] else ([], []) for of_group in zip(kinds, data, strict=True)]
        return [[pair[rank] for pair in pairs] for rank in (0, 1)]

    generator = torch.Generator().manual_seed(0)
    data = [[_random(parameter, generator) for parameter in of_group] for of_group in kinds]
    name = type(make(_weights(data))).__name__  # raises the optimizer's own error if an option is wrong
    advice = (
        f"Use an optimizer that updates each element independently, such as SGD, Adam or AdamW, or train with "
        f"{otherwise}. If you know that {name} gives correct results on a shard of a matrix, set `elementwise = True` "
        "on the optimizer_class"
    )
    try:
        with _disable_current_modes(), torch.random.fork_rng([p.device for p in chain(*kinds) if p.is_cuda]):
            expected = parts(_changes(make, data))
            found = [_changes(make, part) for part in parts(data)]
    except Exception as error:
        raise ValueError(
            f"{why}, so {name} has to update each element independently. Trying this with small tensors failed with "
            f"{type(error).__name__}: {error}. {advice}"
        ) from error
    pairs = [(a, b) for rank in (0, 1) for a, b in zip(chain(*expected[rank]), chain(*found[rank]), strict=True)]
    allowed = [TOLERANCE * float(a.abs().amax()) + ROUNDING for a, _ in pairs if a.numel()]
    differences = [float((a - b).abs().amax()) for a, b in pairs if a.numel()]
    if not all(difference <= limit for difference, limit in zip(differences, allowed, strict=True)):  # NaN fails, too
        raise ValueError(
            f"{why}, but {name} doesn't update each element independently. On parts of small tensors, its updates "
            f"differ by up to {max(differences):.2g} from those on the full tensors, so the result would depend on how "
            f"the parameters are split. {advice}"
        )


def _kinds(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return a trained parameter of each small shape, three times, so that even a part of scalars has several."""
    kinds = {(_small_shape(p), _sharded_dim(p)): p for p in parameters if p.requires_grad}
    return 3 * list(kinds.values())


def _small_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    sides = [min(max(side, 1), LARGEST) for side in parameter.shape]
    if (dim := _sharded_dim(parameter)) is not None:
        sides[dim] *= 2
    return tuple(sides)


def _sharded_dim(parameter: nn.Parameter) -> int | None:
    """Return the dimension along which a parameter is sharded, or None if this rank has all of it."""
    sharding: Sharding | None = getattr(parameter, "tensor_parallel", None)
    return None if sharding is None or (sharding.ranks and len(sharding.ranks) == 1) else sharding.dim


def _random(parameter: nn.Parameter, generator: torch.Generator) -> Tensor:
    """Return a small tensor and its gradients, [1 + STEPS, *shape], which are larger toward the end of each dimension.

    So no two parts have the same norm. The dtype is float32, even if the parameter's is too coarse to show differences.
    """
    shape = _small_shape(parameter)
    values = torch.randn(1 + STEPS, *shape, generator=generator)
    for dim, side in enumerate(shape, 1):
        values *= torch.linspace(0.1, 1, side).view(side, *[1] * (len(shape) - dim))
    return values.to(parameter.device)


def _weights(data: list[Tensors]) -> list[list[nn.Parameter]]:
    return [[nn.Parameter(t[0].clone(memory_format=torch.contiguous_format)) for t in of_group] for of_group in data]


def _changes(make: Callable[[list[list[nn.Parameter]]], Optimizer], data: list[Tensors]) -> list[Tensors]:
    """Train the weights in `data` with the gradients in it. Returns [1, *shape], how much each weight has changed."""
    weights = _weights(data)
    optimizer = make(weights)
    if set(chain(*(group["params"] for group in optimizer.param_groups))) != set(chain(*weights)):
        raise ValueError("it has other parameters than it was given")
    for group in optimizer.param_groups:
        if isinstance(lr := group.get("lr"), Tensor):
            group["lr"] = torch.full_like(lr, LR)
        elif lr is not None:
            group["lr"] = LR
    for step in range(1, 1 + STEPS):
        for weight, values in zip(chain(*weights), chain(*data), strict=True):
            weight.grad = values[step].clone(memory_format=torch.contiguous_format)
        optimizer.step()
    changes = [
        [weight.detach() - values[:1] for weight, values in zip(*of_group, strict=True)]
        for of_group in zip(weights, data, strict=True)
    ]
    if not any(change.abs().amax() > 100 * ROUNDING for change in chain(*changes) if change.numel()):
        raise ValueError(f"{STEPS} steps changed no weight")
    return changes
