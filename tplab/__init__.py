"""tplab: a hands-on course on tensor parallelism.

    launch(fn, world_size)   run fn on real ranks, from a notebook cell or a script
    record()                 record the collectives that this rank enters inside a `with` block
    device()                 return the device that this rank computes on
    %%ranks 4                run a notebook cell on 4 ranks (available as soon as tplab is imported in IPython)

Everything else is in subpackages called rooms. There is one room per subject, and the rooms follow the order of the
chapters: `tplab.memory`, `tplab.collectives.by_hand`, `tplab.tensor`, ... ARCHITECTURE.md lists them all.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tplab.runtime import Deadlock, RankError, Results, device, launch, record

__version__ = "0.2.0"

__all__ = ["Deadlock", "RankError", "Results", "device", "launch", "record"]


def __getattr__(name: str) -> Any:
    """Import `tplab.runtime`, which imports torch, on first use, so that the `tplab` command starts without torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tplab import runtime

    return getattr(runtime, name)


# These modules were renamed in 0.2. Notebooks and saved runs that import the old names keep working until 0.3.
RENAMED = {
    "tplab.corpus": "tplab.common.corpus",
    "tplab.gpt_config": "tplab.memory.config",
    "tplab.memory_meter": "tplab.memory.meter",
    "tplab.links": "tplab.collectives.links",
    "tplab.sharding": "tplab.tensor.sharding",
    "tplab.mappings": "tplab.tensor.mappings",
    "tplab.initialization": "tplab.tensor.initialization",
    "tplab.linear": "tplab.tensor.linear",
    "tplab.mlp": "tplab.tensor.mlp",
    "tplab.attention_mask": "tplab.tensor.attention_mask",
    "tplab.qkv": "tplab.tensor.qkv",
    "tplab.rotary": "tplab.tensor.rotary",
    "tplab.kv_cache": "tplab.tensor.kv_cache",
    "tplab.attention": "tplab.tensor.attention",
    "tplab.token_ids": "tplab.tensor.id_check",
    "tplab.embedding": "tplab.tensor.embedding",
    "tplab.cross_entropy": "tplab.tensor.cross_entropy",
    "tplab.linear_cross_entropy": "tplab.tensor.linear_cross_entropy",
    "tplab.generators": "tplab.tensor.generators",
    "tplab.rng": "tplab.tensor.rng",
    "tplab.checkpoint_files": "tplab.checkpoint.files",
    "tplab.checkpoint_pieces": "tplab.checkpoint.pieces",
    "tplab.replicas": "tplab.checkpoint.replicas",
    "tplab.sharded_optimizer": "tplab.checkpoint.optimizer",
    "tplab.sharded_checkpoint": "tplab.checkpoint.sharded",
    "tplab.transformer": "tplab.gpt.transformer",
    "tplab.generation": "tplab.gpt.generation",
    "tplab.hugging_face": "tplab.gpt.hugging_face",
    "tplab.machines": "tplab.cost.machines",
    "tplab.flops": "tplab.cost.flops",
    "tplab.collective_cost": "tplab.cost.collective",
    "tplab.layer_cost": "tplab.cost.layer",
    "tplab.step_cost": "tplab.cost.step",
    "tplab.chrome_trace": "tplab.trace.chrome",
    "tplab.sequence_linear": "tplab.sequence.linear",
    "tplab.sequence_parallel": "tplab.sequence.gpt",
    "tplab.schedules": "tplab.pipeline.schedules",
    "tplab.schedule_order": "tplab.pipeline.schedule_order",
    "tplab.wires": "tplab.pipeline.p2p",
    "tplab.split_backward": "tplab.pipeline.split_backward",
    "tplab.gpt_stages": "tplab.pipeline.stages",
    "tplab.mesh": "tplab.data.grid",
    "tplab.flat": "tplab.data.flat_parameters",
    "tplab.grad_norm": "tplab.data.grad_norm",
    "tplab.zero": "tplab.data.zero",
    "tplab.zero_three": "tplab.data.zero3",
    "tplab.zero_bill": "tplab.data.zero_cost",
    "tplab.three_dimensions": "tplab.cluster.three_dimensions",
    "tplab.plan": "tplab.cluster.plan",
    "tplab.capstone.log": "tplab.capstone.training.log",
    "tplab.capstone.measuring": "tplab.capstone.study.programs",
    "tplab.capstone.mine": "tplab.capstone.own_layers.find",
    "tplab.capstone.panel": "tplab.capstone.watching.panel",
    "tplab.capstone.predictions": "tplab.capstone.planning.predictions",
    "tplab.capstone.step": "tplab.capstone.training.step",
    "tplab.capstone.traffic": "tplab.capstone.planning.traffic",
    "tplab.capstone.train": "tplab.capstone.training.loop",
    "tplab.course.chapters": "tplab.course.exercises",
    "tplab.course.chapters.ch11": "tplab.course.exercises.ch11",
    "tplab.course.chapters.ch15": "tplab.course.exercises.ch15",
    "tplab.course.chapters.ch15.killing": "tplab.course.exercises.ch15.killing",
    "tplab.course.chapters.ch15.saving": "tplab.course.exercises.ch15.saving",
    "tplab.course.ch11": "tplab.course.exercises.ch11",
    "tplab.course.ch15": "tplab.course.exercises.ch15",
    "tplab.course.ch15.killing": "tplab.course.exercises.ch15.killing",
    "tplab.course.ch15.saving": "tplab.course.exercises.ch15.saving",
}


class _RenamedFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder and loader that imports a module by the name it had before 0.2, and warns that it has a new name."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname not in RENAMED:
            return None
        new = RENAMED[fullname]
        warnings.warn(f"{fullname} is now {new}; the old name goes away in tplab 0.3", DeprecationWarning, stacklevel=2)
        return importlib.machinery.ModuleSpec(fullname, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        module = importlib.import_module(RENAMED[spec.name])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: Any) -> None:
        """Restore the spec that the import by the old name replaced. The module itself has been executed already."""
        module.__spec__ = module.__spec__.loader_state


sys.meta_path.insert(0, _RenamedFinder())

if "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None:
    from tplab.runtime.magic import register_in_ipython

    register_in_ipython()
