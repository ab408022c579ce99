"""What a rank had to import, later ranks have from the start; but a learner's own file is read anew each time."""

import importlib
import sys
import time
from pathlib import Path

import pytest
import torch

import tplab
from tplab.runtime.forkserver import fork_server, may_be_preloaded

UNUSUAL = "sndhdr" if sys.version_info < (3, 13) else "wave"  # of Python's own, and nothing else imports it


def a_new_server() -> None:
    """End the fork server, so that the next launch starts one that knows nothing yet."""
    fork_server()._process.kill()
    fork_server()._process.wait()


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


DRAWS = "import torch; torch.manual_seed(5); drawn = torch.rand(3)"


def test_a_preloaded_module_that_draws_numbers_or_fails_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "draws_numbers.py").write_text(DRAWS)
    (tmp_path / "fails.py").write_text("1 / 0")
    (tmp_path / "exits.py").write_text("raise SystemExit")
    a_new_server()

    def first_number(drawn: str) -> tuple[bool, float]:
        return drawn in sys.modules, torch.rand(1).item()

    expected = tplab.launch(first_number, 1, args=("",), backend="gloo")[0][1]
    fork_server().preload(["fails", "exits", "no_such_module", "draws_numbers"])
    end = time.monotonic() + 60
    while not (found := tplab.launch(first_number, 1, args=("draws_numbers",), backend="gloo")[0])[0]:
        assert time.monotonic() < end, "the fork server has not imported it after a minute"
    assert found[1] == expected


def test_on_a_machine_with_gpus_only_tplabs_own_modules_are_preloaded() -> None:
    """Others may initialize CUDA, which no rank could use then."""
    names = ["tplab.tensor.linear", "transformers", "tplab_of_someone_else"]
    assert [may_be_preloaded(name, has_gpu=True) for name in names] == [True, False, False]
    assert may_be_preloaded("transformers", has_gpu=False)
