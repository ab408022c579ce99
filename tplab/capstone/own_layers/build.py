"""Build a GPT from the learner's library, loaded on each rank under a name of its own.

The modules of my_tp already use each other: the MLP of chapter 5 calls the layers of chapter 4, which communicate with
the operators of chapter 3. Where the settings ask for more, names are bound anew in a module before the next one is
loaded. With sequence parallelism, f and g in chapters 4 to 7 become an all-gather and a reduce-scatter.
"""

import importlib
import itertools
import sys
from collections.abc import Sequence
from importlib.abc import ExecutionLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from tplab.capstone.model.plain_gpt import again_in_backward
from tplab.capstone.model.training_hooks import TrainingHooks
from tplab.capstone.own_layers.adapt import Parts, gpt_of, logits_with_async, with_async
from tplab.capstone.own_layers.find import Answers, file_of
from tplab.capstone.own_layers.link import ANSWERS, F, G, check_answers, is_async, needed, whole_world
from tplab.capstone.own_layers.trial import try_out
from tplab.capstone.settings.settings import Settings
from tplab.course.learner.given_code import Part
from tplab.data.grad_norm import grad_norm
from tplab.memory.config import GPTConfig
from tplab.runtime import device as own_device
from tplab.sequence.regions import gather_from_sequence_region, reduce_scatter_to_sequence_region
from tplab.tensor.linear import Device

# Where ranks share a GPU, the copy of this function in the library doesn't know it
OWN_DEVICE = Part("tplab.runtime.devices", "device")
_numbers = itertools.count(1)


def assemble(
    answers: Answers,
    settings: Settings,
    config: GPTConfig,
    *,
    mesh: DeviceMesh | None = None,
    device: Device = None,
    dtype: torch.dtype | None = None,
    trial: bool = True,
) -> nn.Module:
    """Build the learner's GPT. It has the same parameters as ParallelGPT, but without their initial values.

    mesh     as created by `tplab.data.grid.mesh` (None: all ranks share the model)
    trial    if True, first build a small model and compare its results with tplab's on these ranks

    Raises ValueError for settings that the learner's layers don't support, or if the trial finds a difference.
    """
    check_answers(answers.whose, settings)
    if not dist.is_initialized():
        raise ValueError(
            'layers="mine" needs a process group even for a single rank, because your layers ask torch.distributed for '
            "their rank. Start it with tplab.launch or torchrun"
        )
    parts = link(answers, settings)
    group = None if mesh is None else mesh.get_group("tp")
    idle = set()
    if trial:
        ran = try_out(parts, settings, mesh, device)
        idle = {exercise for exercise in needed(settings) if not ran & code_of(exercise, answers)}
    model = gpt_of(parts, settings, config, group=group, device=device, dtype=dtype)
    finish, length = parts.allreduce_sequence_gradients, parts.gradient_norm

    def norm(mesh: DeviceMesh | None) -> Tensor:
        if mesh is None:
            return grad_norm(model.parameters())
        found = length(list(model.parameters()), mesh.get_group("tp"), mesh.get_group("pp"))
        return torch.tensor(found, dtype=torch.float64, device=device)

    done = (lambda: finish(model, group)) if settings.sequence_parallel else None
    model.hooks = TrainingHooks(  # type: ignore[assignment]
        config=config, group=group, finish_gradients=done, norm=norm, idle=frozenset(idle)
    )
    return model


def code_of(exercise: str, answers: Answers) -> set[tuple[str, str]]:
    """Return the file and the names of an answer's functions and classes, as `try_out` reports what ran."""
    return {(answers.path(file_of(exercise)), name) for name in ANSWERS[exercise]}


def link(answers: Answers, settings: Settings) -> Parts:
    """Load the library, bind names anew where the settings ask for it, and return the parts of a GPT."""
    package = _Package(answers)
    regions: dict[str, Any] = {}
    if settings.sequence_parallel:
        regions = _along_the_sequence(package, settings)
    linear = package.load("linear", regions)
    if is_async(settings):
        product = package.load("cost").LinearAsync
        linear.ColumnParallelLinear = with_async(linear.ColumnParallelLinear, product)
    package.load("mlp", regions)
    attention = package.load("attention", regions)
    if settings.recompute == "attention":
        attention.attend = again_in_backward(attention.attend)
    embedding = package.load("embedding", regions)
    if is_async(settings):
        embedding.parallel_logits = logits_with_async(embedding.parallel_logits, product)
    gpt = package.load("transformer")
    finish = package.load("sequence").allreduce_sequence_gradients if settings.sequence_parallel else None
    length = package.load("data_parallel").gradient_norm
    return Parts(gpt.ParallelGPT, gpt.ParallelTransformerLayer, finish, length)


def _along_the_sequence(package: "_Package", settings: Settings) -> dict[str, Any]:
    """Return what takes the place of f and g in the blocks: the learner's, if all ranks share the model."""
    if not whole_world(settings):
        return {F: gather_from_sequence_region, G: reduce_scatter_to_sequence_region}
    own = package.load("sequence")

    def gather(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
        return own.GatherFromSequence.apply(x)

    def reduce_scatter(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
        return own.ReduceScatterToSequence.apply(x)

    return {F: gather, G: reduce_scatter}


class _Package(MetaPathFinder, ExecutionLoader):
    """The learner's package, imported from the texts of its files."""

    def __init__(self, answers: Answers) -> None:
        self.answers, self.name = answers, f"my_tp_{next(_numbers)}"  # torch.compile looks up modules by name
        answers.show_in_tracebacks()
        if answers.folder not in sys.path:
            sys.path.append(answers.folder)  # files that the answers import
        sys.meta_path.insert(0, self)

    def load(self, name: str, instead: dict[str, Any] | None = None) -> Any:
        """Import a module, and bind those of its names anew that are in `instead`."""
        module = importlib.import_module(f"{self.name}.{name}")
        for bound, value in (instead or {}).items():
            if hasattr(module, bound):
                setattr(module, bound, value)
        return module

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if (file := self._file(fullname)) is None:
            return None
        inside: list[str] | None = [] if file.endswith("__init__.py") else None
        return spec_from_file_location(
            fullname, self.answers.path(file), loader=self, submodule_search_locations=inside
        )

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        if self._file(module.__name__) == OWN_DEVICE.file:
            module.__dict__[OWN_DEVICE.name] = own_device

    def get_source(self, fullname: str) -> str:
        return self.answers.files[self._file(fullname) or ""]

    def get_filename(self, fullname: str) -> str:
        return self.answers.path(self._file(fullname) or "")

    def _file(self, fullname: str) -> str | None:
        package, *rest = fullname.split(".")
        files = ("/".join([*rest, "__init__.py"]), "/".join(rest) + ".py")
        return next((file for file in files if package == self.name and file in self.answers.files), None)
