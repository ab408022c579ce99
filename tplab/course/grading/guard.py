"""Runs in the kernel of `tplab check`, beside the cells: nothing that a notebook does may turn a check around.

    start(4)                          before the first cell: loads the course's code and keeps what it consists of
    remember(["Layer"], "4.1")        after an exercise's cell (and the setup): keeps what its names stand for
    before_check("4.1")               puts back what was kept: the course's functions, `check`, and the answers
    after_check("4.1")                refuses a verdict during which the answer itself has changed any of it

So a cell that defines its own `check`, assigns to a function in tplab or torch, rewrites cells by an IPython hook, or
imports the course's own layer over the learner's, changes no verdict. What is out of scope: the files on disk, and a
notebook that deceives this very module. Whoever does that knows that the answer is wrong.
"""

import importlib
import sys
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from tplab.course.grading.snapshots import Kept, is_code
from tplab.runtime.report import name_cell

# Others' code that checks build on. Of these modules the public functions and classes are kept.
OTHERS = ("builtins", "importlib", "math", "torch", "torch.nn", "torch.nn.functional", "torch.autograd",
          "torch.distributed", "torch.testing")  # fmt: skip
# torch wraps these itself: the first when it loads its compiler, which an optimizer or device "meta" may do in a check,
# the others when it first compiles.
_MODULE = "torch.nn.modules.module.Module"
WRAPPED_BY_TORCH = ("torch.manual_seed", f"{_MODULE}.__init__", f"{_MODULE}.__setstate__")
_HOOKS = ("input_transformers_post", "ast_transformers")

_kept = Kept()
_modules: dict[str, ModuleType] = {}
_tables: list[tuple[dict, dict]] = []
_answers: dict[str, Any] = {}


def start(chapter: int) -> None:
    """Load what the checks of this chapter need and keep every function and class of the course."""
    for name in (
        "tplab.course.checks.exercises",
        "tplab.course.checks.predictions",
        f"tplab.course.chapters.ch{chapter:02d}",
    ):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
    _keep_modules()
    _keep_shell()


def _keep_modules() -> None:
    """Keep what the course's modules consist of, and others' that checks build on, if not yet kept."""
    for name, module in list(sys.modules.items()):
        if name in _modules or name == __name__ or not (name == "tplab" or name.startswith("tplab.") or name in OTHERS):
            continue
        _modules[name] = module
        if name in OTHERS:
            _kept.module(module, lambda key, value: not key.startswith("_") and is_code(value))
            continue
        _kept.module(module, _is_code, whole=True)
        for value in list(vars(module).values()):
            _keep(value)
        if name.startswith("tplab.course"):  # the register of exercises
            _tables.extend((value, {}) for value in vars(module).values() if isinstance(value, dict))
    for table, items in _tables:
        items.update({key: value for key, value in table.items() if key not in items})
    if "torch" in _modules:
        _kept.cls(_modules["torch"].Tensor)
        _kept.cls(_modules["torch"].nn.Module)


def _is_code(name: str, value: Any) -> bool:
    """Functions, classes and constants stay as they are while a notebook runs; other variables may change."""
    return isinstance(value, FunctionType | type | ModuleType) or name.isupper()


def _keep(value: Any) -> None:
    if not str(getattr(value, "__module__", "")).startswith("tplab"):
        return
    if isinstance(value, FunctionType):
        _kept.function(value)
    elif isinstance(value, type):
        _kept.cls(value)
        for part in vars(value).values():
            if isinstance(part, FunctionType):
                _kept.function(part)


def _keep_shell() -> None:
    """Keep how IPython runs a cell: whoever rewrites the check's cell, or catches what it raises, has a verdict."""
    shell = InteractiveShell.instance()
    # What exit() and quit() call. The kernel would end some time later, in whichever cell runs then.
    shell.ask_exit = _refuse_to_end  # type: ignore[attr-defined]
    if hasattr(shell, "kernel"):
        shell.kernel.do_shutdown = _refuse_to_end
    _kept.methods_of(shell)
    for part in ("input_transformer_manager", "displayhook", "events"):
        _kept.attribute(shell, part)
    manager = shell.input_transformer_manager
    for owner, hooks in (
        (shell, _HOOKS),
        (manager, [key for key, value in vars(manager).items() if type(value) is list]),
    ):
        for hook in hooks:
            _kept.list_in(owner, hook)
    for event in ("pre_execute", "pre_run_cell"):
        _kept.list_in(shell.events.callbacks, event)


def _refuse_to_end(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("this line would end the kernel, and with it all that the notebook has computed: take it out")


def remember(names: list[str], exercise: str = "") -> None:
    """Keep what these names of the notebook stand for now; after the setup, also the modules it has loaded."""
    if not exercise:
        _keep_modules()
    namespace = InteractiveShell.instance().user_ns
    for name in names:
        if name not in namespace:
            continue
        value = namespace[name]
        origin = str(getattr(value, "__module__", ""))
        if exercise and origin.startswith("tplab."):
            value = _Borrowed(name, origin, exercise)
        elif exercise:
            _name_its_cell(value, exercise)
        _answers[name] = value


def _name_its_cell(value: Any, exercise: str) -> None:
    """Reports say "your cell of exercise 4.2, line 7": here cells have other numbers than in the learner's notebook."""
    for part in [value, *vars(value).values()] if isinstance(value, type) else [value]:
        function = getattr(part, "__func__", part)  # of a static or a class method
        if isinstance(function, FunctionType):
            name_cell(function.__code__.co_filename, f"your cell of exercise {exercise}")


class _Borrowed:
    """Stands for an answer that is the course's own function; the check of its exercise is refused."""

    def __init__(self, name: str, origin: str, exercise: str):
        self.exercise = exercise
        self.message = f"{name} is the course's own, from {origin}. Write yours in the cell of exercise {exercise}."


def before_check(number: str) -> None:
    """Put everything back that was kept. Raises AssertionError where the answer is not the learner's."""
    sys.settrace(None)
    sys.setprofile(None)
    _put_back()
    for value in _answers.values():
        if isinstance(value, _Borrowed) and value.exercise == number:
            raise AssertionError(value.message)
    InteractiveShell.instance().user_ns.update(
        {name: value for name, value in _answers.items() if not isinstance(value, _Borrowed)}
    )


def after_check(number: str) -> None:
    """Raises AssertionError where something that was kept has been changed while the check ran."""
    changed = [name for name, found in _put_back().items() if not _is_torchs_own(name, found)]
    if changed:
        raise AssertionError(
            f"While the check of exercise {number} ran, your code changed {changed[0]}. "
            "A check that was changed says nothing about the answer; leave it as it is."
        )


def _is_torchs_own(name: str, found: Any) -> bool:
    """Whether torch itself has put `found`, a wrapper from one of its own files, in that place."""
    file = found.__code__.co_filename if isinstance(found, FunctionType) else ""
    return name in WRAPPED_BY_TORCH and file.startswith(str(Path(_modules["torch"].__file__ or "").parent))


def _put_back() -> dict[str, Any]:
    """Put everything back that was kept; returns the names of what had been changed, and what stood there."""
    changed = {name: None for name, module in _modules.items() if sys.modules.get(name) is not module}
    sys.modules.update(_modules)
    changed |= _kept.put_back()
    for table, items in _tables:
        table.update(items)
    torch = _modules.get("torch")
    if torch:  # a right answer is right whatever an experiment has left behind
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.set_grad_enabled(True)
    return changed
