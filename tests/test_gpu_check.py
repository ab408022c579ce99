"""`benchmarks.gpu_check`: what runs next, what is kept from call to call, and what the report says. No GPU needed."""

import itertools
import os
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu_check import report, runner
from benchmarks.gpu_check.items import Item, items
from benchmarks.gpu_check.results import FAILED, PASSED, STOPPED, UNFINISHED, Outcome, Result, Results
from benchmarks.gpu_check.schedule import not_reached, work
from tests import ROOT

# Which item runs next


class Clock:
    """A clock that only a runner moves. `needs` says how many seconds each item takes."""

    def __init__(self, **needs: float) -> None:
        self.time, self.needs, self.ran = 0.0, needs, list[str]()

    def now(self) -> float:
        return self.time

    def run(self, item: Item, result: Result, seconds: float) -> None:
        took = min(seconds, self.needs[item.name])
        self.needs[item.name] -= took
        self.time += took
        self.ran.append(item.name)
        result.state = UNFINISHED if self.needs[item.name] else PASSED


def plan(**limits: float) -> list[Item]:
    return [Item(name, ("-c", "pass"), limit) for name, limit in limits.items()]


def results(tmp_path: Path, of: str = "this machine") -> Results:
    return Results.read(tmp_path / "results.json", of)


@pytest.mark.parametrize(
    ("needs", "limits", "until", "ran", "time"),
    [
        ((10, 20, 5), (60, 60, 60), 700, "abc", 35),  # in order, and once
        ((70, 60, 10), (80, 100, 20), 100, "ac", 80),  # a later item uses the rest, since the next one needs more
        ((100, 10), (60, 60), 200, "aba", 110),  # no more than the limit until every other has had its turn
        ((1000,), (60,), 100, "aa", 100),  # the end of a call is the end of its items
    ],
)
def test_which_items_run_and_for_how_long(needs, limits, until, ran, time, tmp_path):
    clock, found = Clock(**dict(zip("abc", needs, strict=False))), results(tmp_path)
    items = plan(**dict(zip("abc", limits, strict=False)))
    work(items, found, clock.run, clock.now, until)
    assert ("".join(clock.ran), clock.time) == (ran, time)
    assert [item.name for item in not_reached(items, found)] == [name for name in clock.needs if clock.needs[name]]
    if not not_reached(items, found):
        work(items, found, clock.run, clock.now, 1000)
        assert "".join(clock.ran) == ran


def test_another_call_goes_on_where_the_last_one_stopped(tmp_path):
    clock, items = Clock(a=50, b=50), plan(a=60, b=60)
    first = results(tmp_path)
    work(items, first, clock.run, clock.now, 90)
    first.items["a"].tests = {"one": Outcome("passed", 1.5, "text")}
    first.write()
    second = results(tmp_path)
    assert second.items == first.items
    work(items, second, clock.run, clock.now, 190)
    assert clock.ran == ["a", "b", "b"]
    assert not_reached(items, second) == []


def test_results_of_other_code_or_another_machine_are_not_kept(tmp_path):
    found = results(tmp_path)
    found.items["a"] = Result(PASSED)
    found.write()
    assert results(tmp_path).items
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"], "it is replaced as a whole"
    assert results(tmp_path, of="another").items == {}
    found.path.write_text("half of a fi")
    assert results(tmp_path).items == {}


# Running an item

TESTS = """
import os, pathlib, signal, pytest

def test_passes(): pass

def test_fails():
    print("what it printed")
    assert 1 + 1 == 3

def test_hangs():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])  # so that pytest can't stop it
    while not pathlib.Path("go").exists():
        signal.sigtimedwait([signal.SIGUSR1], 0.05)

def test_ends_its_process():
    os._exit(3)

def test_skips():
    pytest.skip("needs something")

def test_comes_last(): pass
"""


