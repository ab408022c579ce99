"""Chapter 14: ZeRO 1 and 2: replicas that don't all keep, and compute, the same.

With plain data parallelism p ranks keep p equal copies of everything. ZeRO cuts what is kept, over the same ranks:

                    weights   gradients   optimizer     bytes of Ψ parameters, Adam, mixed precision
    data parallel   whole     whole       whole         2Ψ + 2Ψ + 12Ψ
    ZeRO-1          whole     whole       shard         2Ψ + 2Ψ + 12Ψ/p
    ZeRO-2          whole     shard       shard         2Ψ + (2 + 12)Ψ/p
    ZeRO-3          shard     shard       shard         (2 + 2 + 12)Ψ/p

An optimizer that owns a shard of the weights needs only that shard of the summed gradients: a reduce-scatter in place
of the all-reduce. Its new weights go to all: an all-gather. Both together are what the all-reduce was, 2Ψ numbers.

    gradients [p n] -> reduce-scatter -> shard [n] -> optimizer -> shard of W [n] -> all-gather -> W [p n]

ZeRO-1 reduces after backward. ZeRO-2 does it for each bucket as soon as it is full, and frees the full gradients; with
m backwards per step, that is mΨ elements instead of Ψ. ZeRO-3 is in `zero3`, the formulas are in `zero_cost`.
(Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"; torch:
ZeroRedundancyOptimizer, fully_shard; DeepSpeed; Megatron: the distributed optimizer.)
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from tplab.data.flat_parameters import BUCKET_BYTES, Flat, Piece, broadcast, in_buckets
from tplab.memory.meter import optimizer_bytes, tensor_bytes

Parameters = Iterable[nn.Parameter] | Iterable[Mapping[str, Any]]


class Unit:
    """Some parameters whose gradients are reduced, and whose weights are gathered, together.

    weights     [p n], the memory that the parameters are views of
    shard       [n], this rank's part of them
    master      [n], what the optimizer sees: the shard, or a copy in `master_dtype`
    gradient    [n], this rank's part of the reduced gradients, once there are some
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        average: bool = True,
        master_dtype: torch.dtype | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        self.flat, self.average = Flat(parameters, group), average
        self.parameters = self.flat.parameters
        self.weights = self.flat.flatten([parameter.detach() for parameter in parameters])
        for parameter, view in zip(self.parameters, self.flat.views(self.weights), strict=True):
            parameter.data = view
        self.shard = self.flat.shard(self.weights)
        self.master = nn.Parameter(self.shard.to(master_dtype or self.flat.dtype))
        self.gradient: Tensor | None = None

    def has_gradients(self) -> bool:
        """Whether there are whole gradients that have not been reduced."""
        return any(parameter.grad is not None for parameter in self.parameters)

    def reduce(self) -> None:
        """Add the ranks' gradients up, keep this rank's part, and free the whole ones."""
        whole = self.flat.flatten([parameter.grad for parameter in self.parameters])  # [p n]
        for parameter in self.parameters:
            parameter.grad = None
        if self.average:
            whole /= self.flat.world_size
        part = self.flat.reduce_scatter(whole)  # [n]
        self.gradient = part if self.gradient is None else self.gradient.add_(part)

    def before_step(self) -> None:
        """Show the optimizer this rank's gradient, in the dtype of its weights."""
        self.master.grad = None if self.gradient is None else self.gradient.to(self.master.dtype)

    def after_step(self) -> None:
        """Take over what the optimizer made of the shard, and give all ranks the whole."""
        if self.master.dtype != self.shard.dtype:
            self.shard.copy_(self.master.detach())
            self.master.grad = None
        self.flat.all_gather(self.shard, self.weights)


