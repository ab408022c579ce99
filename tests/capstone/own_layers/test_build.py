"""`capstone.own_layers.build`: right and wrong answers of a learner, built into a model and tried out."""

import ast
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.capstone.a_few_steps import batch, make, variant
from tests.wrong_answers import wrong_answers
from tplab import launch
from tplab.capstone.own_layers.build import assemble
from tplab.capstone.own_layers.find import Code, find_answers
from tplab.capstone.own_layers.link import ANSWERS, LINKS, OPERATORS
from tplab.capstone.own_layers.statements import needed_statements
from tplab.capstone.training.build_model import backward, copy_shards, finish_gradients, hooks_of
from tplab.course.notebooks.source import parse_code
from tplab.runtime import RankError

SOLUTIONS = Path(__file__).resolve().parents[3] / "solutions"


def with_answer(answers, exercise, source):
    """The same answers, with another source of one exercise."""
    place = f"exercise {exercise}"
    codes = tuple(replace(code, source=source) if code.where.endswith(place) else code for code in answers.codes)
    assert codes != answers.codes
    return replace(answers, codes=codes)


def source_of(answers, exercise):
    return next(code.source for code in answers.codes if code.where.endswith(f"exercise {exercise}"))


def one(exercise, name):
    return next(
        w.source for w in wrong_answers(int(exercise.partition(".")[0])) if (w.exercise, w.name) == (exercise, name)
    )


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


def without_f(source):
    """4.1 with a product of its own, that needs no `copy_to_region`: right, and deaf to another f."""
    call = "out = F.linear(x, self.weight, None if self.skip_bias_add else self.bias)"
    assert call in source
    own = "out = MyProduct.apply(x, self.weight, self.group) + (0 if self.skip_bias_add else self.bias)"
    return OWN_PRODUCT + source.replace("x = copy_to_region(x, self.group)", "").replace(call, own)


def by_its_module(answers):
    """f where it is called is that of tplab, which no name of the cell leads to."""
    for exercise in ("4.1", "7.4"):
        source = source_of(answers, exercise)
        assert " copy_to_region(" in source
        source = source.replace(" copy_to_region(", " mappings.copy_to_region(")
        answers = with_answer(answers, exercise, f"from tplab.tensor import mappings\n{source}")
    return answers


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


def with_things_tried_out(answers):
    """Below an answer, and in a cell of the learner's own, what one tries in a notebook."""
    more = with_answer(answers, "4.1", source_of(answers, "4.1") + TRIED_OUT)
    own = Code(
        5, "own", "your chapter 05, cell 1 of your own", "WIDER = 4\nprint(launch(lambda: 1, 2))\ndisplay(WIDER)"
    )
    return replace(more, codes=(*more.codes, own))


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
    try:
        model = assemble(answers, settings, settings.model, mesh=grid, dtype=torch.float64, trial=trial)
    except (ValueError, RuntimeError) as error:
        return "\n".join([str(error), *getattr(error, "__notes__", [])])
    copy_shards(right, model)
    loss = model(*batch(0))
    backward(model, loss)
    finish_gradients(model)
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def _idle(settings, answers):
    grid = make(replace(settings, layers="tplab"))[1]
    return hooks_of(assemble(answers, settings, settings.model, mesh=grid, dtype=torch.float64)).idle


def _steps(cases, tried):
    told = {name: _step(*case) for name, case in cases.items()}
    told["idle"] = {name: _idle(*case) for name, case in tried.items()}
    other = ("tplab.viz", "tplab.course.chapters", "tplab.course.checks", "matplotlib")
    return {**told, "modules": sorted(name for name in sys.modules if name.startswith(other))}


@pytest.fixture(scope="module")
def outcomes():
    """Each case on two ranks: (settings, answers, with a trial)."""
    answers = find_answers(SOLUTIONS)
    settings, cut = variant(layers="mine", tp=2), variant(layers="mine", tp=2, sequence_parallel=True)
    tanh = with_answer(answers, "5.1", one("5.1", "tanh approximation"))
    no_sum = with_answer(answers, "3.1", one("3.1", "no communication"))
    own = with_answer(answers, "4.1", without_f(source_of(answers, "4.1")))
    broken = with_answer(answers, "6.1", "def split_heads(y, head_dim):\n    return 1 / 0\n")
    no_travel, no_tokens = (
        with_answer(answers, *case)
        for case in (("11.3", one("11.3", "no all-reduce")), ("12.3", one("12.3", "does nothing")))
    )
    product = source_of(answers, "11.3")
    assert "return x @ weight.T" in product
    smaller_than_the_table = "return x @ weight.T * (2 if len(weight) < 200 else 1)"
    twice = with_answer(answers, "11.3", product.replace("return x @ weight.T", smaller_than_the_table))
    length = source_of(answers, "14.4")
    assert "return math.sqrt(" in length
    longer = with_answer(answers, "14.4", length.replace("return math.sqrt(", "return 2 * math.sqrt("))
    moved = 'raise RuntimeError("Expected all tensors to be on the same device, but found cpu")'
    elsewhere = with_answer(answers, "14.4", f"def gradient_norm(parameters, *groups, tied=None):\n    {moved}\n")
    logits = source_of(answers, "10.2") + "\n\nParallelGPT.forward = half_blind(ParallelGPT.forward)\n"
    blind = with_answer(answers, "10.2", HALF_BLIND + logits)
    short = source_of(answers, "4.1").replace("copy_to_region(", "f(")
    assert "f(x, self.group)" in short
    by_another_name = with_answer(no_sum, "4.1", f"from tplab.tensor.mappings import copy_to_region as f\n{short}")
    half = replace(settings, precision="bfloat16")
    cases = {
        "no sum, f by another name": (settings, by_another_name, False),
        "longer": (settings, longer, True),
        "elsewhere": (settings, elsewhere, True),
        "bfloat16": (half, answers, True),
        "nan in bfloat16": (half, blind, True),
        "right": (settings, answers, True),
        "tried out": (settings, with_things_tried_out(answers), True),
        "tanh": (settings, tanh, False),
        "tanh, tried": (settings, tanh, True),
        "no sum": (settings, no_sum, False),
        "no sum, tried": (settings, no_sum, True),
        "twice in the blocks": (replace(settings, async_grad_allreduce=True), twice, False),
        "no sum in 11.3": (replace(settings, async_grad_allreduce=True), no_travel, True),
        "no sum in 12.3": (cut, no_tokens, True),
        "own product": (settings, own, True),
        "own product, sequence": (cut, own, True),
    }
    tried = {
        "right": (settings, answers),
        "by its module": (settings, by_its_module(answers)),
        "own product": (settings, own),
        "11.3": (replace(settings, async_grad_allreduce=True), answers),
        "sequence": (cut, answers),
    }
    return launch(_steps, 2, args=(cases, tried)), broken


