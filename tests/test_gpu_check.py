"""`benchmarks.gpu_check`: what runs next, what is kept from call to call, and what the report says. No GPU needed."""

import os

import pytest

from benchmarks.gpu_check import report, runner
from benchmarks.gpu_check.items import Item, items
from benchmarks.gpu_check.runner import FAILED, PASSED, UNFINISHED, Result, affordable
from tests import ROOT


def plan(**limits: float) -> list[Item]:
    return [Item(name, ("-c", "pass"), limit) for name, limit in limits.items()]


def test_items_run_in_order_and_a_later_one_uses_the_rest_of_the_time():
    took, found = {"a": 70, "b": 60, "c": 10}, {}
    items = plan(a=80, b=100, c=20)
    for item, seconds in affordable(items, lambda: sum(min(took[name], found[name]) for name in found), 100):
        found[item.name] = seconds
    assert found == {"a": 80, "c": 20}


def test_another_call_goes_on_where_the_last_one_stopped_on_the_same_machine_and_code(tmp_path):
    path, items = tmp_path / "results.json", plan(a=60, b=60, c=60, d=60)
    first = {name: Result(state, 1.5, "text") for name, state in (("a", PASSED), ("b", FAILED), ("c", UNFINISHED))}
    runner.write(path, "this machine", first)
    second = runner.read(path, "this machine")
    assert second == first
    assert [item.name for item in runner.left(items, second)] == ["c", "d"]
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
        (("-c", HANGS), 1, 1, FAILED, "1 s"),
        (("-c", HANGS), 60, 1, UNFINISHED, ""),
        ((*PYTEST, "-k", "no_such_test"), 200, 200, FAILED, "1 deselected"),
    ],
)
def test_an_item_is_judged_by_its_status(command, limit, seconds, state, says, tmp_path):
    (tmp_path / "test_of_a_machine.py").write_text("def test_passes(): pass\n")
    found = runner.run(tmp_path, Item("one", command, limit, {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}), seconds)
    assert found.state == state
    assert says in found.output


@pytest.mark.parametrize(("says", "state"), [("", PASSED), (" passed", FAILED)])
def test_skipping_every_test_is_a_success_only_where_that_is_expected(says, state, tmp_path):
    (tmp_path / "test_of_a_machine.py").write_text("import pytest\n\ndef test_skips(): pytest.skip('no GPU')\n")
    item = Item("tests", PYTEST, 200, {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, says=says)
    assert runner.run(tmp_path, item, 200).state == state


def test_every_item_names_files_and_modules_that_exist():
    for item in items("gpu", 2):
        paths = [ROOT / part for part in item.command if part.startswith(("tests/", "solutions/"))]
        module = ROOT / item.command[1].replace(".", "/")
        assert all(path.exists() for path in paths)
        assert paths or any(module.with_suffix(suffix).exists() for suffix in ("", ".py"))


def test_the_report_shows_failures_and_what_is_left_and_names_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr("getpass.getuser", lambda: "grace")
    monkeypatch.setattr("platform.node", lambda: "eniac.example.org")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    text = f"eniac:12:13 [0] NCCL WARN from 10.0.0.7<4711>, grace in {ROOT}/tests and {tmp_path}/x\n```"
    text += "\n=========== 1 failed, 2 passed in 61.60s (0:01:01) ==========="
    found = {"one": Result(FAILED, 61.6, text), "two": Result(PASSED, 1.0, "figures")}
    said = report.text_of({"PyTorch": "2.13"}, "cpu", plan(one=10, two=10, three=10), found)
    assert "| one | failed: 1 failed, 2 passed in 61.60s (0:01:01) | 62 |" in said
    assert "<host>:12:13 [0] NCCL WARN from <address><4711>, <user> in ./tests and <temporary>/x\n'''" in said
    assert [name for name in (str(ROOT), str(tmp_path), "grace", "eniac", "10.0.0.7") if name in said] == []
    (left,) = [line for line in said.splitlines() if "three" in line]
    assert not left.startswith(("|", "#")), "it has neither a row nor an output"