def of_pytest(tmp_path: Path, source: str, *selected: str) -> Item:
    (tmp_path / "test_of_a_machine.py").write_text(source)
    command = (
        "-m", "pytest", "-c", os.devnull, f"--rootdir={tmp_path}", "-p", "no:cacheprovider",
        "-p", "benchmarks.gpu_check.outcomes", "test_of_a_machine.py", *selected,
    )  # fmt: skip
    environment = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # pytest starts sooner
    return Item("tests", command, 200, environment, test_limit=5)


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(runner, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(runner, "GRACE_SECONDS", 0.5)


@pytest.mark.usefixtures("impatient")
def test_a_test_that_hangs_or_ends_its_process_is_stopped_and_the_others_run(tmp_path):
    found, saved = Result(), list[int]()
    runner.run(tmp_path, of_pytest(tmp_path, TESTS), found, 200, lambda: saved.append(len(found.tests)))
    outcomes = {name.partition("::test_")[2]: test for name, test in found.tests.items()}
    assert {name: test.outcome for name, test in outcomes.items()} == {
        "passes": "passed", "fails": "failed", "hangs": STOPPED, "ends_its_process": STOPPED, "skips": "skipped",
        "comes_last": "passed",
    }  # fmt: skip
    assert "assert (1 + 1) == 3" in outcomes["fails"].text
    assert "what it printed" in outcomes["fails"].text
    assert "needs something" in outcomes["skips"].text
    assert "status 3" in outcomes["ends_its_process"].text
    assert (found.state, found.expected) == (FAILED, 6)
    assert {min(saved), max(saved)} == {0, 6}  # also while it runs


@pytest.mark.usefixtures("impatient")
def test_a_test_that_was_cut_by_the_end_of_a_call_runs_again(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "GRACE_SECONDS", 1000.0)
    item, found = of_pytest(tmp_path, TESTS, "-k", "passes or hangs"), Result()
    runner.run(tmp_path, item, found, 4, lambda: None)
    assert found.state == UNFINISHED
    assert not [name for name in found.tests if "hangs" in name]
    (tmp_path / "go").touch()
    runner.run(tmp_path, item, found, 200, lambda: None)
    assert (found.state, len(found.tests)) == (PASSED, 2)


def test_skipping_every_test_is_no_success_on_a_gpu_and_neither_is_a_selection_without_tests(tmp_path):
    item = of_pytest(tmp_path, TESTS, "-k", "skips")
    empty = replace(item, command=(*item.command[:-1], "no_such_test"))
    for chosen, state in ((replace(item, may_skip=True), PASSED), (item, FAILED), (empty, FAILED)):
        found = Result()
        runner.run(tmp_path, chosen, found, 200, lambda: None)
        assert found.state == state


@pytest.mark.parametrize(
    ("program", "limit", "state", "says"),
    [("print('figures')", 200, PASSED, "figures"), ("raise SystemExit('broken')", 200, FAILED, "broken"),
     ("import signal; signal.pause()", 1, FAILED, "1 s, its limit")],
)  # fmt: skip
def test_a_program_is_judged_by_its_status(program, limit, state, says, tmp_path):
    found = Result()
    runner.run(tmp_path, Item("program", ("-c", program), limit), found, limit, lambda: None)
    assert found.state == state
    assert says in found.output


# What there is to run


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
            assert item.may_skip == (where == "cpu" and item.is_pytest)
    assert sum(item.limit for item in items("gpu", 1)[:3]) < 600  # what matters most fits into one command


# The report


def test_the_report_shows_failures_and_what_is_left_and_names_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr("getpass.getuser", lambda: "grace")
    monkeypatch.setattr("platform.node", lambda: "eniac.example.org")
    chosen = [Item("one", ("-m", "pytest"), 10, test_limit=1), *plan(two=10, three=10, four=10)]
    text = f"eniac:12:13 [0] NCCL WARN from 10.0.0.7<4711>, grace in {ROOT}/tests and {tmp_path}/x\n```"
    tests = {
        "t::passes": Outcome("passed", 1),
        "t::fails": Outcome("failed", 1, text),
        "t::skips": Outcome("skipped", 0, "why"),
    }
    found = Results(tmp_path / "results.json", "x", {"one": Result(FAILED, 61.6, "", tests, 4), "two": Result(PASSED)})
    found.items["two"].output = "figures"
    folders = {str(ROOT): ".", str(tmp_path): "<temporary>"}
    said = report.text_of({"PyTorch": "2.13"}, "cpu", chosen, found, {"four": ["nbval"]}, folders)
    assert "rehearsal on a CPU" in said
    assert "| one | failed: 1 failed, 1 left, 1 passed, 1 skipped | 62 |" in said
    assert "<host>:12:13 [0] NCCL WARN from <address><4711>, <user> in ./tests and <temporary>/x\n'''" in said
    assert [name for name in (str(ROOT), str(tmp_path), "grace", "eniac", "10.0.0.7") if name in said] == []
    assert "t::passes" not in said
    assert "1 skipped: why" in said
    assert "figures" in said
    assert "Not reached (call it again to go on): three, four." in said
    assert "nbval" in said
