"""The check of exercise 14.1: gradients added up bucket by bucket while the backward pass runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tplab.course.checks import (
    GROUPS,
    IN_GROUPS,
    LATE_QUESTION,
    Claim,
    Observed,
    Question,
    Snapshot,
    Traffic,
    Verdict,
    ask_about_group,
    by_name,
    called_as,
    changed,
    exercise,
    fresh_generator,
    group_question,
    has_kind,
    make_group,
    member_of,
    portable,
    random_tensor,
    run_cases,
    traffic,
    verify,
)
from tplab.runtime import device, record

SIZES = {"W1": (6, 4), "b1": (6,), "W2": (5, 6), "b2": (5,), "W3": (2, 5), "b3": (2,)}  # the gradients of b3 come first
STEPS = 2
NO_WAIT = "the backward pass waits for no all-reduce"
ONLY_A_NUMBER = "finish sends no gradient"

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A bucket size, with the numbers in each bucket that it leads to."""

    bucket_size: int
    buckets: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...] | None = None

    def note(self) -> str:
        return f"buckets of {self.bucket_size} numbers" + (f", {IN_GROUPS}" if self.groups else "")


CASES = (Case(32, (17, 30, 30)), Case(10**6, (77,)), Case(32, (17, 30, 30), GROUPS))


