"""A check that is a table: the known mistakes that run beside a wrong answer pick its question."""

import inspect
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest
import torch
import torch.distributed as dist

from tplab.course.checks import Case, Twin, random_tensor, trials
from tplab.course.checks.cases import FIRST_CALL, Batch, Place
from tplab.course.checks.choose import about_report, fits
from tplab.course.checks.differences import Difference, Differences
from tplab.course.checks.exercises import check
from tplab.course.checks.forms import alone
from tplab.course.checks.forms.alone import Alone, Call, one
from tplab.course.checks.trials import Expected, OnRanks, compare_case, exercise, question_for_case
from tplab.course.feedback.verdict import CheckFailed
from tplab.course.notebooks.mistakes import shared, tables

TABLE = """
## 90.81

### Which collective adds?
- no collective: `dist.all_reduce(y)` → `pass`
- when out: own x

### Is that the mean?
- the mean: `return y` → `return y / dist.get_world_size()`

### Is one added?
- one more: `return y` → `return y + 1`

### Who waits for whom?
- only rank 0 (fails): `dist.all_reduce(y)` → `dist.all_reduce(y) if dist.get_rank() == 0 else None`
- when stuck

### Which rank is missing from the group?
- when case of 2 ranks and report not part of group

### Which call doesn't pass its group?
- when in groups
- when case crashes and crash

### [between two other calls]
- never ends beside an answer: `return y` → `raise KeyError("a known mistake that ends in an error")`

## 90.82

### Which line overwrites x?
- overwrites x: `return x + 1` → `return x.zero_()`

### Is that two more?
- two more: `x + 1` → `x + 2`
"""


def more(x):
    return x + 1


def total(x):
    y = x.clone()
    dist.all_reduce(y)
    return y


SOURCES = {"90.81": inspect.getsource(total), "90.82": inspect.getsource(more)}


