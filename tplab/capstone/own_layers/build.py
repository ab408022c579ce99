"""Build a GPT from the learner's library, which each rank loads as a package with a new name.

The modules of the library (the package my_tp) already use each other. For example, the MLP of chapter 5 calls the
layers of chapter 4, which call the operators of chapter 3.
"""

import importlib
import itertools
import sys
from importlib.abc import ExecutionLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from tplab.capstone.model import TrainingHooks
from tplab.capstone.own_layers.find import Answers
from tplab.course.learn.given_code import Part
from tplab.memory.config import GPTConfig
from tplab.runtime import device as own_device
from tplab.tensor.linear import Device

OWN_DEVICE = Part("tplab.runtime.devices", "device")
_numbers = itertools.count(1)


def assemble(
    answers: Answers, config: GPTConfig, *, mesh: DeviceMesh, device: Device = None, dtype: torch.dtype | None = None
) -> nn.Module:
    """Build the learner's GPT. It has the same parameters as ParallelGPT, but without their initial values."""
    my_tp, group = load(answers), mesh.get_group("tp")
    model: nn.Module = my_tp("transformer").ParallelGPT(  # pads its table to a multiple of 128 rows, like ParallelGPT
        config, my_tp("transformer").ParallelTransformerLayer, multiple=128, group=group, device=device, dtype=dtype
    )

    def norm(_: DeviceMesh | None) -> Tensor:
        stages: ProcessGroup = mesh.get_group("pp")
        found = my_tp("data_parallel").gradient_norm(list(model.parameters()), group, stages)
        return torch.tensor(float(found), dtype=torch.float64, device=device)

    model.hooks = TrainingHooks(config=config, group=group, norm=norm)  # type: ignore[assignment]
    return model


def load(answers: Answers) -> Any:
    """Return a function that imports a module of the learner's library, such as "linear"."""
    package = f"my_tp_{next(_numbers)}"  # torch.compile looks up modules by name
    answers.show_in_tracebacks()
    if answers.folder not in sys.path:
        sys.path.append(answers.folder)  # so that answers can import files in this folder
    sys.meta_path.insert(0, _Importer(answers, package))

    def module(name: str) -> Any:
        return importlib.import_module(f"{package}.{name}")

    if OWN_DEVICE.file in answers.files:  # the library's own copy doesn't know if ranks share a GPU
        module(OWN_DEVICE.file.removesuffix(".py").replace("/", ".")).device = own_device
    return module


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
