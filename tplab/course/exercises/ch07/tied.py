"""The check for exercise 7.5, a model in which the lookup and the output layer share one table."""

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tplab.course import checks
from tplab.course.exercises.ch07.tables import HIDDEN, VOCAB, border_ids, padded, random_table, rows_per_rank
from tplab.runtime import device
from tplab.tensor.full_state import load_full_state_dict

ONLY_LOOKUP = "the gradient of the look-up alone"
ONLY_OUTPUT = "the gradient of the output layer alone"
WITHOUT_F = "the gradient when the look-up learns through this rank's own logits only"
LEFT_ALONE = "the constructor leaves the body's dtype alone"
REFUSES = "an id outside the vocabulary raises an IndexError"
GIVEN_BODY = "the body is the module that was given"
WITHOUT_BODY = "what comes out when the body is left out"


class Body(nn.Module):
    """A replicated layer between the two uses of the table. It maps [..., h] to [..., h]."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(HIDDEN, HIDDEN, dtype=dtype, device=device()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


@dataclass(frozen=True)
class Use(checks.Case):
    """One way to build and call the model."""

    gather: bool = False
    copied: bool = False

    def describe(self, name: str) -> str:
        group = ", group=group" * bool(self.groups)
        copied = ", after copy.deepcopy" * self.copied
        return f"TiedModel({VOCAB}, {HIDDEN}, body, multiple=1{group})(ids{', gather=True' * self.gather}){copied}"


CASES = (Use(), Use(copied=True), Use(gather=True), Use(groups=checks.GROUPS), Use(gather=True, groups=checks.GROUPS))


class Problem(NamedTuple):
    """The single-process model. Its table is padded for the group's ranks and has a separate gradient for each use."""

    table: Tensor  # [v, h], padded
    body: Tensor  # [h, h]
    ids: Tensor  # [b, s]
    dlogits: Tensor  # [b, s, v]
    logits: Tensor
    without_body: Tensor  # logits computed directly from the vectors
    dbody: Tensor
    lookup: Tensor  # the table's gradient from the lookup alone
    output: Tensor  # the table's gradient from the output layer alone
    lookup_through: list[Tensor]  # for each rank, the part of `lookup` that comes through its logits


def draw(case: Use, generator: torch.Generator, size: int) -> Problem:
    table, body = padded(random_table(generator), size), checks.random_tensor(generator, HIDDEN, HIDDEN)
    ids = border_ids(generator, size, (3, 4))
    dlogits = checks.random_tensor(generator, 3, 4, len(table))
    if case.gather:
        dlogits[..., VOCAB:] = 0
    first, second, weight = (tensor.clone().requires_grad_() for tensor in (table, table, body))
    logits = torch.tanh(first[ids] @ weight) @ second.T  # two copies of the table, to separate its two uses
    dbody, lookup, output = torch.autograd.grad(logits, (weight, first, second), dlogits, retain_graph=True)
    through = [
        torch.autograd.grad(mine, first, dmine, retain_graph=True)[0]
        for mine, dmine in zip(logits.chunk(size, -1), dlogits.chunk(size, -1), strict=True)
    ]
    without_body = table[ids] @ table.T
    return Problem(table, body, ids, dlogits, logits.detach(), without_body, dbody, lookup, output, through)


def returned(case: Use, logits: Tensor, place: checks.Place) -> Tensor:
    """Return the logits that the rank at this place returns, given the logits [..., v] with padding."""
    return logits[..., :VOCAB] if case.gather else place.part(logits, -1)


def parameters_on(place: checks.Place) -> str:
    return f"body.weight {[HIDDEN, HIDDEN]}, embedding.weight {[rows_per_rank(place.size), HIDDEN]}"


def give(case: Use, problem: Problem, place: checks.Place) -> dict[str, Any]:
    return {
        "table": problem.table[:VOCAB],
        "body": problem.body,
        "ids": problem.ids,
        "dy": returned(case, problem.dlogits, place),
        "parameters": parameters_on(place),
    }


def run(model_class: Any, case: Use, given: dict[str, Any], group: Any) -> checks.Observed:
    options: dict[str, Any] = {"group": group} if case.groups else {}
    body = Body(case.dtype)
    model = model_class(VOCAB, HIDDEN, body, multiple=1, **options, device=device(), dtype=case.dtype)
    params = own_names(model)
    seen: checks.Observed = {"parameters": ", ".join(f"{name} {list(params[name].shape)}" for name in sorted(params))}
    if seen["parameters"] != given["parameters"]:
        names = ("out", "dE", "dbody", "forward traffic", "backward traffic")
        return seen | dict.fromkeys(names, checks.NotRun("the parameters are others"))
    full = {"embedding.weight": given["table"].to(device()), "body.weight": given["body"].to(device())}
    load_full_state_dict(model, full, group, strict=False)  # not strict, because a parameter may have a second name
    seen[GIVEN_BODY] = checks.Claim("" if params["body.weight"] is body.weight else "`self.body` is another one")
    body_dtype = torch.float32 if case.dtype == torch.float64 else torch.float64
    other = Body(body_dtype)
    model_class(VOCAB, HIDDEN, other, multiple=1, **options, device=device(), dtype=case.dtype)
    became = "" if other.weight.dtype == body_dtype else f"a body in {body_dtype} became {other.weight.dtype}"
    seen[LEFT_ALONE] = checks.Claim(became)
    if case.copied:  # a copy (for averaging the weights, for example) must use its own table twice
        model = copy.deepcopy(model)
        params = own_names(model)
    ids = given["ids"].to(device())
    watched = {"E": params["embedding.weight"], "body": params["body.weight"]}
    called = {"gather": True} if case.gather else {}
    seen |= checks.observe(lambda: model(ids, **called), given["dy"].to(device()), inputs={}, parameters=watched)
    return seen | {REFUSES: refusal(model, ids)}


