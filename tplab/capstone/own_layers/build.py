"""Build a GPT from the learner's library, which each rank loads as a package with a new name.

The modules of the library (the package my_tp) already use each other. For example, the MLP of chapter 5 calls the
layers of chapter 4, which call the operators of chapter 3. Where the settings require more than the chapters do, some
of a module's names are replaced before the next module is loaded:

    f, g         become an all-gather and a reduce-scatter in chapters 4 to 7, with sequence parallelism
    4.1, 7.4     use the matmul of 11.2, which includes f and all-reduces dx in the background during backward
    10.4         looks up all positions; with sequence parallelism, its table gets only those of this rank's tokens

my_tp/blocks.py and my_tp/operators.py contain more wrappers, which the library needs regardless of the settings.
"""

import importlib
import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.abc import ExecutionLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from tplab.capstone.model import TrainingHooks
from tplab.capstone.own_layers.find import Answers
from tplab.capstone.own_layers.link import check_answers, is_async, needed, whole_world
from tplab.capstone.own_layers.trial import try_out
from tplab.capstone.settings.settings import Settings
from tplab.course.learn.given_code import Part
from tplab.memory.config import GPTConfig
from tplab.runtime import device as own_device
from tplab.sequence.regions import gather_from_sequence_region, reduce_scatter_to_sequence_region
from tplab.tensor.linear import Device
from tplab.tensor.region import in_autocast_dtype
from tplab.tensor.sharding import shard

OWN_DEVICE = Part("tplab.runtime.devices", "device")  # the library's copy doesn't know if ranks share a GPU
F, G = "copy_to_region", "reduce_from_region"
_numbers = itertools.count(1)


