"""Build a GPT from the learner's answers by running their cells chapter by chapter, each chapter in a separate module.

After a chapter's setup has imported ready-made parts of the course, their names are rebound to the answers of earlier
chapters (see `tplab.capstone.own_layers.link`). For example, chapter 5's MLP uses the learner's layers from chapter 4,
which communicate with the operators from chapter 3. A traceback says "your chapter 05, exercise 5.1, line 7".
"""

import ast
import itertools
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from tplab.capstone.model.plain_gpt import check_is_plain
from tplab.capstone.model.training_hooks import TrainingHooks, nothing
from tplab.capstone.own_layers.adapt import Parts, adapted, gpt_of
from tplab.capstone.own_layers.find import Answers, Code
from tplab.capstone.own_layers.link import (
    ANSWERS,
    CUT_ALONG_THE_SEQUENCE,
    LINKS,
    OPERATORS,
    SEQUENCE,
    check_answers,
    is_async,
    needed,
    whole_world,
)
from tplab.capstone.own_layers.trial import try_out
from tplab.capstone.settings.settings import Settings
from tplab.course.grading.cell_dependencies import uses
from tplab.course.learner.statements import needed_statements
from tplab.course.notebooks.source import parse_code
from tplab.data.grad_norm import grad_norm
from tplab.memory.config import GPTConfig
from tplab.sequence.regions import gather_from_sequence_region, reduce_scatter_to_sequence_region
from tplab.tensor.linear import Device
from tplab.tensor.mappings import copy_to_region, reduce_from_region

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
    check_is_plain(config, "mine")
    check_answers(answers.whose, settings)
    if not dist.is_initialized():
        raise ValueError(
            'layers="mine" asks torch.distributed for its ranks, so it needs a process group, also for one rank: '
            "start it with tplab.launch or torchrun"
        )
    parts = link(answers, settings)
    group = None if mesh is None else mesh.get_group("tp")
    ran = try_out(parts, settings, mesh, device) if trial else {code.where for code in answers.codes}
    idle = set(needed(settings)) - {code.exercise for code in answers.codes if code.where in ran}
    model = gpt_of(parts, settings, config, group=group, device=device, dtype=dtype)
    finish, length = parts.allreduce_sequence_gradients, parts.gradient_norm

    def norm(mesh: DeviceMesh | None) -> Tensor:
        if mesh is None:
            return grad_norm(model.parameters())
        found = length(list(model.parameters()), mesh.get_group("tp"), mesh.get_group("pp"))
        return torch.tensor(found, dtype=torch.float64, device=device)

    done = (lambda: finish(model, group)) if settings.sequence_parallel else nothing
    model.hooks = TrainingHooks(  # type: ignore[assignment]
        config=config, group=group, finish_gradients=done, norm=norm, idle=frozenset(idle)
    )
    return model


def link(answers: Answers, settings: Settings) -> Parts:
    """Run the chapters' cells, giving each the earlier answers that it uses, and return the parts of a GPT."""
    made: dict[str, Any] = {}  # exercise -> its answer, wrapped for later chapters
    namespaces: dict[int, dict[str, Any]] = {}
    operators, along_the_sequence = _operators(answers, settings, namespaces)
    if is_async(settings):
        made["11.3"] = run_chapter(answers, 11, {}, namespaces)["LinearAsync"]
    for chapter, names in LINKS.items():
        cut = settings.sequence_parallel and chapter in CUT_ALONG_THE_SEQUENCE
        provided = dict(along_the_sequence if cut else operators)
        provided |= {name: made[exercise] for name, exercise in names.items() if name not in OPERATORS}
        namespace = run_chapter(answers, chapter, provided, namespaces)
        made |= adapted(chapter, namespace, settings, made.get("11.3"))
    finish = None
    if settings.sequence_parallel:
        finish = run_chapter(answers, 12, {}, namespaces)["allreduce_sequence_gradients"]
    length = run_chapter(answers, 14, {}, namespaces)["gradient_norm"]
    return Parts(made["10.2"], made["10.1"], finish, length)


def _operators(
    answers: Answers, settings: Settings, namespaces: dict[int, dict[str, Any]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return f and g, and their sequence-parallel replacements. They're the learner's if all ranks share the model."""
    ready = {"copy_to_region": copy_to_region, "reduce_from_region": reduce_from_region}
    if not whole_world(settings):
        parts = (gather_from_sequence_region, reduce_scatter_to_sequence_region)
        return ready, dict(zip(OPERATORS, parts, strict=True))
    own = run_chapter(answers, 3, {}, namespaces)
    operators = dict(ready)  # sequence parallelism doesn't need the learner's f
    for name, exercise in OPERATORS.items():
        if (answer := ANSWERS[exercise][0]) in own:
            operators[name] = _for_all_ranks(own[answer], name)
    if not settings.sequence_parallel:
        return operators, {}
    twelve = run_chapter(answers, 12, {}, namespaces)
    return operators, {name: _for_all_ranks(twelve[answer], name) for name, answer in SEQUENCE.items()}


def _for_all_ranks(operator: Any, name: str) -> Any:
    """Wrap an operator that takes no group in a function with the signature that later chapters call."""

    def apply(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
        return operator.apply(x)

    apply.__name__ = name
    return apply


def run_chapter(
    answers: Answers, chapter: int, provided: Mapping[str, Any], namespaces: dict[int, dict[str, Any]]
) -> dict[str, Any]:
    """Run a chapter's cells once, with `provided` in place of imports from tplab, and return the names they define."""
    if chapter in namespaces:
        return namespaces[chapter]
    codes = answers.of_chapter(chapter)
    answers.show_in_tracebacks()
    if answers.folder not in sys.path:
        sys.path.append(answers.folder)  # files that the notebooks import
    module = ModuleType(f"your_chapter_{chapter:02d}_{next(_numbers)}")  # torch.compile looks up modules by name
    sys.modules[module.__name__] = module
    namespace = namespaces[chapter] = vars(module)
    for code, tree in zip(codes, _trees(codes), strict=True):
        exec(compile(tree, code.where, "exec", dont_inherit=True), namespace)
        for name, value in list(namespace.items()):  # also under another name: `import copy_to_region as f`
            own_name = str(getattr(value, "__name__", ""))
            if own_name in provided and str(getattr(value, "__module__", "")).startswith("tplab."):
                namespace[name] = provided[own_name]
    return namespace


def _trees(codes: list[Code]) -> list[ast.Module]:
    """Parse the cells, dropping trial code and the setup's unused imports, such as those for pictures and checks."""
    trees = [parse_code(code.source) for code in codes]
    answers = {name for names in ANSWERS.values() for name in names}
    others = [tree for code, tree in zip(codes, trees, strict=True) if code.role != "setup"]
    kept = needed_statements([tree.body for tree in others], answers)
    for tree, body in zip(others, kept, strict=True):
        tree.body = body
    asked = {name for tree in trees for name in uses(ast.unparse(tree))}
    for code, tree in zip(codes, trees, strict=True):
        if code.role == "setup":
            tree.body = [statement for statement in tree.body if not _is_idle(statement, asked)]
    return trees


def _is_idle(statement: ast.stmt, asked: set[str]) -> bool:
    """Remove unused names from an import statement. Return True if that leaves nothing to import."""
    if not isinstance(statement, ast.Import | ast.ImportFrom):
        return False
    statement.names = [
        name for name in statement.names if (name.asname or name.name).partition(".")[0] in {*asked, "*"}
    ]
    return not statement.names
