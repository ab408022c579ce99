"""The learner's answers, found and checked: `tplab.capstone.own_layers.find`, and its checker stubbed but for once."""

import json
import shutil

import pytest

from tests import ROOT
from tests.capstone.a_few_steps import SMALL, make, variant
from tests.wrong_answers import wrong_answers
from tplab import launch
from tplab.capstone.own_layers import check as mine_checks
from tplab.capstone.own_layers import find as mine
from tplab.capstone.own_layers.find import NotReady, find_answers, read_answers
from tplab.capstone.own_layers.link import ANSWERS, needed
from tplab.capstone.training.build_model import used
from tplab.course.grading.check_notebook import Verdict
from tplab.course.tools import state
from tplab.runtime import RankError

pytestmark = pytest.mark.share(5)

SOLUTIONS, CHAPTERS = ROOT / "solutions", ROOT / "chapters"


def never(*args, **kwargs):
    raise AssertionError("nothing has to be checked here")


@pytest.fixture
def nothing_runs(monkeypatch):
    monkeypatch.setattr(mine_checks, "check_notebook", never)


SOME = ["3.1", "3.2", "4.1", "5.1", "8.1", "8.2"]


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A course of chapters 3, 4, 5 and 8, and chapters/ full of right answers, in other words than the solutions."""
    monkeypatch.setattr(mine, "needed", lambda settings: SOME)
    for folder in (tmp_path / "solutions", tmp_path / "chapters"):
        folder.mkdir()
        for number in (3, 4, 5, 8):
            shutil.copy(next(SOLUTIONS.glob(f"{number:02d}_*.ipynb")), folder)
    for exercise in SOME:
        rewrite(tmp_path / "chapters", exercise, lambda source: source + "\n# as I understand it")
    return tmp_path


def rewrite(chapters, exercise, change):
    """Change the source of an exercise's cell in a folder's notebook."""
    path = next(chapters.glob(f"{int(exercise.partition('.')[0]):02d}_*.ipynb"))
    notebook = json.loads(path.read_text())
    cell = next(cell for cell in notebook["cells"] if cell["metadata"].get("tplab", {}).get("exercise") == exercise)
    cell["source"] = change("".join(cell["source"]))
    path.write_text(json.dumps(notebook))


def says(**verdicts):
    """A checker that gives these verdicts, {"5.1": "failed"}, and "passed" to the others."""

    def check_notebook(reference, path, *, learner, exercises):
        asked.append(exercises)
        for number in exercises:
            status = verdicts.get(number, "passed")
            yield Verdict(number, "", status, "GELU by its tanh approximation\nand more" if status == "failed" else "")

    asked = []
    check_notebook.asked = asked
    return check_notebook


# Finding and checking


def test_the_solutions_are_the_courses_own_and_need_no_check(nothing_runs):
    answers = find_answers(SOLUTIONS)
    assert set(answers.whose.values()) == {"the course's solution"}
    assert set(answers.checked.values()) == {"the course's own, letter by letter"}
    assert not any("check(" in code.source for code in answers.codes)


def test_blank_chapters_list_all_that_is_to_do_and_the_command(nothing_runs):
    with pytest.raises(NotReady) as error:
        find_answers(CHAPTERS)
    for exercise in ANSWERS:
        assert f"  {exercise} " in str(error.value)
    assert "tplab check 3 4 5 6 7 8 10 11 12 14" in str(error.value)
    assert "ColumnParallelLinear: is still to do" in str(error.value)


def test_blank_chapters_train_with_the_courses_solutions_where_one_says_so(nothing_runs):
    answers, right = find_answers(CHAPTERS, missing="tplab"), find_answers(SOLUTIONS)
    assert [code.source for code in answers.codes] == [code.source for code in right.codes]
    assert set(answers.whose.values()) == {"the course's solution"}
    assert answers.checked["5.1"] == "in place of one that is still to do"


def test_only_what_the_settings_need_is_asked_for():
    assert set(needed()) == set(ANSWERS)
    plain = needed(variant(tp=2))
    assert "3.1" in plain
    assert not {"11.3", "12.1", "12.3"} & set(plain)
    assert "11.3" in needed(variant(tp=2, async_grad_allreduce=True))
    cut = needed(variant(tp=2, sequence_parallel=True, async_grad_allreduce=True))
    assert {"12.1", "12.3", "3.2"} <= set(cut)
    assert not {"3.1", "11.3"} & set(cut)
    assert not {"3.1", "3.2", "12.1"} & set(needed(variant(tp=2, dp=2, batch_size=8, sequence_parallel=True)))


def test_answers_that_were_not_looked_for_are_named():
    answers = find_answers(SOLUTIONS, variant(layers="mine", tp=2))
    cut = variant(layers="mine", tp=2, sequence_parallel=True)
    with pytest.raises(ValueError, match=r"the answers to 12.1, 12.3 were not looked for"):
        used(cut, answers)
    with pytest.raises(RankError, match=r"the answers to 12.1, 12.3 were not looked for"):
        launch(make, 2, args=(cut, answers))


def test_what_no_check_has_passed_is_checked_once_and_remembered(course, monkeypatch):
    checker, lines = says(), []
    monkeypatch.setattr(mine_checks, "check_notebook", checker)
    answers = find_answers(course / "chapters", SMALL, say=lines.append)
    assert sorted(sum(checker.asked, [])) == SOME
    assert lines[0] == "chapter 03: checking your answers to 3.1, 3.2 ..."
    assert set(answers.whose.values()) == {"yours"}
    assert answers.checked["5.1"] == "its check passed"
    monkeypatch.setattr(mine_checks, "check_notebook", never)
    assert find_answers(course / "chapters", SMALL).checked["5.1"].startswith("its check passed on 20")
    rewrite(course / "chapters", "5.1", lambda source: source + "\n# once more")
    monkeypatch.setattr(mine_checks, "check_notebook", again := says())
    find_answers(course / "chapters", SMALL)
    assert again.asked == [["5.1"]]


def test_a_wrong_answer_is_named_and_not_trained_with(course, monkeypatch):
    monkeypatch.setattr(mine_checks, "check_notebook", says(**{"5.1": "failed", "8.2": "waiting"}))
    with pytest.raises(NotReady) as error:
        find_answers(course / "chapters", SMALL, say=lambda line: None)
    assert "  5.1   ParallelMLP: does not pass its check. GELU by its tanh approximation\n  8.2" in str(error.value)
    assert "tplab check 5 8" in str(error.value)
    assert {"5.1": "failed", "3.1": "passed"}.items() <= {
        n: e.status for n, e in state.load(course / "chapters" / ".tplab").items()
    }.items()
    answers = find_answers(course / "chapters", SMALL, missing="tplab", say=lambda line: None)
    assert (answers.whose["5.1"], answers.whose["4.1"]) == ("the course's solution", "yours")
    assert answers.checked["5.1"].startswith("in place of one that did not pass its check on 20")
    sources = {code.where: code.source for code in answers.codes}
    assert "as I understand it" not in sources["the course's solution of exercise 5.1"]
    assert "as I understand it" in sources["your chapter 04, exercise 4.1"]


def test_helper_cells_come_along_and_experiments_do_not(course, monkeypatch):
    path = next((course / "chapters").glob("05_*.ipynb"))
    notebook = json.loads(path.read_text())
    place = next(i for i, cell in enumerate(notebook["cells"]) if cell["metadata"].get("tplab", {}).get("exercise"))
    for source in ("def bend(x):\n    return F.gelu(x)", "print('an experiment')\nraise RuntimeError"):
        own = {"cell_type": "code", "source": source, "metadata": {}, "outputs": [], "execution_count": None}
        notebook["cells"].insert(place, own)
    path.write_text(json.dumps(notebook))
    rewrite(course / "chapters", "5.1", lambda source: source.replace("F.gelu(x)", "bend(x)"))
    monkeypatch.setattr(mine_checks, "check_notebook", says())
    answers = find_answers(course / "chapters", SMALL, say=lambda line: None)
    five = answers.of_chapter(5)
    assert [code.role for code in five] == ["setup", "own", "exercise"]
    assert five[1].where == "your chapter 05, cell 2 of your own"


def test_the_notebooks_are_found_from_every_folder_of_the_course(course, monkeypatch):
    wanted = find_answers(course / "chapters", SMALL, check=False)
    for folder in (course, course / "chapters"):
        monkeypatch.chdir(folder)
        assert find_answers("chapters", SMALL, check=False) == wanted


def test_a_folder_or_a_notebook_that_is_not_there_is_said(course, nothing_runs):
    with pytest.raises(FileNotFoundError, match="there is no folder nowhere with your notebooks"):
        find_answers("nowhere")
    next((course / "chapters").glob("04_*.ipynb")).write_text("<<<<<<< HEAD")
    with pytest.raises(NotReady, match=r"4\.1 .*can't be read.*git merge"):
        find_answers(course / "chapters")


def test_answers_are_plain_data_that_a_file_keeps(tmp_path):
    answers = find_answers(SOLUTIONS)
    answers.save(tmp_path / "answers.json")
    assert read_answers(tmp_path / "answers.json") == answers


def test_a_wrong_answer_fails_its_real_check(course):
    """The tanh approximation, in a notebook; all else is the course's, so this is the one check that runs."""
    shutil.rmtree(course / "chapters")
    shutil.copytree(course / "solutions", course / "chapters")
    wrong = next(one for one in wrong_answers(5) if one.name == "tanh approximation")
    rewrite(course / "chapters", "5.1", lambda source: wrong.source)
    lines = []
    with pytest.raises(NotReady, match=r"5\.1 +ParallelMLP: does not pass its check") as error:
        find_answers(course / "chapters", SMALL, say=lines.append)
    assert "4.1" not in str(error.value)
    assert lines == ["chapter 05: checking your answers to 5.1 ..."]