def the_trial() -> OnRanks:
    return OnRanks(
        cases=[Case()], draw=lambda case, generator, size: [random_tensor(generator, 9) for _ in range(size)],
        give=lambda case, xs, place: xs[place.index], run=lambda answer, case, x, group: {"out": answer(x)},
        right=lambda case, xs, place: {"out": torch.stack(xs).sum(0)}, terms=lambda case, xs, size: {"x": xs},
        world_sizes=(4, 2), without=(Twin.BFLOAT16,),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def exercise_90(chapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mistakes.md"
    path.write_text(TABLE, encoding="utf-8")

    def reference_answers(number, change=lambda source: source):
        namespace = {"dist": dist, "torch": torch, "__name__": "__main__"}
        exec(change(dedent(SOURCES[number])), namespace)
        return {name: namespace[name] for name in ("total", "more") if name in namespace}

    monkeypatch.setattr(trials, "table", lambda section: tables(path)[section])
    for module in (trials, alone):
        monkeypatch.setattr(module, "reference_answers", reference_answers)
    exercise("90.81", "Add", takes=["total"], trials=[the_trial()], passed="It adds.")


def question(answer) -> str:
    with pytest.raises(CheckFailed) as failed:
        check("90.81", answer)
    return failed.value.question


def test_a_right_answer_passes():
    assert "It adds." in str(check("90.81", total))


def test_what_an_answer_prints_stands_below_its_case(capsys):
    def printing(x):
        print("the answer", end=" ")
        print("prints")
        return total(x)

    check("90.81", printing)
    lines = capsys.readouterr().out.splitlines()
    printed = [line for line in lines if line.startswith("[rank 1]")]
    assert printed[:2] == ["[rank 1] p = 4, printing:", "[rank 1] the answer prints"]
    titles = [line for line in printed if line.endswith(":")]
    assert len(set(titles)) == len(titles) > 2, "each case has one title"


def test_an_answer_that_does_the_same_as_a_known_mistake_gets_its_question():
    def one_more(x):
        one = torch.ones(())
        y = x + one / dist.get_world_size()
        dist.all_reduce(y)
        return y

    assert question(one_more) == "Is one added?"


def test_a_mistake_that_nobody_listed_gets_a_question_by_its_symptom():
    def adds_zeros(x):
        dist.all_reduce(torch.zeros_like(x))
        return x.clone()

    assert question(adds_zeros) == "Which collective adds?"


def test_the_driver_sees_by_itself_that_a_rank_is_missing_or_counted_twice():
    def without_rank_2(x):
        y = x * (dist.get_rank() != 2)
        dist.all_reduce(y)
        return y

    assert question(without_rank_2) == shared("missing rank")

    def with_rank_2_twice(x):
        y = x * (1 + (dist.get_rank() == 2))
        dist.all_reduce(y)
        return y

    assert question(with_rank_2_twice) == shared("doubled rank")


def test_what_fits_nothing_gets_a_question_that_any_exercise_may_ask():
    def squares(x):
        y = x * x
        dist.all_reduce(y)
        return y

    assert question(squares) == shared("other")


def test_a_mistake_that_writes_into_what_it_is_given_leaves_the_others_alone():
    """The known mistakes run one after the other on the same call, and each has to see the values that it's about."""
    trial = Alone(
        calls=lambda generator: [Call(torch.arange(3.0), "one call")],
        run=lambda answer, call: one({"out": answer(call.given)}),
        right=lambda call: one({"out": call.given + 1}),
    )  # fmt: skip
    exercise("90.82", "Add one", takes=["more"], trials=[trial], passed="It adds.")
    with pytest.raises(CheckFailed) as failed:
        check("90.82", lambda x: x + 2)
    assert failed.value.question == "Is that two more?"


@pytest.mark.parametrize(
    ("shows", "report"), [("5 -> 6", "5 -> 6"), (lambda seen: f"5 -> {seen[0]['next']}", "5 -> 7")]
)
def test_a_call_that_is_not_about_ranks_shows_no_number_of_ranks(shows, report):
    trial = Alone(
        calls=lambda generator: [Call(5, "the successor of 5", shows=shows)],
        run=lambda answer, call: one({"next": answer(call.given)}),
        right=lambda call: one({"next": 6}),
    )  # fmt: skip
    exercise("90.82", "Add one", takes=["more"], trials=[trial], passed="It adds.")
    verdict = check("90.82", lambda x: x + 1)
    assert verdict.compared == "Right: next."
    assert "rank" not in verdict.tried
    with pytest.raises(CheckFailed) as failed:
        check("90.82", lambda x: x + 2)
    assert failed.value.headline == "Exercise 90.82, the successor of 5: wrong."
    assert failed.value.report == report


def test_ranks_that_wait_for_each_other_get_the_question_for_it():
    def only_one(x):
        if dist.get_rank() == 0:
            dist.all_reduce(x)
        return x

    assert question(only_one) == "Who waits for whom?"


def test_an_answer_that_never_ends_is_told_so_after_the_time_that_the_trial_grants():
    def rank_0_never_ends(x):
        while dist.get_rank() == 0:
            pass
        return total(x)

    exercise("90.81", "Add", takes=["total"], trials=[replace(the_trial(), timeout=1.0)], passed="It adds.")
    assert question(rank_0_never_ends) == shared("late")


@pytest.mark.parametrize("first", ["right", "wrong"])
def test_only_an_answer_whose_calls_differ_is_told_that_it_keeps_something(first):
    case, place = Case(twin=Twin.AGAIN), Place(0, (0,), 1)
    right = torch.arange(9.0, dtype=torch.float64)
    trial = replace(the_trial(), right=lambda case, problem, place: {"out": right})
    batch = Batch(1, [case], [[(None, place)]], [[]])
    seen = {"out": right.square(), FIRST_CALL: {"out": right if first == "right" else right.square()}}
    expected = Expected(trial, batch)
    differences, _ = compare_case(expected, 0, [seen])
    ask = question_for_case(expected, trial.table("90.81"), 0, [seen], differences, lambda mistake: None)
    assert ask == shared(Twin.AGAIN.value if first == "right" else "other")


@pytest.mark.parametrize("uses_observations", [False, True])
def test_what_is_right_is_computed_once_per_case_unless_it_depends_on_what_the_ranks_observed(uses_observations):
    calls = []

    def right(case, problem, place):
        calls.append(case)
        return {"out": place.observed[place.index]["drawn"] if uses_observations else 1}

    expected = Expected(replace(the_trial(), right=right), Batch(1, [Case()], [[(None, Place(0, (0,), 1))]], [[]]))
    for drawn in (5, 7):
        assert expected.of(0, [{"drawn": drawn}]) == [{"out": drawn if uses_observations else 1}]
    assert len(calls) == (2 if uses_observations else 1)


def test_a_question_about_a_failed_run_may_depend_on_the_case_and_on_its_groups():
    own = the_trial().table("90.81")
    missing, dropped = "Which rank is missing from the group?", "Which call doesn't pass its group?"
    assert (
        about_report(own, "0 is not part of group", stuck=False, note="a group of 2 ranks", in_groups=True) == missing
    )
    assert (
        about_report(own, "0 is not part of group", stuck=False, note="a group of 4 ranks", in_groups=True) == dropped
    )
    assert about_report(own, "", stuck=False, note="what crashes") == dropped
    assert about_report(own, "", stuck=True, note="what crashes") == "Who waits for whom?"
    assert about_report(own, "", stuck=False) == ""


def test_a_symptom_may_name_the_case_and_say_that_only_some_ranks_are_wrong():
    def wrong(*ranks):
        return Differences(4, [Difference("out", rank, "value", "") for rank in ranks], note="x with 3 dimensions")

    assert fits("some out", wrong(0, 3))
    assert not fits("some out", wrong(0, 1, 2, 3))
    assert not fits("some dx", wrong(0))
    assert fits("out and case 3 dim", wrong(0))
    assert not fits("out and case 2 dim", wrong(0))