def refusal(model: Any, ids: Tensor) -> checks.Claim:
    """Return a claim that says whether the model rejects ids whose first element is outside the vocabulary."""
    ids = ids.clone()
    ids[0, 0] = VOCAB
    try:
        model(ids)
    except IndexError:
        return checks.Claim("")
    return checks.Claim(f"nothing was raised for id {VOCAB}")


def own_names(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return each parameter once, keyed by its name, even if the output layer gives the table a second name."""
    named = dict(model.named_parameters(remove_duplicate=False))
    found: dict[str, nn.Parameter] = {}
    for name in sorted(named, key=lambda name: name not in ("embedding.weight", "body.weight")):
        if not any(named[name] is other for other in found.values()):
            found[name] = named[name]
    return found


def expect(case: Use, problem: Problem, place: checks.Place) -> checks.Expected:
    vectors = problem.ids.numel() * HIDDEN
    right = {
        "parameters": parameters_on(place),
        "out": returned(case, problem.logits, place),
        "dE": place.part(problem.lookup + problem.output),
        "dbody": problem.dbody,
        "forward traffic": place.traffic(
            ("all_reduce", vectors), *[("all_gather", problem.logits.numel())] * case.gather
        ),
        "backward traffic": place.traffic(("all_reduce", vectors)),
    }
    mistakes = {
        "out": {WITHOUT_BODY: returned(case, problem.without_body, place)},
        "dE": {ONLY_LOOKUP: place.part(problem.lookup), ONLY_OUTPUT: place.part(problem.output)},
    }
    if place.size > 1:
        mistakes["dE"][WITHOUT_F] = place.part(problem.lookup_through[place.index] + problem.output)
    return checks.Expected(right, mistakes)


@checks.exercise("7.5", "The tied model")
def tied_model(model_class: Any) -> checks.Verdict:
    checks.check_cases(
        "7.5", model_class, CASES, draw=draw, give=give, run=run, expect=expect, questions=QUESTIONS, crash=CRASH,
        whose_group=WHOSE_GROUP,
    )  # fmt: skip
    return checks.Verdict(
        "One table, two uses: both add to its gradient on the rank that has the row, and nothing is sent."
    )


WHOSE_GROUP = "The group goes to two places, the embedding and the logits. Which of them did not get it?"
CRASH = (
    "Follow the shapes: ids [b, s], vectors [b, s, h], the body's output [b, s, h], logits [b, s, v/p]. Which line "
    "gets another shape than it expects, or an argument that it doesn't know? "
    "(If the error is about dtypes: `device` and `dtype` are for the embedding.)"
)

QUESTIONS = (
    checks.Question(
        lambda d: "parameters" in d.names,
        "The model has two parameters here: `embedding.weight`, this rank's rows, and that of `self.body`. Which of "
        "yours is one too many, missing, or has another shape or name?",
    ),
    checks.Question(
        GIVEN_BODY,
        "The caller holds that module, and may have given its parameters to an optimizer. Which line makes another one "
        "of it?",
    ),
    checks.Question(
        LEFT_ALONE,
        "The body belongs to the caller, and `.to(...)` changes the parameters of a module in place. `device` and "
        "`dtype` are for the embedding only. Which line applies them to the body, too?",
    ),
    checks.Question(
        REFUSES,
        "Your embedding of exercise 7.3 raises an IndexError for an id outside the vocabulary, but this model doesn't. "
        "Does your forward pass call `self.embedding`, or does it look up the ids in some other way?",
    ),
    checks.Question(
        checks.has_kind("out", "none", "type", "structure"),
        "What does forward return? The logits, one tensor.",
    ),
    checks.Question(
        checks.has_kind("out", WITHOUT_BODY),
        "These are the logits of the vectors themselves. Where does the body come in?",
    ),
    checks.Question(
        checks.has_kind("out", "shape", "whole", "part"),
        "Without gather the logits are [b, s, v/p], with gather [b, s, v], without the padding. What do `gather` and "
        "`vocab_size` have to reach for that?",
    ),
    checks.Question(
        checks.has_kind("dE", ONLY_LOOKUP),
        "The gradient of the output layer is missing. Does it use the parameter itself, or a copy that autograd keeps "
        "apart?",
    ),
    checks.Question(
        checks.has_kind("dE", ONLY_OUTPUT),
        "The gradient of the look-up is missing. Where, between the vectors and the body, does autograd lose the way?",
    ),
    checks.Question(
        checks.has_kind("dE", WITHOUT_F),
        "What comes back through the logits to the body is only this rank's part: dbody differs from rank to rank as "
        "well. Which operator sums it, and does your way to the logits go round it?",
    ),
    checks.Question(
        checks.has_no_gradient("dE", "dbody"),
        "A parameter gets no gradient. Which line does autograd not know about?",
    ),
    checks.Question(
        lambda d: {"dE", "backward traffic"} <= d.names and not d.names & {"out", "dbody"},
        "What comes back from the body is whole on every rank, and so is the gradient of a row on the rank that has "
        "it. Which line adds one of them up over the ranks once more?",
    ),
    checks.Question(
        checks.has_kind("dbody", "p times"),
        "The body's gradient is summed over the ranks twice: f is in `parallel_logits` already. Which line does it "
        "again?",
    ),
    checks.Question(
        lambda d: bool(d.names) and d.names <= {"forward traffic", "backward traffic"},
        "The numbers are right, the communication is not: g forward, f backward, and the gather only if asked for. "
        "Which call sends more?",
    ),
    checks.Question(
        lambda d: "out" in d.names,
        "The logits are the body's output times the rows of the table: no scale, no bias. What else happens to them, "
        "or to the vectors before?",
    ),
)
