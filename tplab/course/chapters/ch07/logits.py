"""The check of exercise 7.4: the logits of a table cut by rows, split or gathered."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tplab.course.chapters.ch07.tables import HIDDEN, VOCAB, padded, part, random_table, rows_per_rank
from tplab.course.checks.check_vocabulary import (
    GROUPS,
    IN_GROUPS,
    INPUTS_QUESTION,
    ask_about_group,
    by_name,
    group_question,
    has_kind,
    has_no_gradient,
    make_group,
    member_of,
    random_tensor,
)
from tplab.course.checks.exercises import (
    WORLD_SIZES,
    Observed,
    Question,
    Traffic,
    Verdict,
    exercise,
    fresh_generator,
    observe,
    run_cases,
    verify,
)
from tplab.runtime import device


@dataclass(frozen=True)
class Case:
    """One way to call it. `cut`: with vocab_size; with gather the padding is dropped then, without it nothing."""

    gather: bool = False
    cut: bool = False
    leading: tuple[int, ...] = (2, 5)
    transposed: bool = False
    groups: tuple[tuple[int, ...], ...] | None = None

    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"gather": True} if self.gather else {}
        return options | ({"vocab_size": VOCAB if self.gather else FEW} if self.cut else {})

    def note(self) -> str:
        options = "".join(f", {name}={value}" for name, value in self.options().items())
        where = f", group=group) {IN_GROUPS}" if self.groups else ")"
        return f"parallel_logits(x, weight{options}{where}" + (" with a non-contiguous x" if self.transposed else "")

    def crash(self) -> str:
        return ask_about_group(WHOSE_GROUP) if self.groups else CRASH


FEW = 5  # less than any rank's rows
CASES = (
    Case(),
    Case(leading=(3,), transposed=True),
    Case(cut=True),
    Case(gather=True, cut=True),
    Case(gather=True),
    Case(groups=GROUPS),
    Case(gather=True, cut=True, groups=GROUPS),
)
PARTIAL = "this rank's part of dx, through its own columns of the logits"


def output_layer(function: Callable[..., Any], cases: Sequence[Case], data: Sequence[Any]) -> list[Observed]:
    """On a rank: the learner's logits in every case."""
    return [_output_layer(function, case, data[i][dist.get_rank()]) for i, case in enumerate(cases)]


def _output_layer(function: Callable[..., Any], case: Case, mine: dict[str, Tensor]) -> Observed:
    group = make_group(case.groups)
    options = case.options() | ({"group": group} if case.groups else {})
    inputs = {"x": mine["x"].to(device()), "weight": mine["weight"].to(device())}
    return observe(lambda x, weight: function(x, weight, **options), mine["dy"].to(device()), inputs=inputs)


