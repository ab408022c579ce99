"""`capstone.own_layers.build`: a learner's answers, built into a model."""

import sys

import pytest
import torch

from tests.capstone.a_few_steps import SMALL, batch, make, variant
from tests.capstone.own_layers.libraries import Libraries, swapped, wrong
from tplab import launch, plain
from tplab.capstone.model import copy_shards
from tplab.capstone.own_layers.build import assemble
from tplab.runtime import RankError
from tplab.runtime.forkserver import fork_server


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
    told = {name: _step(answers) for name, answers in cases.items()}
    other = ("tplab.viz", "tplab.course.exercises", "tplab.course.checks", "matplotlib")
    return told, sorted(name for name in sys.modules if name.startswith(other))


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    return Libraries(tmp_path_factory.mktemp("libraries"))


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
    fork_server().stop()  # it has imported what the ranks of earlier tests needed; the next launch starts a new one
    return launch(_steps, 2, args=(cases,), timeout=300)


def test_the_learners_code_is_what_runs_and_an_operator_is_theirs_by_whatever_name_it_was_imported(outcomes):
    for told, modules in outcomes:
        loss, gradients, norm = told["right"]
        assert abs(loss - told["tanh"][0]) > 1e-9
        same, wrong, _ = told["no sum"]
        assert same == pytest.approx(loss, abs=1e-10)
        name = "layers.0.attention_norm.weight"
        assert (gradients[name] - wrong[name]).abs().max() > 1e-4
        by_another_name = told["no sum, f by another name"][1]
        assert all(torch.equal(by_another_name[name], gradient) for name, gradient in wrong.items())
        assert told["longer"][2] == pytest.approx(2 * norm)
        assert modules == [], "pictures and checks aren't loaded on the ranks"


def test_a_crash_names_the_line_of_the_library(libraries):
    broken = libraries.answers({"8.1": "def vocab_logsumexp(logits, group=None):\n    return 1 / 0\n"})
    line = broken.files["cross_entropy.py"].splitlines().index("    return 1 / 0") + 1
    told = rf'my_tp/cross_entropy.py", line {line}, in vocab_logsumexp\n    return 1 / 0'
    with pytest.raises(RankError, match=told):
        launch(_step, 1, args=(broken,))


def test_models_of_other_names_or_shapes_are_refused():
    model, ours = plain.GPT(SMALL.model), make(SMALL)[0]
    with pytest.raises(ValueError, match=r"embedding.weight has the shape \[300, 32\], not \[384"):
        copy_shards(ours, model)
    ours = plain.GPT(SMALL.model)
    del model.final_norm
    with pytest.raises(ValueError, match=r"final_norm.weight has the shape None, not \[32\]"):
        copy_shards(ours, model)
