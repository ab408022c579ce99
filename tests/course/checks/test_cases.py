"""Cases: each one runs at every world size and in groups, every rank is compared, and no failure is swallowed."""

from dataclasses import dataclass, replace

import pytest
import torch.distributed as dist

from tests.course.checks import refused
from tplab.course.checks import twins
from tplab.course.checks.cases import GROUPS, Case, random_tensor
from tplab.course.checks.exercises import check
from tplab.course.checks.observation import observe
from tplab.course.checks.trials import OnRanks, exercise
from tplab.course.checks.twins import Twin
from tplab.course.notebooks.mistakes import Row

pytestmark = pytest.mark.usefixtures("table")


@dataclass(frozen=True)
class Length(Case):
    n: int = 3

    def describe(self, name: str) -> str:
        return f"{name} of {self.n} numbers"


WHOSE = "Which call was not given its group?"
ROWS = (Row(WHOSE, "", symptoms=("in groups",)), Row("Whose numbers are missing?", "", symptoms=("only out",)))


SUM = OnRanks(
    cases=(Length(), Length(n=2, groups=GROUPS)), draw=lambda case, generator, size: random_tensor(generator, size, 3),
    give=lambda case, problem, place: problem[place.index],
    run=lambda answer, case, given, group: observe(lambda x: answer(x, group), None, inputs={"x": given}),
    right=lambda case, problem, place: {"out": problem.sum(0), "forward traffic": place.traffic(("all_reduce", 3))},
    world_sizes=(4, 2),
)  # fmt: skip
exercise("90.71", "a sum", takes=["total"], trials=[SUM], passed="")


def total(x, group):
    y = x.detach().clone()
    dist.all_reduce(y, group=group)
    return y + 0 * x


def test_a_group_that_was_ignored_is_asked_about():
    failure = refused("90.71", lambda x, group: total(x, None))
    headline = "Exercise 90.71, p = 4, <lambda> of 2 numbers in groups [0, 2] and [1, 3]: wrong"
    assert failure.headline.startswith(headline)
    assert failure.question.endswith(WHOSE)


def test_an_answer_that_fails_only_when_cases_follow_one_another_is_refused():
    def answer(x, group, calls=[]):  # noqa: B006 (that is the mistake)
        calls.append(x)
        if len(calls) > 1:
            raise RuntimeError("the second call in a process")
        return total(x, group)

    failure = refused("90.71", answer)
    assert "the second call in a process" in failure.report
    assert failure.question == twins.question(Twin.BETWEEN)


def test_what_is_expected_may_depend_on_what_the_group_observed():
    seen = []

    def drawn_by_ranks(case, problem, place):
        seen.append((place.ranks, [observed["out"].tolist() for observed in place.observed]))
        return {"out": place.observed[place.index]["out"]}

    trial = replace(SUM, cases=[Length(n=1, groups=GROUPS)], right=drawn_by_ranks, world_sizes=[4])
    exercise("90.78", "anything", takes=["anything"], trials=[trial], passed="")
    check("90.78", lambda x, group: 0 * x[:1] + dist.get_rank())
    assert seen == [((0, 2), [[0], [2]]), ((1, 3), [[1], [3]])] * 2