def test_the_learners_code_is_what_runs(outcomes):
    for told in outcomes[0]:
        loss, gradients = told["right"]
        for name in ("tanh", "twice in the blocks"):
            assert abs(loss - told[name][0]) > 1e-9, name
        same, wrong = told["no sum"]
        assert same == pytest.approx(loss, abs=1e-12)
        name = "layers.0.attention_norm.weight"
        assert (gradients[name] - wrong[name]).abs().max() > 1e-4
        own, _ = told["own product"]
        assert own == pytest.approx(loss, abs=1e-12)


def test_what_a_cell_only_tries_out_does_not_run_on_the_ranks(outcomes):
    for told in outcomes[0]:
        assert told["tried out"][0] == told["right"][0]


def test_of_a_cell_what_its_definitions_need_is_run():
    cell = (
        "table = {}\ntable.update(a=1)\nx = launch(f, 2)\nbest = max(x)\ny = 3\nprint(y)\nx = [1]\n"
        "os.environ['A'] = '1'\ndef f():\n    y = 1\n    return table, x, best\n"
        "f.near = True\nfor i in x:\n    table[i] = launch(i, 2)\n"
    )
    (kept,) = needed_statements([parse_code(cell).body], ["f"])
    first = [ast.unparse(statement).split("\n")[0] for statement in kept]
    right = ["table = {}", "table.update(a=1)", "x = [1]", "os.environ['A'] = '1'", "def f():", "f.near = True"]
    assert first == right


def test_a_model_that_computes_something_else_is_refused_before_training(outcomes):
    for told in outcomes[0]:
        assert "computes something else than tplab's: the loss differs by" in told["tanh, tried"]
        assert "computes something else than tplab's: the gradient of" in told["no sum, tried"]
        assert "computes something else than tplab's: the gradient of" in told["no sum in 11.3"]
        assert "exercise 12.3 adds up" in told["no sum in 12.3"]
        assert "Do ColumnParallelLinear, RowParallelLinear," in told["own product, sequence"]


def test_an_operator_is_the_learners_by_whatever_name_it_was_imported(outcomes):
    for told in outcomes[0]:
        (_, right), (_, same), (_, wrong) = (told[name] for name in ("right", "no sum, f by another name", "no sum"))
        for name, gradient in wrong.items():
            assert torch.equal(same[name], gradient), name
        assert not torch.equal(wrong["layers.0.attention_norm.weight"], right["layers.0.attention_norm.weight"])


def test_answers_that_no_other_cell_calls_are_found(outcomes):
    for told in outcomes[0]:
        idle = told["idle"]
        assert (idle["right"], idle["sequence"], idle["own product"]) == (set(), set(), set())
        assert idle["by its module"] == {"3.1"}
        assert idle["11.3"] == {"3.1", "7.4"}  # the product of 11.3 stands in their place


def test_the_length_of_the_gradient_is_tried_and_so_is_bfloat16(outcomes):
    for told in outcomes[0]:
        assert "exercise 14.4 finds another length of a small GPT's gradient than tplab: 2.00 times" in told["longer"]
        assert "a tensor in your cell is made without device=" in told["elsewhere"]
        assert "in bfloat16 a small GPT of your answers has the loss nan" in told["nan in bfloat16"]
        assert isinstance(told["bfloat16"], tuple)


def test_a_crash_names_the_learners_cell_and_line(outcomes):
    outcomes[1].show_in_tracebacks()  # other answers were made since, with cells of the same names
    with pytest.raises(RankError, match=r'your chapter 06, exercise 6.1", line 2, in split_heads\n    return 1 / 0'):
        launch(_step, 1, args=(variant(layers="mine"), outcomes[1], True))


def test_pictures_and_checks_are_not_loaded_on_the_ranks(outcomes):
    for told in outcomes[0]:
        assert told["modules"] == []


def test_every_link_leads_from_a_later_chapter_to_an_answer():
    for chapter, names in LINKS.items():
        for name, exercise in names.items():
            assert exercise in ANSWERS
            assert int(exercise.partition(".")[0]) < chapter
            assert name in OPERATORS or name in {n for own in ANSWERS.values() for n in own} | {
                "vocab_parallel_cross_entropy"
            }
