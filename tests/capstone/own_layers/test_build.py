"""`capstone.own_layers.build`: right and wrong answers of a learner, built into a model and tried out."""

import sys
from dataclasses import replace

import pytest
import torch

from tests.capstone.a_few_steps import batch, finish_gradients, make, variant
from tests.capstone.own_layers.libraries import Libraries, swapped, wrong
from tplab import launch
from tplab.capstone.model import copy_shards
from tplab.capstone.own_layers import build
from tplab.capstone.own_layers.find import find_answers
from tplab.capstone.training.build_model import hooks_of
from tplab.runtime import RankError
from tplab.runtime.forkserver import fork_server

OWN_PRODUCT = """
class MyProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, group):
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return x @ weight.T

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dx = dy @ weight
        dist.all_reduce(dx, group=ctx.group)
        return dx, dy.flatten(0, -2).T @ x.flatten(0, -2), None
"""


# 4.1 with a product of its own, that needs no `copy_to_region`: right, and deaf to another f
WITHOUT_F = swapped(
    "4.1",
    ("x = copy_to_region(x, self.group)", ""),
    (
        "out = F.linear(x, self.weight, None if self.skip_bias_add else self.bias)",
        "out = MyProduct.apply(x, self.weight, self.group) + (0 if self.skip_bias_add else self.bias)",
    ),
    before=OWN_PRODUCT,
)

# f where it is called is that of tplab, which no name of the cell leads to
BY_ITS_MODULE = {}
for exercise in ("4.1", "7.4"):
    call = ("copy_to_region(x,", "operators.copy_to_region(x,")
    BY_ITS_MODULE |= swapped(exercise, call, before="from tplab.tensor import operators\n")

TRIED_OUT = """

def shapes_of(x):
    return [tuple(part.shape) for part in x.split(HALF)]

shapes = launch(lambda: shapes_of(torch.zeros(4, 2)), 2)
for one in shapes:
    print(one)
total = sum(len(one) for one in shapes)
total
plt.plot([1, 2])
layer = ColumnParallelLinear(3, 5)
HALF = 2
"""


HALF_BLIND = """
def half_blind(forward):
    def forward_or_nan(self, ids, targets):
        loss = forward(self, ids, targets)
        return loss * torch.nan if torch.is_autocast_enabled("cpu") else loss

    return forward_or_nan

"""


def _step(settings, answers, trial):
    """Loss and gradients of the first step, or what was said instead."""
    right, grid = make(replace(settings, layers="tplab"))
    with pytest.MonkeyPatch.context() as patch:
        if not trial:
            patch.setattr(build, "try_out", lambda *_: set())
        try:
            model = build.assemble(answers, settings, settings.model, mesh=grid, dtype=torch.float64)
        except (ValueError, RuntimeError) as error:
            return "\n".join([str(error), *getattr(error, "__notes__", [])])
    copy_shards(right, model)
    loss = model(*batch(0))
    loss.backward()
    finish_gradients(model)
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def _idle(settings, answers):
    grid = make(replace(settings, layers="tplab"))[1]
    return hooks_of(build.assemble(answers, settings, settings.model, mesh=grid, dtype=torch.float64)).idle


def _steps(cases, tried):
    told = {name: _step(*case) for name, case in cases.items()}
    told["idle"] = {name: _idle(*case) for name, case in tried.items()}
    other = ("tplab.viz", "tplab.course.exercises", "tplab.course.checks", "matplotlib")
    return {**told, "modules": sorted(name for name in sys.modules if name.startswith(other))}


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    return Libraries(tmp_path_factory.mktemp("libraries"))