def expect(case: Case, generator: torch.Generator, p: int) -> list[tuple[dict, dict, dict]]:
    """For every rank: what it is given, what is right, what known mistakes give."""
    drawn: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    rows = []
    for rank, (number, ranks) in enumerate(member_of(p, case.groups)):
        q, index = len(ranks), ranks.index(rank)
        columns = q * rows_per_rank(q)
        if number not in drawn:
            x = random_tensor(generator, HIDDEN, *case.leading).movedim(0, -1)
            dlogits = random_tensor(generator, *case.leading, columns)
            if case.cut and case.gather:
                dlogits[..., VOCAB:] = 0
            drawn[number] = padded(random_table(generator), q), x if case.transposed else x.contiguous(), dlogits
        table, x, dlogits = drawn[number]
        mine = slice(index * columns // q, (index + 1) * columns // q)
        logits = x @ table.T
        kept = mine if not case.gather else slice(VOCAB if case.cut else None)
        given, out = dlogits[..., kept], logits[..., kept]
        gathered = [("all_gather", logits.numel())] if case.gather else []
        right = {
            "out": out,
            "dx": dlogits @ table,
            "dweight": dlogits[..., mine].reshape(-1, columns // q).T @ x.reshape(-1, HIDDEN),
            "forward traffic": Traffic.expected(p, *gathered, group=ranks),
            "backward traffic": Traffic.expected(p, ("all_reduce", x.numel()), group=ranks),
        }
        alike = {"dx": {PARTIAL: dlogits[..., mine] @ table[mine]}} if q > 1 else {"dx": {}}
        rows.append(({"x": x, "weight": part(table[:VOCAB], index, q), "dy": given}, right, alike))
    return rows


@exercise("7.4", "Parallel logits")
def parallel_logits(function: Callable[..., Any]) -> Verdict:
    for p in WORLD_SIZES:
        generator = fresh_generator()
        here = [case for case in CASES if case.groups is None or p == 4]
        table = [expect(case, generator, p) for case in here]
        for batch in (slice(0, 1), slice(1, None)):
            runs = run_cases(
                output_layer,
                p,
                function,
                here[batch],
                [[row[0] for row in rows] for rows in table[batch]],
                note=Case.note,
                question=Case.crash,
                stuck=lambda case: case.crash() if case.groups else None,
            )
            for case, rows, seen in zip(here[batch], table[batch], runs, strict=True):
                asked = [group_question(WHOSE_GROUP), *questions(case)] if case.groups else questions(case)
                expected = [row[1] for row in rows]
                alike = by_name([row[2] for row in rows])
                verify("7.4", p, seen, expected, questions=asked, lookalikes=alike, note=case.note())
    return Verdict("Split, the logits cost nothing forward and b·s·h backward; only the gather sends b·s·v numbers.")


WHOSE_GROUP = "Which of the operators was not given `group`, and works in the default group of all ranks?"
CRASH = (
    "x is [..., h] and this rank's rows are [v/p, h]. Which of their dimensions meet in the product, and what is left?"
)


def questions(case: Case) -> tuple[Question, ...]:
    """What to ask about wrong logits, in this case."""
    shape = (
        "Each rank's logits are [..., v/p], those of all its rows, also of the padding. Only with gather they are put "
        "side by side, and what lies behind `vocab_size` is dropped. Which of these shapes do you return here?"
    )
    return (
        INPUTS_QUESTION,
        Question(
            has_kind("out", "none", "type", "structure"),
            "What does the last line return? One tensor, [..., v/p] or, gathered, [..., v].",
        ),
        Question(has_kind("out", "shape", "whole", "part"), shape),
        Question(has_kind("out", "zeros"), "All logits are zeros. Which line makes them, and of what?"),
        Question(
            lambda d: "dx" in d.names and has_kind("dx", PARTIAL)(d),
            "dx is only the part that comes through this rank's columns; the other ranks hold the rest. Which operator "
            "of chapter 03 stands where a replicated x meets sharded columns?",
        ),
        Question(
            has_kind("dx", "p times"),
            "dx is summed over the ranks more than once. f is needed once; does a gather of yours, or a second f, add "
            "up as well?",
        ),
        Question(
            has_no_gradient("dx", "dweight"),
            "No gradient arrives. `dist.all_gather` writes into tensors that autograd knows nothing of; which operator "
            "of chapter 03 does the same with a backward pass? And is `weight` used as it is, not a detached copy?",
        ),
        Question(
            lambda d: {"dx", "dweight"} <= d.names and "out" not in d.names and has_kind("dx", "value")(d),
            "The output is right, both gradients are not: what comes back to the product is no longer this rank's own "
            "part of dlogits. Does an operator stand behind the product that sums it? f belongs to x.",
        ),
        Question(
            has_kind("dweight", "p times"),
            "The gradient of this rank's rows is p times too large: the ranks' gradients of the gathered logits were "
            "added up, though all of them are the same. What is the backward of gather?",
        ),
        Question(
            lambda d: bool(d.names) and d.names <= {"forward traffic", "backward traffic"},
            "The numbers are right, the communication is not: forward nothing, or with gather one all-gather; backward "
            "one all-reduce of dx. Which call sends more?",
        ),
        Question(
            lambda d: "out" in d.names,
            "A token's logit is the product of x with that token's row, nothing else. "
            + ("And in which order do the ranks' parts stand?" if case.gather else "Which rows does this rank have?"),
        ),
    )
