"""Chapter 14: ZeRO 1 and 2, which shard the optimizer state and the gradients over the replicas.

With plain data parallelism, p ranks keep p identical copies of everything. ZeRO shards these over the same ranks:

                    weights   gradients   optimizer     bytes of Ψ parameters, Adam, mixed precision
    data parallel   full      full        full          2Ψ + 2Ψ + 12Ψ
    ZeRO-1          full      full        shard         2Ψ + 2Ψ + 12Ψ/p
    ZeRO-2          full      shard       shard         2Ψ + (2 + 12)Ψ/p
    ZeRO-3          shard     shard       shard         (2 + 2 + 12)Ψ/p

An optimizer that updates a shard of the weights needs only that shard of the summed gradients, so a reduce-scatter
replaces the all-reduce. An all-gather then gives all ranks the new weights. Together, they send 2Ψ, like the
all-reduce.

    gradients [p n] -> reduce-scatter -> shard [n] -> optimizer -> shard of W [n] -> all-gather -> W [p n]

ZeRO-1 reduces after backward. ZeRO-2 reduces each bucket as soon as it is full and frees the full gradients. With m
backward passes per step, that sends mΨ elements instead of Ψ. ZeRO-3, in `zero3`, gathers the weights in each forward
and backward pass and sends 3mΨ. (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models"; torch: ZeroRedundancyOptimizer, fully_shard; DeepSpeed; Megatron: the distributed optimizer.)
"""

import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed import ProcessGroup
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from tplab.common.taken_gradients import clear_taken, mark_taken, own_gradients
from tplab.data.flat_parameters import BUCKET_BYTES, Flat, Piece, in_buckets, start_alike
from tplab.memory.meter import optimizer_bytes, tensor_bytes
from tplab.runtime import record

Parameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]]

# torch's optimizers that compute a weight's new value from this weight, its own gradients and the number of steps, with
# every one of their options
ELEMENTWISE = (SGD, Adam, AdamW, Adagrad, RMSprop, Adadelta, Adamax, NAdam, RAdam, ASGD, Rprop)


def check_elementwise(
    optimizer_class: Callable[..., Optimizer], why: str = "with ZeRO, each rank updates only a shard of the parameters"
) -> None:
    """Raise ValueError unless an optimizer updates each element by itself, so that a rank can update only a part.

    Others, such as Adafactor, Muon and LAMB, use means over rows, products of full matrices, or norms. They don't fail
    on a shard, but their result depends on how the parameters are split. An optimizer is elementwise if it's one of
    `ELEMENTWISE`, or if its class itself has the attribute `elementwise = True`. A subclass doesn't inherit either,
    because it may have another `step`. A `functools.partial` of an optimizer counts as this optimizer.
    """
    while isinstance(optimizer_class, partial):
        optimizer_class = optimizer_class.func
    if optimizer_class in ELEMENTWISE or vars(optimizer_class).get("elementwise", False):
        return
    name = getattr(optimizer_class, "__name__", repr(optimizer_class))
    raise ValueError(
        f"{why}, so its optimizer has to update each element independently of all others. {name} isn't known to do "
        f"that. Use {', '.join(known.__name__ for known in ELEMENTWISE[:-1])} or {ELEMENTWISE[-1].__name__} of "
        f"torch.optim. If you know that {name} is elementwise, declare it with `elementwise = True` in its class"
    )


