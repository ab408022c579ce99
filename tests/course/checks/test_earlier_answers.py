"""A failed check names the earlier exercise whose wrong answer the failed one uses."""

import json

import pytest

from tests import ROOT
from tests.chapter_runner import chapter, load_chapter_namespace, run_check, swap_all, wrong_source
from tplab.course.checks.earlier_answers import _used, earlier_answers
from tplab.course.feedback.verdict import CheckFailed
from tplab.course.grade.check_notebook import Verdict, check_notebook
from tplab.course.notebooks.cells import read_notebook
from tplab.course.notebooks.rewrite import keep_solution
from tplab.course.notebooks.source import passed_names, read, sources

SOLUTION = ROOT / "solutions" / "04_parallel_linear.ipynb"
MEND = "but your answer to exercise {} doesn't pass its own check. Fix exercise {} first"


def question(exercise: str, answers: dict[str, str], blank: tuple[str, ...] = ()) -> str:
    """What the failed check of an exercise asks."""
    with pytest.raises(CheckFailed) as failure:
        run_check(exercise, load_chapter_namespace(exercise, answers, blank), seed=3)
    return failure.value.question


# every exercise whose reference answer uses earlier ones of the chapter, also through others
USES = {
    "1.3": ["1.2"],
    "3.4": ["3.2", "3.3"],
    "4.4": ["4.3"],
    "4.5": ["4.3"],
    "6.4": ["6.3"],
    "6.6": ["6.3"],
    "7.3": ["7.2"],
    "8.2": ["8.1"],
    "8.3": ["8.1", "8.2"],
    "8.4": ["8.1", "8.2"],
    "10.3": ["10.2"],
    "13.3": ["13.2"],
}
FIRST_THAT_MATTERS = {
    ("4.5", "4.3"): "ignores the stride",
}


def test_every_exercise_that_uses_earlier_answers_is_known():
    found = {}
    for path in sources(ROOT):
        source = read(path)
        for exercise in source.of_role("exercise"):
            namespace = load_chapter_namespace(exercise, {})
            names = passed_names(source.of_role("check")[exercise].text)
            uses = [earlier for earlier, _, _ in earlier_answers(exercise, tuple(namespace[name] for name in names))]
            found |= {exercise: uses} if uses else {}
    assert found == USES


@pytest.mark.parametrize(("exercise", "earlier"), [("1.3", "1.2"), ("4.5", "4.3"), ("7.3", "7.2"), ("8.4", "8.1")])
def test_earlier_exercise_is_named(exercise, earlier):
    answer = wrong_source(earlier, FIRST_THAT_MATTERS.get((exercise, earlier), ""))
    assert MEND.format(earlier, earlier) in question(exercise, {earlier: answer})


@pytest.mark.parametrize(("exercise", "earlier"), [("1.3", "1.2"), ("4.4", "4.3")])
def test_right_earlier_answer_is_not_named(exercise, earlier):
    assert "own check" not in question(exercise, {exercise: wrong_source(exercise)})


DECORATED = "import torch\n\n\n@torch.no_grad()\n"


@pytest.mark.parametrize(
    "answer",
    [
        DECORATED + keep_solution(chapter(4).of_role("exercise")["4.4"].text),
        swap_all(
            keep_solution(chapter(4).of_role("exercise")["4.4"].text),
            ("init_method, group=None)", "init_method, group=None, shard=shard)"),
        ),
    ],
    ids=["decorated", "as a default"],
)
def test_an_earlier_answer_is_found_however_it_is_used(answer):
    assert MEND.format("4.3", "4.3") in question(
        "4.4", {"4.3": wrong_source("4.3", "ignores the stride"), "4.4": answer}
    )


def test_an_earlier_answer_is_found_as_a_base_class_and_in_a_property():
    namespace = {"__name__": "__main__"}
    source = """
class shard: pass
def unshard(): pass
class Derived(shard): pass
class Holds:
    @property
    def part(self):
        return unshard()
"""
    exec(source, namespace)
    first, second = (list(_used((namespace[name],), namespace)) for name in ("Derived", "Holds"))
    assert (first, second) == (["shard"], ["unshard"])


def test_an_attribute_with_the_name_of_an_answer_is_not_that_answer():
    """10.4 uses transformer.ParallelTransformerLayer, which is the course's, and not the learner's of 10.3."""
    later, earlier = wrong_source("10.4"), wrong_source("10.3")
    assert "ParallelTransformerLayer" in later
    assert "own check" not in question("10.4", {"10.3": earlier, "10.4": later})


def test_an_earlier_exercise_that_is_still_to_do_is_named():
    """The answer fails before it gets to the stub."""
    answer = swap_all(
        keep_solution(chapter(4).of_role("exercise")["4.4"].text),
        ("    init_method(master)\n", "    if param.numel():\n        return\n    init_method(master)\n"),
    )
    said = question("4.4", {"4.4": answer}, blank=("4.3",))
    assert "uses `shard` from exercise 4.3, which you haven't written yet. Write `shard` first" in said


def test_first_of_two_wrong_ones_is_named():
    assert MEND.format("8.1", "8.1") in question("8.3", {"8.1": wrong_source("8.1"), "8.2": wrong_source("8.2")})


def test_wrong_answer_that_this_one_does_not_use_is_not_named():
    assert "own check" not in question("1.3", {"1.3": wrong_source("1.3"), "1.1": wrong_source("1.1")})


def test_tplab_check_names_it_too_when_it_runs_only_the_later_exercise(tmp_path):
    notebook = json.loads(SOLUTION.read_text())
    for cell in notebook["cells"]:
        if cell["metadata"].get("tplab", {}).get("exercise") == "4.3":
            cell["source"] = wrong_source("4.3", "ignores the stride")
    path = tmp_path / "mine.ipynb"
    path.write_text(json.dumps(notebook))
    reference = read_notebook(SOLUTION)
    stream = check_notebook(reference, read_notebook(path), tmp_path, exercises=["4.4"])
    said = [item for item in stream if isinstance(item, Verdict)]
    assert [verdict.status for verdict in said] == ["failed"]
    assert MEND.format("4.3", "4.3") in " ".join(said[0].text.split())
