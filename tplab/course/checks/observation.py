"""Record what a check observes on each rank: outputs, gradients, traffic, and changes to the caller's tensors.

Each observation has a name. For example, this program returns a dictionary with the keys "out", "dx", "dW", "db",
"forward traffic", "backward traffic" and "inputs unchanged":

    def program(layer_class, x, dy):                       # runs on every rank
        layer = layer_class(4, 6)
        return observe(layer, dy, inputs={"x": x}, parameters={"W": layer.weight, "b": layer.bias})
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tplab.course.checks.describe import Foreign
from tplab.course.checks.layouts import laid_out
from tplab.course.checks.recorded_traffic import Traffic, traffic
from tplab.course.feedback.tracebacks import VOTE_SHAPE
from tplab.runtime import record

Observed = dict[str, Any]
Seen = Sequence[Observed]  # what each rank observed

REQUIRES_GRAD = "requires_grad of "

_side_groups: dict[Any, Any] = {}  # one group per default group, because creating a group takes ten milliseconds


class Changed(tuple[str, ...]):
    """The names of the caller's tensors that the learner's code changed.

    Every check requires this tuple to be empty.
    """

    __slots__ = ()


class Claim(str):
    """The reason why a statement isn't true, or "" if it's true. The statement also serves as the observation's name.

        {"the shard has memory of its own": Claim("" if own else "it is a view of the full tensor")}

    Every check requires its claims to be empty. The name is phrased as a statement because a failed check's message
    lists the names of the correct observations after "Right:".
    """

    __slots__ = ()


class Snapshot:
    """A snapshot of some tensors, lists, and dictionaries, used later to tell whether any of the originals has changed.

    before = Snapshot(x=x, dy=dy, parts=parts)
    ...
    before.changed()          # Changed(("x",)) if x has new values,
                              # Changed(("parts",)) if the list `parts` contains other objects,
                              # Changed(("requires_grad of x",)) if x.requires_grad has changed
    """

    def __init__(self, **values: Tensor | list[Any] | dict[Any, Any] | None) -> None:
        self.tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        self.holders = {name: value for name, value in values.items() if isinstance(value, (list, dict))}
        self.held = {name: _identities(value) for name, value in self.holders.items()}
        self.before = {name: tensor.detach().clone() for name, tensor in self.tensors.items()}
        self.required = {name: tensor.requires_grad for name, tensor in self.tensors.items()}

    def changed(self) -> Changed:
        now = self.tensors.items()
        written = [name for name, tensor in now if not _same(tensor.detach(), self.before[name])]
        written += [name for name, value in self.holders.items() if _identities(value) != self.held[name]]
        flagged = [name for name, tensor in now if tensor.requires_grad != self.required[name]]
        return Changed([*written, *(f"{REQUIRES_GRAD}{name}" for name in flagged)])


def _identities(value: list[Any] | dict[Any, Any]) -> list[Any]:
    return [(key, id(item)) for key, item in (value.items() if isinstance(value, dict) else enumerate(value))]


def _same(now: Tensor, before: Tensor) -> bool:
    if now.shape != before.shape or now.dtype != before.dtype:
        return False
    return torch.equal(now, before) or bool(torch.allclose(now, before, rtol=0, atol=0, equal_nan=True))


@dataclass(frozen=True)
class NotRun:
    """Placeholder for an observation that the check couldn't make because an earlier step went wrong."""

    why: str


