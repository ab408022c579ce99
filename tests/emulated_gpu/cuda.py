"""torch.cuda on emulated GPUs: devices, streams, events, random numbers and what a program may ask about a device."""

import contextlib
import functools
import os
import time
import warnings
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._device import _device_constructors

from tests.emulated_gpu.messages import Messages

MEMORY = 80 << 30
# The operators that draw random numbers, which have to come from the GPU's generator
RANDOM = (
    "normal_", "uniform_", "random_", "random_.from", "random_.to", "bernoulli_.float", "bernoulli_.Tensor",
    "exponential_", "multinomial", "native_dropout",
)  # fmt: skip


def install(extension: ModuleType, gpus: int, messages: Messages) -> None:
    """Replace the functions of torch.cuda in this process."""
    extension.set_device_count(gpus)
    _devices(extension, gpus)
    _streams(extension, messages)
    _memory(extension)
    _random_numbers(extension)
    _attention()


def _devices(extension: ModuleType, gpus: int) -> None:
    cuda: Any = torch.cuda
    state = SimpleNamespace(initialized=False)

    def initialize(*_: Any) -> None:
        state.initialized = cuda._initialized = True

    def set_device(device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        if index is None:
            return
        if index >= visible():
            raise RuntimeError(f"EMULATED GPU: invalid device ordinal {index}: there are {visible()}")
        initialize()
        extension.set_device(index)

    class device_context(contextlib.AbstractContextManager):  # noqa: N801 (stands for torch.cuda.device)
        def __init__(self, device: Any) -> None:
            self.index = device if isinstance(device, int) else torch.device(device).index

        def __enter__(self) -> None:
            self.before = extension.current_device()
            if self.index is not None:
                set_device(self.index)

        def __exit__(self, *_: Any) -> None:
            extension.set_device(self.before)

    properties = SimpleNamespace(
        name="emulated GPU", total_memory=MEMORY, major=9, minor=0, multi_processor_count=1, is_integrated=False
    )

    def visible() -> int:
        listed = os.environ.get("CUDA_VISIBLE_DEVICES")
        return gpus if listed is None else min(gpus, len([number for number in listed.split(",") if number.strip()]))

    cuda.is_available = lambda: visible() > 0
    cuda.device_count = cuda._device_count_nvml = visible
    cuda.init = cuda._lazy_init = initialize
    cuda.is_initialized = lambda: state.initialized
    cuda.set_device, cuda.device, cuda.current_device = set_device, device_context, extension.current_device
    cuda.get_device_name = lambda *_: properties.name
    cuda.get_device_capability = lambda *_: (properties.major, properties.minor)
    cuda.get_device_properties = lambda *_: properties
    cuda.can_device_access_peer = lambda one, other: True
    cuda.is_bf16_supported = lambda *_, **__: True
    cuda.is_current_stream_capturing = lambda: False
    cuda.nccl.version = lambda: (2, 27, 5)
    cuda.set_sync_debug_mode = lambda mode: None  # nothing notices that the CPU waits


def _streams(extension: ModuleType, messages: Messages) -> None:
    cuda: Any = torch.cuda

    class Event:
        """A mark: reached when all messages have arrived that the stream waits for when it is recorded."""

        def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
            self.at, self.awaited = 0.0, list[int]()

        def record(self, stream: Any = None) -> None:
            self.at, self.awaited = time.perf_counter(), messages.awaited()

        def query(self) -> bool:
            return all(map(messages.has_arrived, self.awaited))

        def synchronize(self) -> None:
            for number in self.awaited:
                messages.finish(number)

        def wait(self, stream: Any = None) -> None:
            pass

        def elapsed_time(self, later: "Event") -> float:
            return 1000 * (later.at - self.at)

    class Stream:
        cuda_stream = stream_id = 0
        device_type = 1

        def __init__(self, *_: Any, **__: Any) -> None:
            self.device = torch.device("cuda", extension.current_device())
            self.device_index = self.device.index

        def synchronize(self) -> None:
            messages.finish_all()

        def query(self) -> bool:
            return all(map(messages.has_arrived, messages.awaited()))

        def record_event(self, event: Event | None = None) -> Event:
            event = event or Event()
            event.record()
            return event

        def wait_event(self, event: Event) -> None:
            pass

        def wait_stream(self, stream: "Stream") -> None:
            pass

        def __enter__(self) -> "Stream":
            return self

        def __exit__(self, *_: Any) -> None:
            pass

    def sleep(cycles: int) -> None:
        time.sleep(cycles / 1.5e9)

    cuda.Event, cuda.Stream, cuda._sleep = Event, Stream, sleep
    torch.Event = Event  # type: ignore[misc, assignment]
    cuda.current_stream = cuda.default_stream = lambda *_, **__: Stream()
    cuda.set_stream = lambda stream: None
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.synchronize = lambda *_, **__: messages.finish_all()
    # another function, because torch's compiler knows each of the two by its identity
    torch.accelerator.synchronize = lambda *_, **__: messages.finish_all()  # type: ignore[assignment]
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign, assignment]