class Unit:
    """A set of parameters whose gradients are reduced together and whose weights are gathered together.

    weights     [p n], the flat vector that the parameters are views of
    shard       [n], this rank's shard of the weights, which is the parameter that the optimizer updates
    gradient    [n], this rank's shard of the reduced gradients, or None

    `reduce` only starts the reduction, so that backward can continue meanwhile. `wait` completes it.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        average: bool = True,
        group: ProcessGroup | None = None,
    ) -> None:
        self.flat, self.average = Flat(parameters, group), average
        self.parameters = self.flat.parameters
        self.weights = self.flat.flatten([parameter.detach() for parameter in parameters])
        for parameter, view in zip(self.parameters, self.flat.views(self.weights), strict=True):
            parameter.data = view
        self.shard = nn.Parameter(self.flat.shard(self.weights))
        own_gradients(self.parameters, "ZeRO")
        self.gradient: Tensor | None = None
        self._reducing: tuple[Tensor, Tensor, dist.Work | None] | None = None  # [n], [p n], and the pending work

    def has_gradients(self) -> bool:
        """Return True if there are full gradients that haven't been reduced yet."""
        return any(parameter.grad is not None for parameter in self.parameters)

    def reduce(self) -> None:
        """Start reducing the gradients across the ranks, and set `.grad` to None."""
        self.wait()
        whole = self.flat.flatten([parameter.grad for parameter in self.parameters])  # [p n]
        for parameter in self.parameters:
            parameter.grad = None
        mark_taken(self.parameters, "ZeRO has reduced it to shards: use zero.pieces(), or a TrainingStep for all of it")
        if self.average:
            whole /= self.flat.world_size
        part, work = self.flat.reduce_scatter(whole)  # [n]
        self._reducing = part, whole, work

    def wait(self) -> None:
        """Wait for the pending reduction, if any. Add this rank's shard to `gradient` and free the full gradients."""
        if self._reducing is None:
            return
        (part, _, work), self._reducing = self._reducing, None
        if work is not None:
            work.wait()
        self.gradient = part if self.gradient is None else self.gradient.add_(part)

    def before_step(self) -> None:
        """Give the optimizer this rank's shard of the gradient.

        Raises ValueError if a parameter has been replaced, cast or frozen since the unit was made.
        """
        self.check_unchanged()
        self.shard.grad = self.gradient

    def check_unchanged(self) -> None:
        storage = self.weights.untyped_storage()
        for parameter, shape in zip(self.parameters, self.flat.shapes, strict=True):
            moved = parameter.numel() and parameter.untyped_storage().data_ptr() != storage.data_ptr()
            if moved or not parameter.requires_grad:
                raise ValueError(
                    f"a parameter {list(shape)} was {'replaced or cast' if moved else 'frozen'} after ZeRO was made, "
                    "so its updates would go elsewhere. Cast and freeze before, and use copy_ to change weights"
                )

    def abandon(self) -> None:
        """Discard the gradients of an unfinished step."""
        self._reducing = self.gradient = self.shard.grad = None
        clear_taken(self.parameters)
        for parameter in self.parameters:
            parameter.grad = None

    def after_step(self) -> None:
        """All-gather the full weights from the updated shards."""
        self.flat.all_gather(self.shard, self.weights)


class ZeRO1:
    """Optimizer whose state is sharded over the ranks: `ZeRO1(model.parameters(), torch.optim.AdamW, lr=1e-3)`.

        loss.backward()
        zero.finish()           # reduces full gradients to shards; only needed if you read gradients, e.g. to clip
        zero.step()
        zero.zero_grad()

    parameters         as for torch's optimizers: parameters, or param groups with their own options
    optimizer_class    an optimizer that updates each element by itself, such as AdamW or SGD, but not Adafactor, Muon
                       or LAMB. Raises ValueError if it isn't known to be one (`check_elementwise`)
    bucket_bytes       the maximum number of bytes to reduce or gather in one call
    average            whether to average the ranks' gradients; if False, they are summed
    separate           a parameter that gets a bucket of its own, such as a pipeline's tied table. Both stages that have
                       the table then split it in the same way, so their gradients can be summed (`TrainingStep`)
    defaults           options for the optimizer

    The constructor copies rank 0's weights to all ranks, but not its buffers (see `flat_parameters.broadcast`).
    `optimizer` is an ordinary torch optimizer, so you can use schedulers with it. `FullOptimizer` saves and loads its
    state. In each step, all ranks must use the same parameters. An unused parameter gets a gradient of 0 if it shares a
    bucket with a used one.
    """

    def __init__(
        self,
        parameters: Parameters,
        optimizer_class: Callable[..., Optimizer],
        *,
        bucket_bytes: int = BUCKET_BYTES,
        average: bool = True,
        separate: nn.Parameter | None = None,
        group: ProcessGroup | None = None,
        **defaults: Any,
    ) -> None:
        self.units: list[Unit] = []
        self._order: list[tuple[str, int]] = []
        self.group_parameters: list[list[nn.Parameter]] = []
        groups: list[dict[str, Any]] = []
        check_elementwise(optimizer_class)
        for given in as_groups(parameters):
            own = given["params"]
            start_alike(((f"parameter {number}", parameter) for number, parameter in enumerate(own)), group)
            units = [Unit(bucket, average, group) for bucket in in_buckets(own, bucket_bytes, separate)]
            groups.append({**given, "params": [unit.shard for unit in units]})
            self.group_parameters.append(own)
            self.units += units
        self.optimizer = optimizer_class(groups, **defaults)

    def finish(self) -> None:
        """Reduce the gradients that haven't been reduced yet. All ranks must call it; calling it again does nothing.

        Raises ValueError if the ranks have used different parameters, or the same ones in a different order.
        """
        self._check_order()
        for unit in self.units:
            if unit.has_gradients():
                unit.reduce()
        for unit in self.units:
            unit.wait()

    @torch.no_grad()
    def step(self) -> None:
        """Update this rank's shards with the optimizer, and all-gather the new weights."""
        self.finish()
        for unit in self.units:
            unit.before_step()
        self.optimizer.step()
        for unit in self.units:
            unit.after_step()

    def zero_grad(self) -> None:
        for unit in self.units:
            unit.wait()
        self.abandon()

    def abandon(self) -> None:
        """Discard the gradients of an unfinished step, for example after an error in the backward pass."""
        self._order.clear()
        for unit in self.units:
            unit.abandon()

    def _check_order(self) -> None:
        """Raise ValueError unless all ranks gathered and reduced the same units, and have the same ones left."""
        left = [number for number, unit in enumerate(self.units) if unit.has_gradients()]
        if not self.units or self.units[0].flat.world_size == 1:
            return
        flat = self.units[0].flat
        checksum = zlib.crc32(repr((self._order, left)).encode())
        both = torch.tensor([checksum, -checksum], device=flat.device)
        with record(keep=False):
            dist.all_reduce(both, dist.ReduceOp.MAX, group=flat.group)
        self._order.clear()
        if int(both.sum()):
            raise ValueError(
                "the replicas used different layers in this step, or the same ones in a different order, so ZeRO has "
                "added gradients of different parameters. Use the same layers on all ranks, or DataParallel"
            )

    def pieces(self) -> list[Piece]:
        """Return this rank's reduced gradients, split at parameter boundaries."""
        return [piece for unit in self.units if unit.gradient is not None for piece in unit.flat.pieces(unit.gradient)]

    def memory(self) -> dict[str, int]:
        """Return the bytes currently used on this rank for weights, gradients, and all tensors of the optimizer."""
        gradients = chain.from_iterable([unit.gradient, *(w.grad for w in unit.parameters)] for unit in self.units)
        return {
            "weights": tensor_bytes(chain.from_iterable([unit.weights, unit.shard] for unit in self.units)),
            "gradients": tensor_bytes(gradient for gradient in gradients if gradient is not None),
            "optimizer": optimizer_bytes(self.optimizer),
        }