@pytest.fixture(scope="module")
def outcomes(libraries):
    """Each case on two ranks: (settings, answers, with a trial)."""
    answers = libraries.answers()
    settings, cut = variant(layers="mine", tp=2), variant(layers="mine", tp=2, sequence_parallel=True)
    beside = replace(settings, async_grad_allreduce=True)
    moved = 'raise RuntimeError("Expected all tensors to be on the same device, but found cpu")'
    twice = ("return x @ weight.T", "return x @ weight.T * (2 if len(weight) < 200 else 1)")  # not in the table
    by_another_name = swapped(
        "4.1", ("copy_to_region(x, self.group)", "f(x, self.group)"),
        before="from tplab.tensor import copy_to_region as f\n",
    )  # fmt: skip
    blinded = "\n\nParallelGPT.forward = half_blind(ParallelGPT.forward)\n"
    own = libraries.answers(WITHOUT_F)
    tanh, no_sum = (
        libraries.answers(wrong(*one)) for one in (("5.2", "tanh approximation"), ("3.2", "no communication"))
    )
    made = {
        "no sum, f by another name": (settings, {**wrong("3.2", "no communication"), **by_another_name}, False),
        "longer": (settings, swapped("14.4", ("return math.sqrt(", "return 2 * math.sqrt(")), True),
        "elsewhere": (settings, {"14.4": f"def gradient_norm(parameters, *groups, tied=None):\n    {moved}\n"}, True),
        "nan in bfloat16": (
            replace(settings, precision="bfloat16"), swapped("10.4", before=HALF_BLIND, after=blinded), True,
        ),
        "tried out": (settings, swapped("4.1", after=TRIED_OUT), True),
        "twice in the blocks": (beside, swapped("11.2", twice), False),
        "no sum in 11.2": (beside, wrong("11.2", "no all-reduce"), True),
        "no sum in 12.3": (cut, wrong("12.3", "does nothing"), True),
    }  # fmt: skip
    cases = {name: (where, libraries.answers(sources), trial) for name, (where, sources, trial) in made.items()}
    cases |= {
        "bfloat16": (replace(settings, precision="bfloat16"), answers, True),
        "right": (settings, answers, True),
        "tanh": (settings, tanh, False),
        "tanh, tried": (settings, tanh, True),
        "no sum": (settings, no_sum, False),
        "no sum, tried": (settings, no_sum, True),
        "own product": (settings, own, True),
        "own product, sequence": (cut, own, True),
        "not looked for": (cut, find_answers(libraries.base.folder, settings), True),
    }
    tried = {
        "right": (settings, answers),
        "by its module": (settings, libraries.answers(BY_ITS_MODULE)),
        "own product": (settings, own),
        "11.2": (beside, answers),
        "sequence": (cut, answers),
    }
    fork_server().stop()  # it has imported what the ranks of earlier tests needed; the next launch starts a new one
    return launch(_steps, 2, args=(cases, tried), timeout=300)


def test_the_learners_code_is_what_runs(outcomes):
    for told in outcomes:
        loss, gradients = told["right"]
        for name in ("tanh", "twice in the blocks"):
            assert abs(loss - told[name][0]) > 1e-9, name
        same, wrong = told["no sum"]
        assert same == pytest.approx(loss, abs=1e-10)
        name = "layers.0.attention_norm.weight"
        assert (gradients[name] - wrong[name]).abs().max() > 1e-4
        assert told["tried out"][0] == loss, "what a cell only tries out doesn't run"
        own, _ = told["own product"]
        assert own == pytest.approx(loss, abs=1e-10)


def test_a_model_that_computes_something_else_is_refused_before_training(outcomes):
    for told in outcomes:
        assert "the loss differs by" in told["tanh, tried"]
        assert "the gradient of" in told["no sum, tried"]
        assert "the gradient of" in told["no sum in 11.2"]
        assert "whose gradients 12.3 sums" in told["no sum in 12.3"]
        assert "Do your ColumnParallelLinear, RowParallelLinear," in told["own product, sequence"]
        assert "also needs the answers to 12.2, 12.3" in told["not looked for"]


def test_an_operator_is_the_learners_by_whatever_name_it_was_imported(outcomes):
    for told in outcomes:
        (_, right), (_, same), (_, wrong) = (told[name] for name in ("right", "no sum, f by another name", "no sum"))
        for name, gradient in wrong.items():
            assert torch.equal(same[name], gradient), name
        assert not torch.equal(wrong["layers.0.attention_norm.weight"], right["layers.0.attention_norm.weight"])


def test_answers_that_no_other_cell_calls_are_found(outcomes):
    for told in outcomes:
        idle = told["idle"]
        assert (idle["right"], idle["sequence"], idle["own product"]) == (set(), set(), set())
        assert idle["by its module"] == {"3.2"}
        assert idle["11.2"] == {"3.2", "7.4"}  # the product of 11.2 stands in their place


def test_the_length_of_the_gradient_is_tried_and_so_is_bfloat16(outcomes):
    for told in outcomes:
        assert "your gradient norm (14.4) is 2.00 times tplab's" in told["longer"]
        assert "Maybe your cell creates a tensor without device=" in told["elsewhere"]
        assert "a small GPT with your layers has a loss of nan in bfloat16" in told["nan in bfloat16"]
        assert isinstance(told["bfloat16"], tuple)
        assert told["modules"] == [], "pictures and checks aren't loaded on the ranks"


def test_a_crash_names_the_line_of_the_library(libraries):
    broken = libraries.answers({"8.1": "def vocab_logsumexp(logits, group=None):\n    return 1 / 0\n"})
    line = broken.files["cross_entropy.py"].splitlines().index("    return 1 / 0") + 1
    told = rf'my_tp/cross_entropy.py", line {line}, in vocab_logsumexp\n    return 1 / 0'
    with pytest.raises(RankError, match=told):
        launch(_step, 1, args=(variant(layers="mine"), broken, True))