def assemble(
    answers: Answers, settings: Settings, config: GPTConfig, *, mesh: DeviceMesh, device: Device = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:  # fmt: skip
    """Build the learner's GPT. It has the same parameters as ParallelGPT, but without their initial values.

    Raises ValueError if an answer that the settings need is missing, or if a small model's results on these ranks
    differ from tplab's.
    """
    check_answers(answers.whose, settings)
    build = partial(_gpt, load(answers, settings), settings, mesh)
    ran = try_out(build, settings, mesh, device)
    model = build(config, device, dtype)
    idle = frozenset(exercise for exercise in needed(settings) if not ran & answers.code[exercise])
    model.hooks = replace(model.hooks, idle=idle)  # type: ignore[type-var]
    return model


def _gpt(
    my_tp: Any, settings: Settings, mesh: DeviceMesh, config: GPTConfig, device: Device, dtype: torch.dtype | None
) -> nn.Module:
    group: ProcessGroup = mesh.get_group("tp")
    model: nn.Module = my_tp.transformer.ParallelGPT(  # pads its table to a multiple of 128 rows, like ParallelGPT
        config, my_tp.transformer.ParallelTransformerLayer, multiple=128, group=group, device=device, dtype=dtype
    )
    finish = None
    if settings.recompute == "layers":
        for layer in model.get_submodule("layers").children():
            layer.forward = _again_in_backward(layer.forward)
    if settings.sequence_parallel:
        rank, p = mesh.get_local_rank("tp"), mesh["tp"].size()
        model.get_submodule("positions").register_forward_pre_hook(
            lambda table, places: (shard(places[0], -1, rank, p),)  # [s] -> [s/p]
        )
        for parameter in model.parameters():  # as chapter 12 marks them
            parameter.sequence_parallel = not hasattr(parameter, "tensor_parallel")  # type: ignore[attr-defined]
        finish = partial(my_tp.sequence.allreduce_sequence_gradients, model, group)

    def norm(_: DeviceMesh | None) -> Tensor:
        found = my_tp.data_parallel.gradient_norm(list(model.parameters()), group, mesh.get_group("pp"))
        return torch.tensor(float(found), dtype=torch.float64, device=device)

    model.hooks = TrainingHooks(  # type: ignore[assignment]
        config=config, group=group, finish_gradients=finish, norm=norm
    )
    return model


def load(answers: Answers, settings: Settings) -> ModuleType:
    """Load the library, replace names in its modules where the settings require it, and return the package."""
    name = f"my_tp_{next(_numbers)}"  # torch.compile looks up modules by name
    answers.show_in_tracebacks()
    if answers.folder not in sys.path:
        sys.path.append(answers.folder)  # so that answers can import files in this folder
    sys.meta_path.insert(0, _Importer(answers, name))

    def module(file: str, **instead: Any) -> Any:
        """Import a module, and replace those of its names that are in `instead`."""
        loaded = importlib.import_module(f"{name}.{file.removesuffix('.py').replace('/', '.')}")
        vars(loaded).update({bound: value for bound, value in instead.items() if hasattr(loaded, bound)})
        return loaded

    if OWN_DEVICE.file in answers.files:
        module(OWN_DEVICE.file, device=own_device)
    f_and_g: dict[str, Any] = {}
    if settings.sequence_parallel:
        own = module("sequence")
        f_and_g = {F: gather_from_sequence_region, G: reduce_scatter_to_sequence_region}
        if whole_world(settings):
            f_and_g = {
                F: lambda x, group=None: own.GatherFromSequence.apply(x),
                G: lambda x, group=None: own.ReduceScatterToSequence.apply(x),
            }
    linear = module("linear", **f_and_g)
    if is_async(settings):
        matmul = module("cost").LinearAsync
        linear.ColumnParallelLinear = _column_with(matmul, linear.ColumnParallelLinear)
    module("mlp", **f_and_g)
    attention = module("attention", **f_and_g)
    if settings.recompute == "attention":
        attention.attend = _again_in_backward(attention.attend)
    embedding = module("embedding", **f_and_g)
    if is_async(settings):
        embedding.parallel_logits = _logits_with(matmul, embedding.parallel_logits)
    module("transformer")
    module("data_parallel")
    return importlib.import_module(name)


def _again_in_backward(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap `function` so that only its inputs are saved and backward recomputes it. It must not draw random numbers."""

    def kept_by_inputs(*args: Any, **kwargs: Any) -> Tensor:
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return kept_by_inputs


def _column_with(matmul: Any, column: Any) -> Any:
    """Return a subclass of 4.1's layer that uses the matmul of 11.2."""

    class ColumnParallelLinear(column):
        def forward(self, x: Tensor) -> Any:
            if self.gather_output or torch.compiler.is_compiling():  # the compiler overlaps communication by itself
                return super().forward(x)
            y = matmul.apply(*in_autocast_dtype(x, self.weight), self.group)  # [.., o/p]
            if self.skip_bias_add:
                return y, self.bias
            return y if self.bias is None else y + self.bias.to(y.dtype)

    return ColumnParallelLinear


def _logits_with(matmul: Any, parallel_logits: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a version of 7.4's logits function that uses the matmul of 11.2."""

    def logits(x: Tensor, weight: Tensor, *, gather: bool = False, group: Any = None, **options: Any) -> Tensor:
        if gather or torch.compiler.is_compiling():
            return parallel_logits(x, weight, gather=gather, group=group, **options)
        return matmul.apply(*in_autocast_dtype(x, weight), group)  # [.., v/p]

    return logits


class _Importer(MetaPathFinder, ExecutionLoader):
    """Imports the learner's package from its files' source text, under the given package name."""

    def __init__(self, answers: Answers, name: str) -> None:
        self.answers = answers
        parts = {file: [name, *file.removesuffix(".py").split("/")] for file in answers.files}
        self.files = {".".join(parts[file]).removesuffix(".__init__"): file for file in parts}

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return spec_from_loader(fullname, self) if fullname in self.files else None

    def is_package(self, fullname: str) -> bool:
        return self.files[fullname].endswith("__init__.py")

    def get_source(self, fullname: str) -> str:
        return self.answers.files[self.files[fullname]]

    def get_filename(self, fullname: str) -> str:
        return self.answers.path(self.files[fullname])