class ZeRO1:
    """An optimizer whose state is shared by the ranks: `ZeRO1(model.parameters(), torch.optim.AdamW, lr=1e-3)`.

        loss.backward()
        zero.finish()           # whole gradients -> shards; only needed for what wants the gradients, such as clipping
        zero.step()
        zero.zero_grad()

    parameters         as torch's optimizers take them: parameters, or groups of them with options of their own
    optimizer_class    any that treats each number by itself: AdamW and SGD do, LAMB and Adafactor do not
    bucket_bytes       at most so much is reduced, or gathered, at once
    average            the mean of the ranks' gradients; False: the sum
    master_dtype       the optimizer works on a copy of its shard in this dtype: float32 for bfloat16 weights
    defaults           options of the optimizer

    The constructor gives all ranks the weights of rank 0, but not its buffers (see `flat_parameters.broadcast`).
    `optimizer` is an ordinary one, for schedulers too. Every rank has to use the same parameters; one that is not used,
    in a bucket with one that is, has a gradient of 0.
    """

    def __init__(
        self,
        parameters: Parameters,
        optimizer_class: type[Optimizer],
        *,
        bucket_bytes: int = BUCKET_BYTES,
        average: bool = True,
        master_dtype: torch.dtype | None = None,
        group: ProcessGroup | None = None,
        **defaults: Any,
    ) -> None:
        self.units: list[Unit] = []
        groups: list[dict[str, Any]] = []
        for given in _as_groups(parameters):
            own = list(given["params"])
            broadcast(own, group)
            units = [Unit(bucket, average, master_dtype, group) for bucket in in_buckets(own, bucket_bytes)]
            groups.append({**given, "params": [unit.master for unit in units]})
            self.units += units
        self.optimizer = optimizer_class(groups, **defaults)

    def finish(self) -> None:
        """Reduce what has not been reduced yet. Every rank takes part; a second call has nothing to do."""
        for unit in self.units:
            if unit.has_gradients():
                unit.reduce()

    @torch.no_grad()
    def step(self) -> None:
        """The optimizer's step on this rank's shards; then all ranks have the new weights."""
        self.finish()
        for unit in self.units:
            unit.before_step()
        self.optimizer.step()
        for unit in self.units:
            unit.after_step()

    def zero_grad(self) -> None:
        for unit in self.units:
            unit.gradient = unit.master.grad = None
            for parameter in unit.parameters:
                parameter.grad = None

    def pieces(self) -> list[Piece]:
        """This rank's part of the reduced gradients, by parameter."""
        return [piece for unit in self.units if unit.gradient is not None for piece in unit.flat.pieces(unit.gradient)]

    def memory(self) -> dict[str, int]:
        """Bytes that this rank holds now, of real tensors: weights, gradients, and all that the optimizer wants."""
        gradients = chain.from_iterable([unit.gradient, *(w.grad for w in unit.parameters)] for unit in self.units)
        masters = [unit.master for unit in self.units if unit.master.dtype != unit.shard.dtype]
        return {
            "weights": tensor_bytes(chain.from_iterable([unit.weights, unit.shard] for unit in self.units)),
            "gradients": tensor_bytes(gradient for gradient in gradients if gradient is not None),
            "optimizer": tensor_bytes(masters) + optimizer_bytes(self.optimizer),
        }


class ZeRO2(ZeRO1):
    """As ZeRO1, but no rank keeps whole gradients: in backward, a full bucket is reduced and freed at once."""

    def __init__(self, parameters: Parameters, optimizer_class: type[Optimizer], **options: Any) -> None:
        super().__init__(parameters, optimizer_class, **options)
        for unit in self.units:
            reduce_when_full(unit)


def reduce_when_full(unit: Unit) -> None:
    """Reduce a unit in backward, as soon as the gradients of all its parameters are there."""

    def gradient_is_there(parameter: nn.Parameter) -> None:
        if all(other.grad is not None for other in unit.parameters):
            unit.reduce()

    for parameter in unit.parameters:
        parameter.register_post_accumulate_grad_hook(gradient_is_there)


def _as_groups(parameters: Parameters) -> list[dict[str, Any]]:
    given: list[Any] = list(parameters)
    if given and isinstance(given[0], Mapping):
        return [dict(group) for group in given]
    return [{"params": given}]
