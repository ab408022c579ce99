"""What a rank had to import, later ranks have from the start; but a learner's own file is read anew each time."""

import importlib
import sys
import time
from pathlib import Path

import pytest
import torch

import tplab
from tplab.runtime import forkserver
from tplab.runtime.forkserver import fork_server, import_some, may_be_preloaded

UNUSUAL = "sndhdr" if sys.version_info < (3, 13) else "wave"  # of Python's own, and nothing else imports it


def a_new_server() -> None:
    """End the fork server, so that the next launch starts one that knows nothing yet."""
    process = fork_server()._process  # once it's killed, `fork_server` may start another one
    process.kill()
    process.wait()


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
    a_new_server()
    assert tplab.launch(import_both, 2, args=(own.stem,), backend="gloo") == [(False, 1)] * 2
    end = time.monotonic() + 60
    while tplab.launch(there_and_imported, 2, args=(UNUSUAL,), backend="gloo") != [True, True]:
        assert time.monotonic() < end, "the fork server has not imported it after a minute"
    own.write_text("value = 22")  # another length, or Python's cache would take it for the same file within a second
    assert tplab.launch(import_both, 2, args=(own.stem,), backend="gloo") == [(True, 22)] * 2


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the import path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_preloaded_module_that_draws_numbers_or_fails_changes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forkserver, "is_installed", lambda file: file.startswith(str(folder)))
    (folder / "draws_numbers.py").write_text("import torch; torch.manual_seed(5); drawn = torch.rand(3)")
    (folder / "fails.py").write_text("1 / 0")
    (folder / "exits.py").write_text("raise SystemExit")
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    names = ["fails", "exits", "no_such_module", "__main__", "draws_numbers"]
    while names:
        import_some(names, has_gpu=False)
    assert sys.modules.pop("draws_numbers", None)
    assert torch.rand(2).equal(expected)


def test_a_learners_own_file_with_the_name_of_an_installed_module_is_not_preloaded(folder: Path) -> None:
    """A rank with another import path may have found the installed module."""
    (folder / "a_package").mkdir()
    for file in ("a_module.py", "a_package/__init__.py", "a_package/part.py"):
        (folder / file).write_text("")
    names = ["a_module", "a_package.part"]
    while names:
        import_some(names, has_gpu=False)
    assert not {"a_module", "a_package"} & sys.modules.keys()


def test_on_a_machine_with_gpus_only_tplabs_own_modules_are_preloaded() -> None:
    """Others may initialize CUDA, which no rank could use then."""
    names = ["tplab.tensor.linear", UNUSUAL, "tplab_of_someone_else"]
    assert [may_be_preloaded(name, has_gpu=True) for name in names] == [True, False, False]
    assert may_be_preloaded(UNUSUAL, has_gpu=False)