class ZeRO2(ZeRO1):
    """ZeRO 1 without unsharded gradients, because backward reduces and frees each bucket as soon as it is full.

    A bucket is sent while backward computes the next one, so at most two buckets of full gradients exist at a time.
    """

    def __init__(self, parameters: Parameters, optimizer_class: Callable[..., Optimizer], **options: Any) -> None:
        super().__init__(parameters, optimizer_class, **options)
        reduce_when_full(self.units, self._order)


def reduce_when_full(units: Sequence[Unit], order: list[tuple[str, int]]) -> None:
    """Register hooks that reduce each unit during backward, as soon as all its parameters have gradients.

    order    the list to which the number of each unit is appended when it is sent

    A unit is sent only after the previous unit's reduction is complete. At the end of backward, all of them are.
    """
    in_flight: list[Unit] = []

    def wait() -> None:
        while in_flight:
            in_flight.pop().wait()

    def reduce(unit: Unit) -> None:
        if in_flight:
            wait()
        else:  # no unit is in flight, so no wait() is queued for the rest of this backward
            Variable._execution_engine.queue_callback(wait)
        order.append(("reduce", units.index(unit)))
        unit.reduce()
        in_flight.append(unit)

    for unit in units:
        for parameter in unit.parameters:
            parameter.register_post_accumulate_grad_hook(partial(_gradient_is_there, unit, reduce))


def _gradient_is_there(unit: Unit, reduce: Callable[[Unit], None], parameter: nn.Parameter) -> None:
    if all(other.grad is not None for other in unit.parameters):
        reduce(unit)


def as_groups(parameters: Parameters) -> list[dict[str, Any]]:
    """Return param groups whose "params" are lists, read as torch's optimizers read them.

    Raises ValueError if a parameter is in several groups, or several times in one.
    """
    groups = Optimizer(parameters, {}).param_groups
    for group in groups:
        if (repeated := len(group["params"]) - len(set(group["params"]))) > 0:
            raise ValueError(f"{repeated} of {len(group['params'])} parameters are in their group more than once")
    return [{name: value for name, value in group.items() if name != "param_names"} for group in groups]