class Net(nn.Module):
    """Three small layers."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        for name, value in weights.items():
            self.register_parameter(name, nn.Parameter(value.clone().to(device())))

    def forward(self, x: Tensor) -> Tensor:
        return summed_loss(dict(self.named_parameters()), x)


def summed_loss(w: Weights, x: Tensor) -> Tensor:
    """A loss, summed over the tokens of x [tokens, 4]."""
    inner = torch.tanh(torch.tanh(x @ w["W1"].T + w["b1"]) @ w["W2"].T + w["b2"])  # [tokens, 5]
    return (inner @ w["W3"].T + w["b3"]).square().sum()


def run_steps(parallel_class: Callable[..., Any], cases: Sequence[Case], data: Sequence[Any]) -> list[list[Observed]]:
    """On a rank: what each step of each case leaves in the gradients, and what it sends."""
    seen = []
    for case, given in zip(cases, data, strict=True):
        group = make_group(case.groups)
        mine = given[dist.get_rank()]
        model = Net(mine["weights"])
        with called_as(f"DataParallel(model, {case.bucket_size}, group)"):
            parallel = parallel_class(model, case.bucket_size, group)
        seen.append([one_step(model, parallel, x.to(device())) for x in mine["batches"]])
    return seen


def one_step(model: Net, parallel: Any, x: Tensor) -> Observed:
    params = dict(model.named_parameters())
    model.zero_grad()
    before = Snapshot(x=x, **params)
    with record() as whole:
        with record() as backward:
            model(x).backward()
        with called_as(f"finish({len(x)})"):
            parallel.finish(len(x))
    entered, early = len(backward), [c for c in backward if len(c.group) > 1 and c.end is not None]
    large = [c for c in list(whole)[entered:] if c.numel > len(c.group) > 1]
    return {
        **{f"d{name}": portable(param.grad) for name, param in params.items()},
        "backward traffic": traffic(list(whole)[:entered]),
        NO_WAIT: Claim(f"{len(early)} had been waited for when it ended" if early else ""),
        ONLY_A_NUMBER: Claim(f"it sends {large[0].kind} of {large[0].numel} elements" if large else ""),
        "inputs unchanged": before.changed(),
    }


@dataclass(frozen=True)
class Batch:
    """The summed gradients of each rank of a group in one step, and the tokens of each."""

    gradients: list[Weights]
    tokens: list[int]

    def total(self, name: str) -> Tensor:
        return torch.stack([mine[name] for mine in self.gradients]).sum(0)


def gradients_of(weights: Weights, x: Tensor) -> Weights:
    leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
    values = torch.autograd.grad(summed_loss(leaves, x), list(leaves.values()))
    return dict(zip(leaves, values, strict=True))


def expected(case: Case, batch: Batch, index: int, ranks: tuple[int, ...]) -> tuple[Observed, dict[str, Any]]:
    """What is right on the rank with this index in its group, and what known mistakes give there."""
    q, own, tokens = len(ranks), batch.gradients[index], batch.tokens
    right: Observed = {f"d{name}": batch.total(name) / sum(tokens) for name in SIZES}
    right["backward traffic"] = Traffic.expected(q, *(("all_reduce", size) for size in case.buckets), group=ranks)
    alike = {}
    for name in SIZES:
        means = torch.stack([g[name] / n for g, n in zip(batch.gradients, tokens, strict=True)])
        alike[f"d{name}"] = {
            NOT_DIVIDED: batch.total(name),
            MEAN_OF_MEANS: means.mean(0),
            BY_OWN_TOKENS: batch.total(name) / tokens[index],
            BY_RANKS: batch.total(name) / q,
            f"{BY_RANKS} ": batch.total(name) / q / sum(tokens),
            OWN: own[name],
            f"{OWN} ": own[name] / sum(tokens),
            f"{OWN}  ": own[name] / tokens[index],
        }
    return right, alike


NOT_DIVIDED = "the sum over the ranks, not divided by the tokens"
MEAN_OF_MEANS = "the mean over the ranks of each rank's mean"
BY_OWN_TOKENS = "the sum divided by the tokens of this rank"
BY_RANKS = "the sum divided by the number of ranks"
OWN = "this rank's own gradient, not added up"


@exercise("14.1", "Gradients in buckets")
def gradients_in_buckets(parallel_class: Callable[..., Any]) -> Verdict:
    for p in (2, 1, 4):  # 2 first: with one rank different mistakes give the same numbers
        generator = fresh_generator()
        here = [case for case in CASES if case.groups is None or p == 4]
        data, rights = [], []
        for case in here:
            given, right = scene(case, p, generator)
            data.append(given)
            rights.append(right)
        runs = run_cases(
            run_steps,
            p,
            parallel_class,
            here,
            data,
            note=Case.note,
            question=lambda case: ask_about_group(WHOSE_GROUP) if case.groups else None,
            stuck=lambda case: ask_about_group(WHOSE_GROUP) if case.groups else STUCK,
        )
        for case, right, seen in zip(here, rights, runs, strict=True):
            for step in range(STEPS):
                verify(
                    "14.1",
                    p,
                    [on_rank[step] for on_rank in seen],
                    [row[step][0] for row in right],
                    questions=[
                        *([group_question(WHOSE_GROUP)] if case.groups else []),
                        *([SECOND] if step else []),
                        *QUESTIONS,
                    ],
                    lookalikes=by_name([row[step][1] for row in right]),
                    note=f"{case.note()}, step {step + 1}",
                )
    return Verdict("Every token counts the same, however many a rank has, and the messages start during backward.")


def scene(case: Case, p: int, generator: torch.Generator) -> tuple[list[Observed], list[list[Any]]]:
    """For every rank: its weights and batches; and for each step what is right, and what mistakes give."""
    given: list[Observed] = []
    rights: list[list[Any]] = [[] for _ in range(p)]
    members = member_of(p, case.groups)
    starts = [{n: random_tensor(generator, *size) for n, size in SIZES.items()} for _ in case.groups or (0,)]
    for rank, (number, _) in enumerate(members):
        sizes = torch.randperm(6, generator=generator)[:STEPS] + 5 + 2 * rank
        batches = [random_tensor(generator, int(size), 4) for size in sizes]
        given.append({"weights": starts[number], "batches": batches})
    for step in range(STEPS):
        for rank, (number, ranks) in enumerate(members):
            batches = [given[other]["batches"][step] for other in ranks]
            batch = Batch([gradients_of(starts[number], x) for x in batches], [len(x) for x in batches])
            rights[rank].append(expected(case, batch, ranks.index(rank), ranks))
    return given, rights


WHOSE_GROUP = "Which all-reduce was not given `group`, and so adds up over all ranks?"
STUCK = (
    "Every rank must start the same all-reduces in the same order. Does each of yours start where its bucket is full, "
    "and nowhere else?"
)
SECOND = Question(
    lambda d: not d.malformed and "changed" not in d.kinds(),
    "The first step was right, the second is not. What do you count or collect in a step that `finish` must set back?",
)
QUESTIONS = (
    Question(
        changed,
        "The hook is called with the parameter, and its gradient is `param.grad`. Which of the two did you hand to "
        "all_reduce?",
    ),
    Question(
        lambda d: has_kind("backward traffic", "no traffic")(d) and ONLY_A_NUMBER in d.names,
        "Everything is sent in `finish`, when the backward pass is over and there is nothing left to hide it behind. "
        "Who could tell you, during backward, that a gradient is ready?",
    ),
    Question(
        lambda d: NO_WAIT in d.names and "backward traffic" not in d.names,
        "Each all-reduce is over before the backward pass goes on. Which argument of dist.all_reduce makes it return "
        "at once, and who has to wait then?",
    ),
    LATE_QUESTION,
    Question(
        lambda d: "backward traffic" in d.names,
        "Each bucket is one all-reduce, as large as all its gradients together, started when the last of them is "
        "ready. How many of yours run, and when does each of them start?",
    ),
    Question(
        lambda d: ONLY_A_NUMBER in d.names,
        "The gradients are on their way when `finish` is called. What is left to send is one number. Which?",
    ),
    Question(
        has_kind("dW1", MEAN_OF_MEANS),
        "A token of a rank with few tokens counts more here than one of a rank with many. By what do you divide, and "
        "when?",
    ),
    Question(
        has_kind("dW1", NOT_DIVIDED),
        "The gradients belong to the sum over all tokens. Which number turns them into those of the mean?",
    ),
    Question(
        has_kind("dW1", BY_RANKS, f"{BY_RANKS} "),
        "The ranks have different numbers of tokens, and the mean is over tokens. What has the number of ranks to do "
        "with it?",
    ),
    Question(
        has_kind("dW1", BY_OWN_TOKENS),
        "The sum is over the tokens of all ranks, and each rank divides by another number. How does a rank learn the "
        "tokens of the others?",
    ),
    Question(
        lambda d: any(has_kind(f"d{name}", OWN, f"{OWN} ", f"{OWN}  ")(d) for name in SIZES),
        "What was added up has not arrived in `param.grad`. Which tensor did the all-reduce write into?",
    ),
    Question(
        lambda d: any(name.startswith("d") for name in d.names),
        "The gradients of a bucket lie one after another in a flat tensor. In which order did you put them in, in "
        "which do you take them out, and had the all-reduce ended by then?",
    ),
)
