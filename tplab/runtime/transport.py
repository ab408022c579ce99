"""Pass functions, tensors and containers by value from one process to another, and name what can't be passed.

A function from a notebook or from `__main__` is sent as code (with cloudpickle), and a function from a module by name.
Code keeps the name of its file, because reports and tracebacks cite the line.
A function wrapped in `functools.cache` is sent the same way, without its cached results. A tensor is sent as raw bytes.
It arrives with newly allocated storage and the same dtype, shape, requires_grad and attributes. A tensor with an
autograd graph arrives detached, because the graph isn't sent.
"""

import functools
import importlib
import inspect
import io
import mmap
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

# torch creates this module without registering it. Without this line, cloudpickle would mistake it for one of the
# notebook's own modules and pickle its contents, because `torch.autograd.function.once_differentiable` refers to it.
sys.modules.setdefault("torch._C._functions", torch._C._functions)


def dumps(value: object) -> memoryview:
    """Serialize `value` to bytes. Raises the pickler's error if a part of `value` can't be sent."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(value)
    return buffer.getbuffer()


def pack_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> memoryview:
    """Serialize a call to bytes. Raises TypeError with the name of the part that can't be sent."""
    try:
        return dumps((fn, args, kwargs))
    except Exception as error:
        parts = [*_variables_of(fn), ("the function", fn)]
        parts += [(f"args[{index}]", part) for index, part in enumerate(args)]
        parts += [(f"kwargs[{name!r}]", part) for name, part in kwargs.items()]
        name, part = next(((name, part) for name, part in parts if not can_be_sent(part)), ("args", args))
        raise TypeError(
            f"{name}, of type {type(part).__name__}, can't be sent to the ranks: {error}. "
            "Create it inside the function, on every rank."
        ) from None


def _variables_of(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield the variables and default values that a function uses, each with its name."""
    if isinstance(function, FunctionType):
        of = f"of {function.__name__}" if function.__name__ != "<lambda>" else "of the lambda"
        with suppress(ValueError):  # a variable hasn't been assigned yet
            found = inspect.getclosurevars(function)
            for name, value in {**found.globals, **found.nonlocals}.items():
                yield f"the variable {name} that the body {of} uses", value
        for part in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            yield f"a default value {of}", part


def can_be_sent(value: object) -> bool:
    try:
        dumps(value)
    except Exception:
        return False
    return True


def loads(data: bytes | memoryview, device: torch.device | None = None) -> Any:
    """Deserialize a value. Tensors arrive on the CPU, except that those from a GPU arrive on `device` if it's given."""
    global _gpu
    _gpu = device
    try:
        return pickle.loads(data)
    finally:
        _gpu = None


_gpu: torch.device | None = None


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if (
            type(obj) in (Tensor, nn.Parameter)
            and obj.layout is torch.strided
            and not (obj.is_quantized or obj.is_meta)
        ):
            return _reduce_tensor(obj)
        if isinstance(obj, CodeType):  # cloudpickle 3.1.3 leaves out the name of the file
            create, described = self.dispatch_table[CodeType](obj)
            return _rebuild_code, (obj.co_filename, create, described)
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType and sys.modules.get(obj.__name__) is obj:
            return importlib.import_module, (obj.__name__,)  # for example, torch.distributed.config has its own class
        if isinstance(obj, functools._lru_cache_wrapper) and not _has_a_name(obj):
            return functools.lru_cache(**obj.cache_parameters()), (obj.__wrapped__,)
        return super().reducer_override(obj)


def _has_a_name(function: Any) -> bool:
    """Return True if the other process can import the function by its name."""
    module = sys.modules.get(function.__module__)
    return function.__module__ != "__main__" and getattr(module, function.__qualname__, None) is function


def _rebuild_code(file: str, create: Callable[..., CodeType], described: tuple[Any, ...]) -> CodeType:
    return create(*described).replace(co_filename=file)


def _reduce_tensor(tensor: Tensor) -> tuple[Any, ...]:
    host = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    data = pickle.PickleBuffer(host.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    on_gpu = tensor.device.type != "cpu"
    requires_grad = tensor.requires_grad and tensor.is_leaf
    described = (data, host.dtype, tuple(host.shape), type(tensor) is nn.Parameter, requires_grad, on_gpu)
    if not tensor.__dict__:
        return _rebuild_tensor, described
    return _rebuild_tensor, described, dict(tensor.__dict__), None, None, _set_attributes


def _rebuild_tensor(
    data: bytes | bytearray,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    parameter: bool,
    requires_grad: bool,
    on_gpu: bool,
) -> Tensor:
    writable = data if isinstance(data, bytearray) else bytearray(data)
    tensor = torch.frombuffer(writable, dtype=dtype).reshape(shape) if writable else torch.empty(shape, dtype=dtype)
    if on_gpu and _gpu is not None:
        tensor = tensor.to(_gpu)
    return nn.Parameter(tensor, requires_grad) if parameter else tensor.requires_grad_(requires_grad)


def _set_attributes(tensor: Tensor, attributes: dict[str, Any]) -> None:
    tensor.__dict__.update(attributes)


# The file that tells the ranks what to run: | size of the settings | settings | function and arguments |

_SIZE_BYTES = 8


def write_setup(descriptor: int, given: dict[str, Any], call: memoryview) -> None:
    """Write the settings of the run, followed by the call, which may be larger than the 2 GiB of a single write."""
    settings = pickle.dumps(given)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(len(settings).to_bytes(_SIZE_BYTES, "little"))
        file.write(settings)
        file.write(call)


def read_setup(descriptor: int) -> tuple[dict[str, Any], memoryview]:
    """Return the settings and the call that `write_setup` wrote."""
    data = memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
    end = _SIZE_BYTES + int.from_bytes(data[:_SIZE_BYTES], "little")
    return pickle.loads(data[_SIZE_BYTES:end]), data[end:]