def observe(
    run: Callable[..., Any],
    upstream: Tensor | Sequence[Tensor | None] | None,
    *,
    inputs: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor | None] | None = None,
    any_size: int | None = None,
) -> Observed:
    """Run the forward and backward passes of the learner's code on this rank, and record everything a check compares.

    run:        the learner's code, called as run(*inputs.values()). Each input is a new leaf tensor, and floating-point
                inputs require gradients.
    upstream:   the gradient with respect to the output. `observe` preserves the gradient's memory layout (strided,
                expanded, ...). None stands for the gradient that out.sum().backward() passes to the output, which is an
                expanded tensor of ones. If the output is a tuple, pass one gradient per element, and None for each
                element that doesn't get a gradient.
    parameters: the parameters whose gradients `observe` records as "d" + name.
    any_size:   the dimension along which inputs may have any size, or None. One of the extra calls of `Extra.BETWEEN`
                has inputs that are twice as long along this dimension.

    Returns a dictionary with "out", "d<name>" for each input and parameter, "forward traffic", "backward traffic", and
    "inputs unchanged" (a `Changed` that also covers the parameters and the upstream gradient). Either all ranks run the
    backward pass or none do, so no rank waits for a rank that can't run it.
    """
    leaves = {name: _leaf(tensor) for name, tensor in inputs.items()}
    watched = {**leaves, **(parameters or {})}
    given = [upstream] if isinstance(upstream, Tensor) else list(upstream or ())
    gradient_names = ["the upstream gradient" + (f" {i}" if len(given) > 1 else "") for i in range(len(given))]
    snapshot = Snapshot(**watched, **dict(zip(gradient_names, given, strict=True)))
    own = {name: tensor for name, tensor in (parameters or {}).items() if tensor is not None}
    for tensor in watched.values():
        if tensor is not None:
            tensor.grad = None
    extra = _extra.get()
    if extra is Extra.BETWEEN:  # start with gradients of one, as if an earlier backward pass had left them behind
        for tensor in own.values():
            tensor.grad = torch.ones_like(tensor) if tensor.requires_grad else None
    agreement = side_group()
    if extra is Extra.BETWEEN:
        if any_size is not None:
            run(*(_twice_as_long(tensor, any_size) for tensor in leaves.values()))
        run(*map(_other_numbers, leaves.values()))
    evaluated = _evaluate(run, leaves) if extra is Extra.EVALUATION else None
    with record() as forward:
        out = run(*(leaf.view_as(leaf) if evaluated else leaf for leaf in leaves.values()))
    if extra is Extra.BETWEEN:
        run(*map(_other_numbers, leaves.values()))
        if any_size is not None:
            run(*(_twice_as_long(tensor, any_size) for tensor in leaves.values()))
    noted: Observed = {
        "out": portable(out) if evaluated is None else evaluated[0],
        "forward traffic": traffic(forward),
    }  # contains a copy of the output, because the backward pass may overwrite the original

    pairs, problem = _pairs(out, upstream)
    ways_back = [(output, gradient) for output, gradient in pairs if output.requires_grad]
    if not _all_agree(not problem, agreement):
        noted |= _not_run(watched, problem or "the output of another rank doesn't allow a backward pass")
    elif not _all_agree(bool(ways_back), agreement) and ways_back:
        noted |= _not_run(watched, "the output of another rank is cut off from autograd's graph")
    else:
        with record() as backward:
            if ways_back:
                torch.autograd.backward([output for output, _ in ways_back], [gradient for _, gradient in ways_back])
        noted["backward traffic"] = traffic(backward)
        added = {"d" + name: portable(_added(tensor)) for name, tensor in own.items()}
        noted |= {"d" + name: portable(None if tensor is None else tensor.grad) for name, tensor in watched.items()}
        noted |= added
    noted["inputs unchanged"] = Changed(dict.fromkeys([*(evaluated[1] if evaluated else ()), *snapshot.changed()]))
    return noted


def _added(parameter: Tensor) -> Tensor | None:
    """Return what the backward pass added to a parameter's gradient, or None if it added nothing."""
    if _extra.get() is not Extra.BETWEEN or parameter.grad is None:
        return parameter.grad
    difference = parameter.grad - 1
    return difference if difference.any() else None


class Extra(Enum):
    """Extra calls of the learner's code by `observe`.

    BETWEEN:    also call the code with other values, before and after the recorded forward pass
    EVALUATION: also call the code under no_grad, and return the output of that call as "out". The inputs of the
                recorded call require a gradient but aren't leaves, as if an earlier layer had computed them
    """

    NONE = 0
    BETWEEN = 1
    EVALUATION = 2


_extra: ContextVar[Extra] = ContextVar("_extra", default=Extra.NONE)


@contextmanager
def observing(extra: Extra) -> Iterator[None]:
    """Context manager that makes `observe` call the learner's code in this way."""
    token = _extra.set(extra)
    try:
        yield
    finally:
        _extra.reset(token)