def _memory(extension: ModuleType) -> None:
    cuda: Any = torch.cuda
    cuda.memory_allocated = cuda.max_memory_allocated = cuda.max_memory_reserved = lambda *_, **__: 1 << 20
    cuda.memory_reserved = lambda *_, **__: 1 << 20
    cuda.mem_get_info = lambda *_, **__: (MEMORY, MEMORY)
    cuda.reset_peak_memory_stats = cuda.empty_cache = lambda *_, **__: None

    def pin_memory(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        if tensor.is_cuda:
            raise RuntimeError("EMULATED GPU: cannot pin a tensor of a GPU, only dense CPU tensors can be pinned")
        return tensor.clone()

    def unpinned(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(factory)
        def make(*args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
            if pin_memory and torch.device(options.get("device") or "cpu").type == "cuda":
                raise RuntimeError("EMULATED GPU: only dense CPU tensors can be pinned")
            return factory(*args, **options)

        return make

    resize_on_cpu = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if storage.device.type == "cpu":
            return resize_on_cpu(storage, size)
        extension.resize_storage(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), size)
        return storage

    torch.Tensor.pin_memory = pin_memory  # type: ignore[method-assign]
    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
    # `with torch.device(...)` looks factories up in a set that it makes once: of the real ones, not of those below
    _device_constructors()
    for name in ("empty", "zeros", "ones", "tensor", "full", "empty_like", "empty_strided"):
        setattr(torch, name, unpinned(getattr(torch, name)))


class Generator(torch.Generator):
    """A GPU's generator. Its numbers differ from those that the CPU draws with the same seed, as Philox's do."""

    OTHER = 0x5BD1E995

    def __new__(cls, index: int) -> "Generator":
        return super().__new__(cls)

    def __init__(self, index: int) -> None:
        self.index = index
        self.manual_seed(0)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self.index)

    def manual_seed(self, seed: int) -> "Generator":
        self.seeded = int(seed)
        super().manual_seed((int(seed) ^ self.OTHER) & 0xFFFFFFFF)
        return self

    def initial_seed(self) -> int:
        return self.seeded

    def clone_state(self) -> "Generator":
        clone = Generator(self.index)
        clone.set_state(self.get_state())
        return clone

    def graphsafe_get_state(self) -> "Generator":
        return self


class AnyGenerator(torch.Generator):
    """`torch.Generator(device)`, for a GPU or the CPU."""

    def __new__(cls, device: Any = "cpu") -> torch.Generator:  # type: ignore[misc]
        device = torch.device(device)
        return Generator(device.index or 0) if device.type == "cuda" else torch._C.Generator(device)


def _random_numbers(extension: ModuleType) -> None:
    cuda: Any = torch.cuda
    generators = tuple(Generator(index) for index in range(8))

    def generator(device: Any = None) -> Generator:
        index = device if isinstance(device, int) else torch.device(device or "cuda").index
        return generators[extension.current_device() if index is None else index]

    def seed_all(seed: int) -> None:
        for one in generators:
            one.manual_seed(seed)

    cuda.default_generators = generators
    cuda.get_rng_state = lambda device=None: generator(device).get_state()
    cuda.set_rng_state = lambda state, device=None: generator(device).set_state(state)
    cuda.get_rng_state_all = lambda: [one.get_state() for one in generators]
    cuda.manual_seed = lambda seed: generator().manual_seed(seed)
    cuda.manual_seed_all = seed_all
    cuda.initial_seed = lambda: generator().initial_seed()
    torch.Generator = AnyGenerator  # type: ignore[misc]
    global _library
    _library = torch.library.Library("aten", "IMPL")
    for name in RANDOM:
        base, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, base), overload or "default")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a kernel that is replaced
            _library.impl(name, _draw(extension, operator, generator), "CUDA")


_library: torch.library.Library | None = None  # without it, its kernels would go


def _draw(extension: ModuleType, operator: Any, generator: Callable[[Any], Generator]) -> Callable[..., Any]:
    """A kernel that runs an operator on the CPU, with the state of the GPU's generator in place of the CPU's."""
    in_place = operator._schema.name.endswith("_")

    def kernel(*args: Any, **options: Any) -> Any:
        device = next(a.device for a in args if isinstance(a, Tensor) and a.is_cuda)
        own = options.pop("generator", None) or generator(device)
        for argument in args:
            if isinstance(argument, Tensor):
                extension.use(argument, in_place, operator._schema.name)
        cpus = torch.get_rng_state()
        torch.set_rng_state(own.get_state())
        try:
            result = operator(*(extension.on_cpu(a) if isinstance(a, Tensor) else a for a in args), **options)
            own.set_state(torch.get_rng_state())
        finally:
            torch.set_rng_state(cpus)
        if in_place:
            return args[0]
        return tuple(part.to(device) for part in result) if isinstance(result, tuple) else result.to(device)

    return kernel


def _attention() -> None:
    """scaled_dot_product_attention chooses a kernel by device, in a table that has none for these."""
    on_cpu = torch.nn.functional.scaled_dot_product_attention

    def attention(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        options = {"scale": scale, "enable_gqa": enable_gqa}
        if not q.is_cuda:
            return on_cpu(q, k, v, attn_mask, dropout_p, is_causal, **options)
        if attn_mask is not None and attn_mask.device != q.device:
            raise RuntimeError(f"EMULATED GPU: attn_mask is on {attn_mask.device}, the queries are on {q.device}")
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(~attn_mask, float("-inf"))
        math = torch.ops.aten._scaled_dot_product_attention_math
        return math(q, k, v, attn_mask, dropout_p, is_causal, None, **options)[0]

    torch.nn.functional.scaled_dot_product_attention = attention
