"""Chapter 00: measure real tensors' memory (weights, gradients, optimizer states, saved activations, live memory).

    parameter_bytes(model), optimizer_bytes(optimizer)          # gradients: tensor_bytes(p.grad for p in ..)
    with saved_for_backward(model) as kept: loss = model(x)     # kept.bytes: saved for the backward pass
    with MemoryMeter(capacity) as meter: ...                    # meter.live, meter.peak, a curve of every change

Tensors that share memory are counted once. The first three functions also work on device "meta", where tensors have
shapes but no memory, so you can measure a layer of GPT-3 on a laptop.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the total memory of the tensors in bytes. Memory that several tensors share is counted once."""
    storages = {_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def parameter_bytes(module: nn.Module) -> int:
    return tensor_bytes(module.parameters())


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of an optimizer's state. torch allocates it in the first step, so before that it is 0."""
    return tensor_bytes(leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, Tensor))


@dataclass
class Kept:
    """The memory that autograd saved.

    pieces: the (shape, dtype, bytes) of each storage, in the order in which they were saved
    """

    pieces: list[tuple[tuple[int, ...], torch.dtype, int]] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(size for _, _, size in self.pieces)


@contextmanager
def saved_for_backward(module: nn.Module | None = None) -> Iterator[Kept]:
    """Context manager that records what autograd saves for the backward pass, except the module's parameters."""
    parameters = {_key(parameter) for parameter in module.parameters()} if module else set()
    kept, seen = Kept(), {}

    def pack(tensor: Tensor) -> Tensor:
        if _key(tensor) not in parameters and _key(tensor) not in seen:
            seen[_key(tensor)] = tensor.untyped_storage()  # kept alive, so that its key isn't reused
            kept.pieces.append((tuple(tensor.shape), tensor.dtype, tensor.untyped_storage().nbytes()))
        return tensor

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield kept
    finally:
        seen.clear()


class MemoryMeter(TorchDispatchMode):
    """Context manager that tracks the memory of every tensor created inside the block until it's freed.

    live, peak: bytes in use now, and their maximum
    curve:      live bytes after every change
    marks:      (index in the curve, name) of each `mark(name)`
    capacity:   simulate a device with only this many bytes, which raises torch.OutOfMemoryError when they're used up

    It tracks tensors, but not the scratch memory of operations or memory that a GPU's allocator reserves.
    """

    def __init__(self, capacity: int | None = None) -> None:
        super().__init__()
        self.capacity = capacity
        self.live = self.peak = 0
        self.curve: list[int] = []
        self.marks: list[tuple[int, str]] = []
        self._sizes: dict[int, int] = {}

    def mark(self, name: str) -> None:
        """Name the phase that begins here, such as "forward", "backward" or "optimizer step"."""
        self.marks.append((len(self.curve), name))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # An output may share the memory of an input that was there before the block. But lift_fresh returns the tensor
        # that torch.tensor has just made.
        inputs = () if func is torch.ops.aten.lift_fresh.default else (args, kwargs)
        given = {_key(leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and _key(tensor) not in self._sizes and _key(tensor) not in given:
                self._born(tensor, str(func))
        return result

    def _born(self, tensor: Tensor, operation: str) -> None:
        key, size = _key(tensor), tensor.untyped_storage().nbytes()
        self._sizes[key] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        self.curve.append(self.live)
        weakref.finalize(tensor.untyped_storage(), self._gone, key).atexit = False
        if self.capacity is not None and self.live > self.capacity:
            raise torch.OutOfMemoryError(
                f"{operation} tried to allocate {size:,} bytes: {self.live - size:,} of {self.capacity:,} bytes are in "
                f"use, {max(0, self.capacity - self.live + size):,} are free"
            )

    def _gone(self, key: int) -> None:
        self.live -= self._sizes.pop(key)
        self.curve.append(self.live)


def _key(tensor: Tensor) -> int:
    """Return a number that identifies the tensor's memory until this memory is freed.

    Tensors that share memory have the same number.
    """
    return tensor.untyped_storage()._cdata