def _evaluate(run: Callable[..., Any], leaves: Mapping[str, Tensor]) -> tuple[Any, Changed]:
    """Run the learner's code under no_grad on copies of the inputs.

    Return the output and the names of the inputs that the code changed.
    """
    copies = {name: _leaf(tensor).requires_grad_(False) for name, tensor in leaves.items()}
    snapshot = Snapshot(**copies)
    with torch.no_grad():
        out = run(*copies.values())
    return portable(out), snapshot.changed()


def _other_numbers(tensor: Tensor) -> Tensor:
    """Return a leaf tensor with the same shape, dtype and memory layout, but with different values.

    The new values don't come from a random number generator. Integer tensors and scalars keep their values.
    """
    other = _leaf(tensor)
    if tensor.is_floating_point() and tensor.dim():
        other.data.copy_(tensor.detach().flip(-1) * -0.75)
    return other


def _twice_as_long(tensor: Tensor, dim: int) -> Tensor:
    return _leaf(torch.cat([tensor.detach()] * 2, dim) if tensor.dim() else tensor)


def _not_run(watched: Mapping[str, Any], why: str) -> Observed:
    return {name: NotRun(why) for name in (*("d" + name for name in watched), "backward traffic")}


def portable(value: Any) -> Any:
    """Copy a value so that a rank can send it to the parent process. Unsupported values become `Foreign`."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(
        value, (Traffic, Changed, Claim, NotRun, Foreign, str, bytes, int, float, complex, bool, type(None), range)
    ):
        return value
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    if isinstance(value, Mapping):
        return {portable(key): portable(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return {portable(item) for item in value}
    if isinstance(value, (list, tuple)):
        items = [portable(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return Foreign(type(value).__name__)


def _leaf(tensor: Tensor) -> Tensor:
    """Return a new leaf tensor with the same values and strides."""
    leaf = tensor.detach()
    if not _overlaps(leaf):
        leaf = laid_out(leaf, leaf.stride())
    return leaf.requires_grad_(leaf.is_floating_point())


def _overlaps(tensor: Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _pairs(out: Any, upstream: Tensor | Sequence[Tensor | None] | None) -> tuple[list[tuple[Tensor, Tensor]], str]:
    """Return the (output, gradient) pairs for the backward pass, and "".

    If the backward pass can't run, return an empty list and a message that says why.
    """
    if isinstance(upstream, Sequence):
        if not isinstance(out, (tuple, list)) or len(out) != len(upstream):
            return [], f"the output isn't a tuple of {len(upstream)}"
        wanted = list(zip(out, upstream, strict=True))
    else:
        wanted = [(out, upstream)]
    pairs: list[tuple[Tensor, Tensor]] = []
    for output, gradient in wanted:
        if gradient is None and isinstance(upstream, Sequence):
            continue
        if not isinstance(output, Tensor):
            return [], "the output isn't a tensor"
        if gradient is None:
            gradient = torch.ones((), dtype=output.dtype, device=output.device).expand(output.shape)
        if output.shape != gradient.shape:
            shapes = list(output.shape), list(gradient.shape)
            return [], "the output has the shape {}, but its gradient has the shape {}".format(*shapes)
        pairs.append((output, gradient.to(output.dtype)))
    return pairs, ""


def side_group() -> Any:
    """Return a process group in which the ranks agree on how the check goes on, or None for a single rank.

    Because they use a separate process group, they don't interfere with the learner's collectives.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    world = dist.group.WORLD
    if world not in _side_groups:
        _side_groups[world] = dist.new_group()
    return _side_groups[world]


def same_memory(result: Any, given: Tensor) -> bool:
    """Return True if a result shares memory with the tensor `given`, because it's the same tensor or a view of it."""
    mine = result.untyped_storage().data_ptr() if isinstance(result, Tensor) else 0
    return mine == given.untyped_storage().data_ptr() != 0


def _all_agree(mine: bool, group: Any) -> bool:
    if group is None:
        return mine
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    votes = torch.full(VOTE_SHAPE, int(mine), dtype=torch.uint8, device=device)
    dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=group)
    return bool(votes.item())
