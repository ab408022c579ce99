"""Find tensors that the learner's code creates on the default device instead of on its input's device.

On a machine without a GPU, the default device and the input's device are both the CPU, so nothing goes wrong. On a
machine with a GPU, `torch.zeros(3)` is still on the CPU, and the first operator that combines this tensor with a GPU
tensor raises an error. `DefaultDevice` detects this mistake on any machine. While the mode is active, it marks every
tensor that the learner's code creates without `device=` or explicitly places on "cpu". The mode also marks views of
marked tensors, and results of operators whose inputs are all marked. On a machine with a GPU, a marked tensor would
still be on the CPU, while any other tensor would be on the GPU.

    with DefaultDevice() as watch:
        out = function(x)
    watch.claims({"out": out})        # an observation that says what would go wrong with a GPU, or nothing
"""

import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from tplab.course.checks.observation import Claim
from tplab.course.feedback.verdict import names
from tplab.runtime import naming

_MAKES = {
    getattr(torch, name)
    for name in (
        *("empty", "zeros", "ones", "full", "arange", "linspace", "eye", "rand", "randn", "randint", "randperm"),
        *("tensor", "as_tensor", "empty_strided"),
    )
}
# These functions create a tensor on the device of another tensor, unless they're passed a device
_MAKES_LIKE = {
    *(getattr(torch, f"{name}_like") for name in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")),
    *(getattr(Tensor, f"new_{name}") for name in ("empty", "empty_strided", "zeros", "ones", "full", "tensor")),
}
# Matches the names of the torch functions that send Python objects or create a process group
_OF_OBJECTS = re.compile("object|new_group")
_MOVES = (Tensor.to, Tensor.cpu)
# These operators accept tensors on different devices. For example, an index may be on the CPU
_MAY_MIX = {Tensor.copy_, Tensor.to, Tensor.type_as, Tensor.__getitem__, Tensor.__setitem__, Tensor.index_put_}


MADE_THERE = "every tensor is created on the same device as the input"


class DefaultDevice(TorchFunctionMode):
    """A torch function mode that marks every tensor that the learner's code creates on the default device.

    `mixed` describes the first operator that combined marked tensors with unmarked tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mixed = ""
        self._marked: dict[int, torch.UntypedStorage] = {}  # keeps each storage alive, so that no address is reused

    def __enter__(self) -> Self:
        """Start watching. The mode is also active in the backward pass, where torch would otherwise disable it."""
        self._run_backward = run_backward = torch.autograd._engine_run_backward

        def watched(*args: Any, **kwargs: Any) -> Any:
            super(DefaultDevice, self).__enter__()
            try:
                return run_backward(*args, **kwargs)
            finally:
                super(DefaultDevice, self).__exit__(None, None, None)

        torch.autograd._engine_run_backward = watched
        self._showwarning, warnings.showwarning = warnings.showwarning, self._at_callers_line
        super().__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        torch.autograd._engine_run_backward = self._run_backward
        warnings.showwarning = self._showwarning
        super().__exit__(*failure)

    def _at_callers_line(
        self, message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None,
        line: str | None = None,
    ) -> None:  # fmt: skip
        """Show a warning. If an operator raised it, name the line that called the operator, and not a line in here."""
        frame: FrameType | None = sys._getframe()
        while filename == __file__ and frame and frame.f_code is not DefaultDevice.__torch_function__.__code__:
            frame = frame.f_back
        if filename == __file__ and frame and frame.f_back:
            filename, lineno = frame.f_back.f_code.co_filename, frame.f_back.f_lineno
        self._showwarning(message, category, filename, lineno, file, line)

    def claims(self, results: Mapping[str, Any]) -> dict[str, Claim]:
        """Return a dictionary with a `Claim` that describes what would go wrong on a machine with a GPU.

        A result that would stay on the CPU also counts as a problem. Without a problem, the dictionary is empty.
        """
        left = [name for name, value in results.items() if any(map(self.is_marked, tree_leaves(value)))]
        problem = self.mixed or (f"on a machine with a GPU, {names(left)} would be on the CPU" if left else "")
        return {MADE_THERE: Claim(problem)} if problem else {}

    def is_marked(self, value: Any) -> bool:
        return _is_plain(value) and value.device.type == "cpu" and value.untyped_storage().data_ptr() in self._marked

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func in _MAKES:
            if kwargs.get("device") in (None, "cpu") and not any(isinstance(item, Tensor) for item in args):
                self._mark(out)
        elif func in _MAKES_LIKE and kwargs.get("device") is not None:
            if kwargs["device"] == "cpu":
                self._mark(out)
        elif func in _MOVES and isinstance(out, Tensor):
            return self._moved(func, args, kwargs, out)
        elif self._marked and func not in _MAY_MIX:
            self._follow(func, _tensors((*args, *kwargs.values())), out)
        return out

    def _mark(self, out: Any) -> None:
        for tensor in tree_leaves(out):
            if _is_plain(tensor) and tensor.device.type == "cpu" and tensor.numel():
                storage = tensor.untyped_storage()
                self._marked[storage.data_ptr()] = storage

    def _moved(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tensor:
        """Return the result of a call to `to` or `cpu`, marked as a CPU tensor if the call explicitly asks for "cpu".

        If a call asks for another device, its result isn't marked. If a call doesn't specify a device, the result is
        marked only if the original tensor is. If the two tensors share memory but only one of them should be marked,
        copy the result first.
        """
        asked = [each for each in (*args[1:], *kwargs.values()) if isinstance(each, (str, torch.device, Tensor))]
        to_cpu = func is Tensor.cpu or any(isinstance(each, str) and each == "cpu" for each in asked)
        if not asked and not to_cpu:
            self._follow(func, _tensors(args[:1]), out)
            return out
        if self.is_marked(out) != to_cpu:
            out = out.clone()
            if to_cpu:
                self._mark(out)
        return out

    def _follow(self, func: Any, given: Iterable[Tensor], out: Any) -> None:
        tensors = [tensor for tensor in given if tensor.dim() > 0 and tensor.numel()]
        marked = [self.is_marked(tensor) for tensor in tensors]
        if not any(marked):
            return
        if all(marked):
            self._mark(out)
        elif not self.mixed and not _inside_torch():
            name = getattr(func, "__name__", str(func))
            shapes = [[list(t.shape) for t, is_marked in zip(tensors, marked, strict=True) if is_marked == on_cpu]
                      for on_cpu in (True, False)]  # fmt: skip
            self.mixed = (
                f"on a machine with a GPU, {name} would get a tensor of shape {shapes[0][0]} on the CPU and a tensor "
                f"of shape {shapes[1][0]} on the GPU"
            )


# Collectives go through this method, too, but error reports should name the line in the learner's code
naming.hide(DefaultDevice.__torch_function__.__code__)


def _inside_torch() -> bool:
    """Return True if torch called this operator while sending Python objects or creating a process group.

    In both situations, torch creates small tensors that the learner's code never sees.
    """
    frame: FrameType | None = sys._getframe()
    while frame and not ("distributed_c10d" in frame.f_code.co_filename and _OF_OBJECTS.search(frame.f_code.co_name)):
        frame = frame.f_back
    return frame is not None


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among an operator's arguments, also in lists. This is called for every operator."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _is_plain(value: Any) -> bool:
    """Return whether this is a tensor with memory of its own, and not a wrapper from a functional collective."""
    return type(value) in (Tensor, nn.Parameter)
