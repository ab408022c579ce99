"""What a rank had to import, later ranks have from the start; but a learner's own file is read anew each time."""

import importlib
import os
import sys
import time
from pathlib import Path

import pytest
import torch

import tplab
from tplab.runtime import preload
from tplab.runtime.forkserver import fork_server

UNUSUAL = "sndhdr" if sys.version_info < (3, 13) else "wave"  # of Python's own, and nothing else imports it


def there_and_imported(name: str) -> bool:
    there = name in sys.modules
    importlib.import_module(name)
    return there


def import_both(name: str) -> tuple[bool, int]:
    """Whether the unusual module was there already, and what stands in the learner's file `name`."""
    value = importlib.import_module(name).value
    return there_and_imported(UNUSUAL), value


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_ranks_find_what_earlier_ranks_imported_but_read_a_learners_own_file_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    own = tmp_path / "learners_own.py"
    own.write_text("value = 1")
    fork_server().stop()  # a new one, which knows nothing yet
    assert tplab.launch(import_both, 2, args=(own.stem,), backend="gloo") == [(False, 1)] * 2
    end = time.monotonic() + 60
    while tplab.launch(there_and_imported, 2, args=(UNUSUAL,), backend="gloo") != [True, True]:
        assert time.monotonic() < end, "the fork server has not imported it after a minute"
    own.write_text("value = 22")  # another length, or Python's cache would take it for the same file within a second
    assert tplab.launch(import_both, 2, args=(own.stem,), backend="gloo") == [(True, 22)] * 2


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """module(source) is the name of an installed module that is not imported yet."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(preload, "_INSTALLED", (str(tmp_path), os.path.dirname(os.__file__)))

    def write(source: str) -> str:
        name = "to_be_preloaded"
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / f"{name}.py").write_text(source)
        importlib.invalidate_caches()
        return name

    yield write
    sys.modules.pop("to_be_preloaded", None)


def wants(*modules: str, has_gpu: bool = False) -> preload.Wanted:
    wanted = preload.Wanted(has_gpu)
    wanted.add(modules)
    return wanted


@pytest.mark.parametrize("source", ["1 / 0", "raise SystemExit"])
def test_a_module_that_cannot_be_imported_does_no_harm_and_is_not_tried_again(source: str, module) -> None:
    broken = module(source)
    wanted = wants(broken, "os", "no_such_module")
    assert len(wanted) == 2
    for left in (1, 0):
        wanted.import_next()
        assert len(wanted) == left
    wanted.add([broken, "no_such_module"])
    assert len(wanted) == 0


def test_a_learners_own_file_with_the_name_of_an_installed_module_is_not_imported(module, monkeypatch) -> None:
    name = module("")
    monkeypatch.setattr(preload, "_INSTALLED", (os.path.dirname(os.__file__),))
    wants(name).import_next()
    assert name not in sys.modules


ON_A_GPU = {  # what a module does -> whether it's imported on a machine with GPUs
    "computes on the CPU": ("value = 1", True),
    "initializes CUDA": ("import torch; torch.cuda.is_initialized = lambda: True", False),
    "ends the process": ("import os; os._exit(3)", False),
}


@pytest.mark.parametrize(("source", "imported"), ON_A_GPU.values(), ids=ON_A_GPU)
def test_a_module_that_would_initialize_cuda_is_left_to_the_ranks(source: str, imported: bool, module) -> None:
    name = module(source)
    wants(name, has_gpu=True).import_next()
    assert (name in sys.modules) == imported
    assert not torch.cuda.is_initialized()


def test_random_numbers_are_those_of_a_process_that_did_not_import(module) -> None:
    wanted = wants(module("import torch; torch.manual_seed(5); drawn = torch.rand(3)"))
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    wanted.import_next()
    assert "to_be_preloaded" in sys.modules
    assert torch.rand(2).equal(expected)
