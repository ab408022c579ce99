"""Count the kernels of a training step and the bytes that they read and write, for tplab at p = 1 and plain PyTorch.

    EMULATED_GPUS=1 PYTHONPATH=tests/emulated_gpu/site:. python -m benchmarks.kernels [--layers 2]

On a GPU, most kernels other than matmuls are limited by the memory's bandwidth, so their time is proportional to the
bytes that they move. The counts show where parallel layers move more bytes than plain PyTorch, even without a GPU: the
tensors are torch's fake tensors, which have shapes, strides and dtypes, but no elements. So a model of any size takes
seconds, and on an emulated GPU (see GPU.md), the code takes the same paths as on a real one. With a real GPU, leave out
the two variables.

An operator counts as one kernel if it computes or copies something. Views and allocations don't count. Every kernel is
assumed to read its inputs once and to write its outputs once. Where it looks up rows, it reads only those.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.gpu import on_one_rank
from benchmarks.turns import table
from tplab import plain
from tplab.capstone.settings.settings import Settings
from tplab.capstone.training.optimizer import adamw_options
from tplab.capstone.training.trainer import lower_precision
from tplab.cluster.training_step import TrainingStep
from tplab.gpt.model import ParallelGPT

FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}  # besides views
OVERWRITE = {"copy_", "fill_", "zero_"}  # don't read what they write to
LOOK_UP = {"embedding", "gather", "index_select", "nll_loss_forward"}  # read only some elements of their first argument
MODELS: dict[str, Callable[..., nn.Module]] = {"plain PyTorch": plain.GPT, "tplab": ParallelGPT}


class Count(NamedTuple):
    """How many kernels there were, and the bytes that they read and wrote."""

    kernels: int = 0
    bytes: int = 0


class CountKernels(TorchDispatchMode):
    """Context manager that counts the kernels that torch runs inside it. `with CountKernels() as counting:`"""

    def __init__(self) -> None:
        super().__init__()
        self.count = Count()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if func.namespace == "aten" and not func.is_view and name not in FREE:
            read, written = _memory(func._schema, name, args, kwargs or {}, result)
            if moved := sum(map(_bytes, read + written)):
                self.count = Count(self.count.kernels + 1, self.count.bytes + moved)
        return result


def count(run: Callable[[], object]) -> Count:
    """Return what run() counted."""
    with CountKernels() as counting:
        run()
    return counting.count


def _memory(schema: Any, name: str, args: tuple, kwargs: Mapping[str, Any], result: Any) -> tuple[list, list]:
    """Return the tensors that a kernel reads, and those that it writes."""
    read: list[Tensor] = []
    written: list[Tensor] = []
    for position, declared in enumerate(schema.arguments):
        tensors = _tensors(args[position] if position < len(args) else kwargs.get(declared.name))
        if declared.alias_info is not None and declared.alias_info.is_write:
            written += tensors
        if not (declared.is_out or (position == 0 and name in OVERWRITE)):
            read += tensors
    known = set(map(id, written))
    written += [tensor for tensor in _tensors(result) if id(tensor) not in known]
    if name in LOOK_UP:
        read[0] = read[1] if name == "nll_loss_forward" else written[0]
    elif name == "nll_loss_backward":
        read.pop(1)  # only the shape of the log-probabilities matters
    elif name.startswith("scatter_"):
        read, written = read[1:], read[1:]  # only the elements that the index names
    return read, written


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _bytes(tensor: Tensor) -> int:
    """Return the size of a tensor in memory, where an expanded dimension takes no space."""
    lengths = [length for length, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or not length]
    return math.prod(lengths) * tensor.element_size()


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Context manager in which tensors have no elements, and bfloat16 attention is the kernel that a GPU chooses."""
    chosen = F.scaled_dot_product_attention

    def attention(q: Tensor, k: Tensor, v: Tensor, *args: Any, is_causal: bool = False, **options: Any) -> Tensor:
        if q.dtype != torch.bfloat16:
            return chosen(q, k, v, *args, is_causal=is_causal, **options)
        mask, dropout, is_causal = (*args, None, 0.0, is_causal)[:3] if args else (None, 0.0, is_causal)
        assert mask is None
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout, is_causal)[0]

    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        mock.patch.object(F, "scaled_dot_product_attention", attention),
    ):
        yield


def count_parts(settings: Settings, kind: str, device: str = "cuda") -> dict[str, Count]:
    """Count each part of a model, forward and backward for one micro-batch, and a whole step. kind: a key of MODELS."""
    shape = settings.micro_batch_size, settings.seq_length
    with fake_tensors():
        model: Any = MODELS[kind](replace(settings.model, flash_attention=True), device=device)
        ids = torch.empty(shape, dtype=torch.long, device=device)
        x = torch.empty(*shape, settings.hidden_size, device=device, requires_grad=True)
        layer = model.layers[0]
        parts: dict[str, Callable[[], Tensor]] = {
            "token embedding": lambda: model.embedding(ids),
            "norm": lambda: layer.attention_norm(x),
            "attention": lambda: layer.attention(x),
            "MLP": lambda: layer.mlp(x),
            "transformer layer": lambda: layer(x),
            "output layer and loss": lambda: model.loss(x, ids),
        }

        def forward(run: Callable[[], Tensor]) -> Tensor:
            with lower_precision(settings, torch.device(device)):
                return run()

        def both_passes(run: Callable[[], Tensor]) -> None:
            y = forward(run)
            y.backward(torch.empty_like(y))

        counted = {}
        for name, run in parts.items():
            counted[name] = count(partial(both_passes, run))
            model.zero_grad()
            x.grad = None
        training = TrainingStep(
            model, AdamW, max_norm=settings.max_norm or None, check=False, **adamw_options(model, settings)
        )

        def micro_batches() -> None:
            for number in range(settings.micro_batches):
                with training.micro_batch(last=number == settings.micro_batches - 1):
                    (forward(lambda: model(ids, ids)) / settings.micro_batches).backward()

        def step() -> None:
            micro_batches()
            training.update()

        step()  # AdamW allocates its state in the first step
        counted["whole step"] = count(step)
        micro_batches()
        counted["gradient norm, clipping, AdamW"] = count(training.update)
        return counted


def report(plain: Mapping[str, Count], ours: Mapping[str, Count]) -> str:
    """Return a table of kernels and gigabytes, with a row per part. The ratios are (tplab / plain PyTorch)."""
    rows = []
    for (part, theirs), mine in zip(plain.items(), ours.values(), strict=True):
        counts = [cell for one in (theirs, mine) for cell in (f"{one.kernels:,}", f"{one.bytes / 1e9:.2f}")]
        rows.append([part, *counts, f"{mine.kernels / theirs.kernels:.3f}", f"{mine.bytes / theirs.bytes:.3f}"])
    heads = [f"{kind}, {what}" for kind in MODELS for what in ("kernels", "GB")]
    return table(["part", *heads, "ratio of kernels", "ratio of bytes"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, help="number of layers, to be faster")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU, real or emulated: set the two variables, as --help shows")
    settings = on_one_rank(**({"num_layers": options.layers} if options.layers else {}))
    print(report(*(count_parts(settings, kind) for kind in MODELS)))


if __name__ == "__main__":
    main()
