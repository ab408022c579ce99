"""The check of exercise 7.5: a model whose look-up and output layer share one table."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tplab.course.chapters.ch07.tables import HIDDEN, VOCAB, border_ids, padded, part, random_table, rows_per_rank
from tplab.course.chapters.ch07.tied_questions import (
    CRASH,
    GIVEN_BODY,
    ONLY_LOOKUP,
    ONLY_OUTPUT,
    QUESTIONS,
    WHOSE_GROUP,
    WITHOUT_BODY,
    WITHOUT_F,
)
from tplab.course.checks import (
    GROUPS,
    IN_GROUPS,
    WORLD_SIZES,
    Claim,
    NotRun,
    Observed,
    Traffic,
    Verdict,
    ask_about_group,
    by_name,
    exercise,
    fresh_generator,
    group_question,
    make_group,
    member_of,
    observe,
    random_tensor,
    run_cases,
    verify,
)
from tplab.runtime import device
from tplab.tensor.full_state import load_full_state_dict


class Body(nn.Module):
    """What stands between the two uses here: a replicated layer, [..., h] to [..., h]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(HIDDEN, HIDDEN, dtype=torch.float64, device=device()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


@dataclass(frozen=True)
class Case:
    """One way to build and call the model."""

    gather: bool = False
    groups: tuple[tuple[int, ...], ...] | None = None

    def note(self) -> str:
        group = ", group=group" if self.groups else ""
        called = f"TiedModel({VOCAB}, {HIDDEN}, body, multiple=1{group})(ids{', gather=True' if self.gather else ''})"
        return called + (f" {IN_GROUPS}" if self.groups else "")

    def crash(self) -> str:
        return ask_about_group(WHOSE_GROUP) if self.groups else CRASH


CASES = (Case(), Case(gather=True), Case(groups=GROUPS), Case(gather=True, groups=GROUPS))


def run_model(model_class: Any, cases: Sequence[Case], data: Sequence[Any]) -> list[Observed]:
    """On a rank: the learner's model in every case."""
    return [_run_model(model_class, case, data[i][dist.get_rank()]) for i, case in enumerate(cases)]


def _run_model(model_class: Any, case: Case, mine: dict[str, Any]) -> Observed:
    group = make_group(case.groups)
    options: dict[str, Any] = {"group": group} if case.groups else {}
    body = Body()
    model = model_class(VOCAB, HIDDEN, body, multiple=1, **options, device=device(), dtype=torch.float64)
    params = own_names(model)
    seen: Observed = {"parameters": ", ".join(f"{name} {list(params[name].shape)}" for name in sorted(params))}
    if seen["parameters"] != mine["parameters"]:
        names = ("out", "dE", "dbody", "forward traffic", "backward traffic")
        return seen | dict.fromkeys(names, NotRun("the parameters are others"))
    full = {"embedding.weight": mine["table"].to(device()), "body.weight": mine["body"].to(device())}
    load_full_state_dict(model, full, group, strict=False)  # not strict: there may be second names
    seen[GIVEN_BODY] = Claim("" if params["body.weight"] is body.weight else "`self.body` is another one")
    ids = mine["ids"].to(device())
    watched = {"E": params["embedding.weight"], "body": params["body.weight"]}
    called = {"gather": True} if case.gather else {}
    return seen | observe(lambda: model(ids, **called), mine["dy"].to(device()), inputs={}, parameters=watched)


def own_names(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by name, each once. A second name for the table, such as that of an output layer, is no fault."""
    named = dict(model.named_parameters(remove_duplicate=False))
    found: dict[str, nn.Parameter] = {}
    for name in sorted(named, key=lambda name: name not in ("embedding.weight", "body.weight")):
        if not any(named[name] is other for other in found.values()):
            found[name] = named[name]
    return found


@dataclass(frozen=True)
class Reference:
    """The model on one process, with the table padded for q ranks: its logits, and its gradients use by use."""

    table: Tensor
    body: Tensor
    ids: Tensor
    dlogits: Tensor
    logits: Tensor
    without_body: Tensor
    dbody: Tensor
    lookup: Tensor
    output: Tensor
    lookup_through: list[Tensor]  # the look-up's gradient through the logits of each rank alone


def reference(case: Case, generator: torch.Generator, q: int) -> Reference:
    table, body = padded(random_table(generator), q), random_tensor(generator, HIDDEN, HIDDEN)
    ids = border_ids(generator, q, (3, 4))
    dlogits = random_tensor(generator, 3, 4, len(table))
    if case.gather:
        dlogits[..., VOCAB:] = 0
    first, second, weight = (tensor.clone().requires_grad_() for tensor in (table, table, body))
    logits = torch.tanh(first[ids] @ weight) @ second.T  # two copies, to tell the two uses apart
    dbody, lookup, output = torch.autograd.grad(logits, (weight, first, second), dlogits, retain_graph=True)
    through = []
    for index in range(q):
        rows = rows_per_rank(q)
        mine = slice(index * rows, (index + 1) * rows)
        through.append(torch.autograd.grad(logits[..., mine], first, dlogits[..., mine], retain_graph=True)[0])
    plain = table[ids] @ table.T
    return Reference(table, body, ids, dlogits, logits.detach(), plain, dbody, lookup, output, through)


def expect(case: Case, plain: Reference, index: int, ranks: tuple[int, ...], p: int) -> tuple[dict, dict, dict]:
    """What a rank is given, what is right there, and what known mistakes give."""
    q, size = len(ranks), plain.ids.numel() * HIDDEN

    def mine(whole: Tensor) -> Tensor:
        return part(whole[:VOCAB], index, q) if len(whole) == VOCAB else whole.chunk(q)[index]

    def shown(logits: Tensor) -> Tensor:
        return logits[..., :VOCAB] if case.gather else logits.chunk(q, -1)[index]

    parameters = f"body.weight {[HIDDEN, HIDDEN]}, embedding.weight {[rows_per_rank(q), HIDDEN]}"
    gathered = [("all_gather", plain.logits.numel())] if case.gather else []
    held = {
        "table": plain.table[:VOCAB],
        "body": plain.body,
        "ids": plain.ids,
        "dy": shown(plain.dlogits),
        "parameters": parameters,
    }
    right = {
        "parameters": parameters,
        "out": shown(plain.logits),
        "dE": mine(plain.lookup + plain.output),
        "dbody": plain.dbody,
        "forward traffic": Traffic.expected(p, ("all_reduce", size), *gathered, group=ranks),
        "backward traffic": Traffic.expected(p, ("all_reduce", size), group=ranks),
    }
    alike = {
        "out": {WITHOUT_BODY: shown(plain.without_body)},
        "dE": {ONLY_LOOKUP: mine(plain.lookup), ONLY_OUTPUT: mine(plain.output)},
    }
    if q > 1:
        alike["dE"][WITHOUT_F] = mine(plain.lookup_through[index] + plain.output)
    return held, right, alike


@exercise("7.5", "The tied model")
def tied_model(model_class: Any) -> Verdict:
    for p in WORLD_SIZES:
        generator = fresh_generator()
        here = [case for case in CASES if case.groups is None or p == 4]
        table = []
        for case in here:
            members = member_of(p, case.groups)
            plain = [reference(case, generator, len(members[0][1])) for _ in case.groups or (0,)]
            table.append([expect(case, plain[i], ranks.index(r), ranks, p) for r, (i, ranks) in enumerate(members)])
        for batch in (slice(0, 1), slice(1, None)):
            runs = run_cases(
                run_model,
                p,
                model_class,
                here[batch],
                [[row[0] for row in rows] for rows in table[batch]],
                note=Case.note,
                question=Case.crash,
                stuck=lambda case: case.crash() if case.groups else None,
            )
            for case, rows, seen in zip(here[batch], table[batch], runs, strict=True):
                asked = [group_question(WHOSE_GROUP), *QUESTIONS] if case.groups else QUESTIONS
                expected = [row[1] for row in rows]
                alike = by_name([row[2] for row in rows])
                verify("7.5", p, seen, expected, questions=asked, lookalikes=alike, note=case.note())
    return Verdict("One table, two uses: both add to its gradient on the rank that has the row, and nothing is sent.")
