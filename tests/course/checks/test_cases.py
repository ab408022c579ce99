"""Cases, their groups and their twins. The tables of mistakes hold most of what can be wrong with an answer in them."""

import re
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist

from tests import saying
from tests.course.checks import refused
from tplab.course.checks import twins
from tplab.course.checks.cases import GROUPS, Case, random_tensor
from tplab.course.checks.exercises import check
from tplab.course.checks.forms.operators import ADD, COPY, operator
from tplab.course.checks.observation import observe
from tplab.course.checks.trials import OnRanks, exercise
from tplab.course.checks.twins import Twin
from tplab.course.notebooks.mistakes import shared

pytestmark = pytest.mark.usefixtures("table")


@dataclass(frozen=True)
class Length(Case):
    n: int = 3

    def describe(self, name: str) -> str:
        return f"{name} of {self.n} numbers"


SUM = OnRanks(
    cases=(Length(), Length(n=2, groups=GROUPS)), draw=lambda case, generator, size: random_tensor(generator, size, 3),
    give=lambda case, problem, place: problem[place.index],
    run=lambda answer, case, given, group: observe(lambda x: answer(x, group), None, inputs={"x": given}),
    right=lambda case, problem, place: {
        "out": problem.sum(0), "dx": torch.zeros(3, dtype=torch.float64),
        "forward traffic": place.traffic(("all_reduce", 3)), "backward traffic": place.traffic(),
    },
    world_sizes=(4, 2),
)  # fmt: skip
exercise("90.71", "a sum", takes=["total"], trials=[SUM], passed="")


def total(x, group):
    y = x.detach().clone()
    dist.all_reduce(y, group=group)
    return y + 0 * x


def test_an_answer_that_fails_only_when_cases_follow_one_another_is_refused():
    def answer(x, group, calls=[]):  # noqa: B006 (that is the mistake)
        calls.append(x)
        if len(calls) > 1:
            raise RuntimeError("the second call in a process")
        return total(x, group)

    failure = refused("90.71", answer)
    assert "the second call in a process" in failure.report
    assert failure.question == twins.question(Twin.BETWEEN)


def test_a_launch_may_take_as_long_as_the_trial_says(monkeypatch):
    given = []

    def run_ranks(*args, timeout, **options):
        given.append(timeout)
        raise RuntimeError("not run")

    monkeypatch.setattr("tplab.course.checks.run_answer.run_ranks", run_ranks)
    exercise("90.78", "a sum", takes=["total"], trials=[replace(SUM, timeout=7.0)], passed="")
    assert "not run" in refused("90.78", total).report
    assert set(given) == {7.0}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda: torch.set_grad_enabled(False), "gradients"),
        (lambda: torch.set_default_dtype(torch.float64), "torch.float64"),
    ],
    ids=["gradients", "dtype"],
)
def test_a_setting_that_an_answer_changes_is_noticed_and_restored_for_the_next_case(change, says):
    def answer(x, group):
        assert torch.is_grad_enabled()
        assert torch.get_default_dtype() == torch.float32
        y = total(x, group)
        if len(x) == 2:
            change()
        return y

    trial = OnRanks(
        cases=(Length(), Length(n=2), Length()), world_sizes=(2,), without=tuple(Twin),
        draw=lambda case, generator, size: random_tensor(generator, case.n),
        run=lambda answer, case, given, group: {"out": answer(given, group)},
        right=lambda case, problem, place: {"out": 2 * problem},
    )  # fmt: skip
    exercise("90.77", "a sum", takes=["total"], trials=[trial], passed="")
    failure = refused("90.77", answer)
    (row,) = failure.rows
    assert says in row[2]
    assert failure.question == shared("settings")


def test_an_operator_has_to_be_an_autograd_function():
    exercise("90.76", "f", takes=["f"], trials=[operator("f", COPY, ADD, of="f")], passed="")
    failure = refused("90.76", lambda x: x)
    assert re.search(saying("TypeError", "torch.autograd.Function"), failure.report)


calls: set = set()


def wrong_the_second_time(x, group):
    more = (key := str(x.tolist())) in calls
    calls.add(key)
    return total(x, group) + more


def test_a_second_call_gets_fresh_inputs_and_has_to_be_right():
    trial = replace(
        SUM, run=lambda answer, case, given, group: {"out": answer(given, group)},
        right=lambda case, problem, place: {"out": problem.sum(0)},
    )  # fmt: skip
    exercise("90.79", "a sum", takes=["total"], trials=[trial], passed="")
    check("90.79", lambda x, group: x.copy_(total(x, group)))
    failure = refused("90.79", wrong_the_second_time)
    assert Twin.AGAIN.value in failure.headline
    assert failure.question == shared(Twin.AGAIN.value)
