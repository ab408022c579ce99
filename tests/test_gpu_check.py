"""`benchmarks.gpu_check`: what runs next, what is kept from call to call, and what the report says. No GPU needed."""

import itertools
import os

import pytest

from benchmarks.gpu_check import report, runner
from benchmarks.gpu_check.items import Item, items
from benchmarks.gpu_check.runner import FAILED, PASSED, UNFINISHED, Result, affordable
from tests import ROOT


def plan(**limits: float) -> list[Item]:
    return [Item(name, ("-c", "pass"), limit) for name, limit in limits.items()]


@pytest.mark.parametrize(
    ("needs", "limits", "until", "ran"),
    [
        ((10, 20, 5), (60, 60, 60), 700, {"a": 60, "b": 60, "c": 60}),  # in order, each for at most its limit
        ((70, 60, 10), (80, 100, 20), 100, {"a": 80, "c": 20}),  # a later item uses the rest: the next one needs more
        ((1000,), (60,), 40, {"a": 40}),  # the end of a call is the end of its items
    ],
)
def test_which_items_run_and_for_how_long(needs, limits, until, ran):
    took, found = dict(zip("abc", needs, strict=False)), {}
    items = plan(**dict(zip("abc", limits, strict=False)))
    for item, seconds in affordable(items, lambda: sum(min(took[name], found[name]) for name in found), until):
        found[item.name] = seconds
    assert found == ran


def test_another_call_goes_on_where_the_last_one_stopped_on_the_same_machine_and_code(tmp_path):
    path, items = tmp_path / "results.json", plan(a=60, b=60, c=60)
    states = {"a": PASSED, "b": UNFINISHED}
    first = {name: Result(state, 1.5, "text") for name, state in states.items()}
    runner.write(path, "this machine", first)
    second = runner.read(path, "this machine")
    assert second == first
    assert [item.name for item in runner.left(items, second)] == ["b", "c"]
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"], "it is replaced as a whole"
    assert runner.read(path, "another") == {}
    path.write_text("half of a fi")
    assert runner.read(path, "this machine") == {}


PYTEST = ("-m", "pytest", "-c", os.devnull, "-p", "no:cacheprovider", "test_of_a_machine.py")
HANGS = "import signal; signal.pause()"


@pytest.mark.parametrize(
    ("command", "limit", "seconds", "state", "says"),
    [
        (("-c", "print('figures')"), 200, 200, PASSED, "figures"),
        (("-c", "raise SystemExit('broken')"), 200, 200, FAILED, "broken"),
        (("-c", HANGS), 1, 1, FAILED, "1 s, its limit"),
        (("-c", HANGS), 60, 1, UNFINISHED, ""),
        ((*PYTEST, "-k", "no_such_test"), 200, 200, FAILED, "1 deselected"),
    ],
)
def test_an_item_is_judged_by_its_status(command, limit, seconds, state, says, tmp_path):
    (tmp_path / "test_of_a_machine.py").write_text("def test_passes(): pass\n")
    found = runner.run(tmp_path, Item("one", command, limit, {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}), seconds)
    assert found.state == state
    assert says in found.output


def test_an_item_that_needs_a_missing_module_says_so_and_is_tried_again(tmp_path):
    item = Item("one", ("-c", "pass"), 60, modules=("json", "no_such_module"))
    found = runner.run(tmp_path, item, 60)
    assert found.state == "can't run without no_such_module"
    assert runner.left([item], {"one": found}) == [item]


@pytest.mark.parametrize(("says", "state"), [("", PASSED), (" passed", FAILED)])
def test_skipping_every_test_is_a_success_only_where_that_is_expected(says, state, tmp_path):
    (tmp_path / "test_of_a_machine.py").write_text("import pytest\n\ndef test_skips(): pytest.skip('no GPU')\n")
    item = Item("tests", PYTEST, 200, {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, says=says)
    assert runner.run(tmp_path, item, 200).state == state


def test_a_test_that_hangs_does_not_hide_what_has_failed_before(tmp_path):
    source = f"def test_fails(): assert 1 + 1 == 3\n\ndef test_hangs():\n    {HANGS}\n"
    (tmp_path / "test_of_a_machine.py").write_text(source)
    item = Item("tests", PYTEST, 1, {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})
    for seconds in (1, 5, 25, 125):  # the first that are enough to start pytest
        found = runner.run(tmp_path, item, seconds)
        if "1 failed" in found.output:
            break
    assert found.state == FAILED
    assert "assert (1 + 1) == 3" in found.output
    assert "KeyboardInterrupt" in found.output


def test_every_item_names_files_and_modules_that_exist():
    for where, gpus in itertools.product(("gpu", "emulated", "cpu"), (1, 2)):
        found = items(where, gpus)
        assert len({item.name for item in found}) == len(found)
        assert any("several GPUs" in item.name for item in found) == (gpus > 1)
        for item in found:
            paths = [ROOT / part for part in item.command if part.startswith(("tests/", "solutions/"))]
            module = ROOT / item.command[1].replace(".", "/")
            assert all(path.exists() for path in paths)
            assert paths or any(module.with_suffix(suffix).exists() for suffix in ("", ".py"))
    assert sum(item.limit for item in items("gpu", 1)[:3]) < 600  # what matters most fits into one command


def test_the_report_shows_failures_and_what_is_left_and_names_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr("getpass.getuser", lambda: "grace")
    monkeypatch.setattr("platform.node", lambda: "eniac.example.org")
    chosen = plan(one=10, two=10, three=10, four=10)
    text = f"eniac:12:13 [0] NCCL WARN from 10.0.0.7<4711>, grace in {ROOT}/tests and {tmp_path}/x\n```"
    text += "\n=========== 1 failed, 2 passed in 61.60s (0:01:01) ==========="
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = {"one": Result(FAILED, 61.6, text), "two": Result(PASSED, 1.0, "figures")}
    said = report.text_of({"PyTorch": "2.13"}, "cpu", chosen, found)
    assert "rehearsal on a CPU" in said
    assert "| one | failed: 1 failed, 2 passed in 61.60s (0:01:01) | 62 |" in said
    assert "<host>:12:13 [0] NCCL WARN from <address><4711>, <user> in ./tests and <temporary>/x\n'''" in said
    assert [name for name in (str(ROOT), str(tmp_path), "grace", "eniac", "10.0.0.7") if name in said] == []
    assert "figures" in said
    assert "Not reached (call it again to go on): three, four." in said
