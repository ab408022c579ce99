"""The learner's layers: found in their library, and built into a model."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch

from tests import saying
from tests.capstone.a_few_steps import SMALL, batch, make, variant
from tests.capstone.own_layers.libraries import Libraries, solution, swapped, wrong
from tplab import launch
from tplab.capstone.model import copy_shards
from tplab.capstone.own_layers.build import assemble
from tplab.capstone.own_layers.find import NotReady, find_answers
from tplab.course.learn import library
from tplab.course.learn.my_tp import FOR_A_GPT
from tplab.runtime import RankError

MINE = solution("5.2").replace("    def forward(", "    # as I understand it\n    def forward(")


@pytest.fixture(scope="module")
def libraries(tmp_path_factory) -> Libraries:
    return Libraries(tmp_path_factory.mktemp("libraries"))


def test_what_is_in_the_library_is_the_learners_unless_it_was_copied(libraries):
    course = libraries.course({"5.2": MINE})
    answers = find_answers(course.folder)
    assert set(answers.whose) == set(FOR_A_GPT)
    assert {exercise for exercise, whose in answers.whose.items() if whose == "yours"} == {"5.2"}
    assert re.search(r"20\d\d-\d\d", answers.checked["5.2"])
    for name, text in answers.files.items():
        assert (course.folder / library.PACKAGE / name).read_text() == text, "the files are those of the package"
    assert "# as I understand it" in answers.files["mlp.py"]
    assert not any("import tplab" in text or "from tplab" in text for text in answers.files.values())


HALF = ("3.2", "3.3", "4.1", "4.2", "5.2", "6.2")


def test_half_of_the_answers_train_and_it_is_said_which(libraries, capsys):
    """The library ends with chapter 6. 5.2 is in the learner's own words."""
    half = libraries.course({"5.2": MINE})
    rest = [exercise for exercise in FOR_A_GPT if exercise not in HALF]
    path = half.memory / library.STORE
    stored = json.loads(path.read_text())
    for exercise in rest:
        del stored["exercises"][exercise]
    path.write_text(json.dumps(stored))
    library.write(half, library.load(half))
    answers = find_answers(half.folder, SMALL)
    assert {exercise for exercise, whose in answers.whose.items() if whose == "yours"} == {"5.2"}
    assert [exercise for exercise, when in answers.checked.items() if not re.search(r"\d", when)] == rest
    assert "# as I understand it" in answers.files["mlp.py"]
    assert "# Exercise 8.1\n" in answers.files["cross_entropy.py"], "the course's solution, without a date"
    assert re.search(saying("1 ", f" {len(answers.whose)} ", "5.2", *rest), capsys.readouterr().out)
    with pytest.raises(NotReady, match=saying(*rest, "`tplab check 7 8 10 14`")):
        find_answers(half.folder, replace(SMALL, missing="error"))


def test_a_package_edited_by_hand_is_refused(libraries):
    course = libraries.course({})
    path = course.folder / library.PACKAGE / "linear.py"
    path.write_text(path.read_text() + "\nmore = 1\n")
    with pytest.raises(NotReady, match=saying("linear.py", "my_tp")):
        find_answers(course.folder)


def test_the_library_is_found_from_every_folder_of_the_course(libraries, monkeypatch, tmp_path):
    shutil.copytree(libraries.base.folder, tmp_path / "my_course")
    (tmp_path / "chapters").mkdir()
    wanted = find_answers(tmp_path / "my_course", SMALL)
    for folder, name in ((".", "."), (".", "chapters"), ("my_course", "."), (".", "my_course")):
        monkeypatch.chdir(tmp_path / folder)
        assert find_answers(name, SMALL) == wanted
    with pytest.raises(FileNotFoundError, match=saying("nowhere", "--chapters")):
        find_answers("nowhere")


def _step(answers):
    """Loss and gradients of the first step, and the gradient norm as the model computes it."""
    settings = variant(tp=torch.distributed.get_world_size())
    right, grid = make(settings)
    model = assemble(answers, settings.model, mesh=grid, dtype=torch.float64)
    copy_shards(right, model)
    loss = model(*batch(0))
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return loss.item(), gradients, model.hooks.norm(grid).item()


def _steps(cases):
    return {name: _step(answers) for name, answers in cases.items()}


@pytest.fixture(scope="module")
def outcomes(libraries):
    """Each case on two ranks."""
    by_another_name = swapped(
        "4.1", ("copy_to_region(x, self.group)", "f(x, self.group)"),
        before="from tplab.tensor import copy_to_region as f\n",
    )  # fmt: skip
    no_sum = wrong("3.2", "no communication")
    sources = {
        "right": {},
        "tanh": wrong("5.2", "tanh approximation"),
        "no sum": no_sum,
        "no sum, f by another name": no_sum | by_another_name,
        "longer": swapped("14.4", ("return math.sqrt(", "return 2 * math.sqrt(")),
    }
    cases = {name: libraries.answers(changed) for name, changed in sources.items()}
    return launch(_steps, 2, args=(cases,), timeout=300)


def test_the_learners_code_is_what_runs_and_an_operator_is_theirs_by_whatever_name_it_was_imported(outcomes):
    for told in outcomes:
        loss, gradients, norm = told["right"]
        assert abs(loss - told["tanh"][0]) > 1e-9
        same, wrong, _ = told["no sum"]
        assert same == pytest.approx(loss, abs=1e-10)
        name = "layers.0.attention_norm.weight"
        assert (gradients[name] - wrong[name]).abs().max() > 1e-4
        by_another_name = told["no sum, f by another name"][1]
        assert all(torch.equal(by_another_name[name], gradient) for name, gradient in wrong.items())
        assert told["longer"][2] == pytest.approx(2 * norm)


def test_a_crash_names_the_line_of_the_library(libraries):
    broken = libraries.answers({"8.1": "def vocab_logsumexp(logits, group=None):\n    return 1 / 0\n"})
    line = broken.files["cross_entropy.py"].splitlines().index("    return 1 / 0") + 1
    told = rf'my_tp/cross_entropy.py", line {line}, in vocab_logsumexp\n    return 1 / 0'
    with pytest.raises(RankError, match=told):
        launch(_step, 1, args=(broken,))
