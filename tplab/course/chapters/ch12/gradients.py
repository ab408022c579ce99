"""The check of exercise 12.3: add up, in one all-reduce, the gradients of what saw only this rank's tokens."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tplab.course.checks import (
    GROUPS,
    IN_GROUPS,
    WORLD_SIZES,
    Claim,
    Differences,
    Observed,
    Question,
    Snapshot,
    Traffic,
    Verdict,
    ask_about_group,
    called_as,
    exercise,
    fresh_generator,
    group_question,
    has_kind,
    make_group,
    member_of,
    random_tensor,
    run_ranks,
    traffic,
    verify,
)
from tplab.runtime import device, record

CALL = "allreduce_sequence_gradients(module, group)"
RETURNS, KEEPS = "nothing is returned", "a parameter without a gradient has none afterwards"
MARKED = {"norm.weight": (6,), "norm.bias": (6,), "deep.inside.table": (4, 3), "bias": (5,)}
UNMARKED = {"up.weight": (3, 4), "down.weight": (2, 5), "said_no.weight": (3,)}
WITHOUT = "unused.weight"  # marked, and no gradient has reached it
OWN, MEAN, TWICE = "this rank's own term", "the mean over the ranks", "what a second sum over the ranks gives"


def build(gradients: dict[str, Tensor]) -> nn.Module:
    """A module whose parameters have these gradients; one of them, a table, lies transposed in memory."""
    model = nn.Module()
    for name, shape in {**MARKED, **UNMARKED, WITHOUT: (2,)}.items():
        *path, last = name.split(".")
        home = model
        for part in path:
            if part not in dict(home.named_children()):
                home.add_module(part, nn.Module())
            home = home.get_submodule(part)
        parameter = nn.Parameter(torch.full(shape, 0.5, dtype=torch.float64, device=device()))
        if name in MARKED or name == WITHOUT:
            parameter.sequence_parallel = True  # type: ignore[attr-defined]
        elif name.startswith("said_no"):
            parameter.sequence_parallel = False  # type: ignore[attr-defined]
        if name in gradients:
            gradient = gradients[name].clone().to(device())
            parameter.grad = gradient.T.contiguous().T if gradient.dim() == 2 else gradient
        home.register_parameter(last, parameter)
    return model


def on_rank(add_up: Callable[..., Any], groups: Sequence[Sequence[int]] | None, data: Sequence[dict]) -> Observed:
    """On a rank: what the gradients are afterwards, and what was sent."""
    group = make_group(groups)
    model = build(data[dist.get_rank()])
    params = dict(model.named_parameters())
    values = Snapshot(**{name: param.detach() for name, param in params.items()})
    with record() as section, called_as(CALL):
        returned = add_up(model, group)
    left = params.pop(WITHOUT).grad
    return {
        **{f"d{name}": param.grad for name, param in params.items()},
        "traffic": traffic(section),
        "parameters unchanged": values.changed(),
        KEEPS: Claim("" if left is None else f"{WITHOUT} has one now"),
        RETURNS: Claim("" if returned is None else f"it returned a {type(returned).__name__}"),
    }


@exercise("12.3", "Add up what each rank's tokens gave")
def gradients(add_up: Callable[..., Any]) -> Verdict:
    shapes = {**MARKED, **UNMARKED}
    for p in WORLD_SIZES:
        for groups in (None, GROUPS) if p == 4 else (None,):
            generator = fresh_generator()
            data = [{name: random_tensor(generator, *shape) for name, shape in shapes.items()} for _ in range(p)]
            whose, note = (ask_about_group(WHOSE_GROUP), IN_GROUPS) if groups else (CRASH, "")
            seen = run_ranks(on_rank, p, add_up, groups, data, question=whose, stuck=whose, note=note)
            expected: list[dict[str, Any]] = []
            alike: dict[str, dict[str, list[Tensor]]] = {
                f"d{name}": {label: [] for label in (OWN, MEAN, TWICE)} for name in MARKED
            }
            for rank, (_, ranks) in enumerate(member_of(p, groups)):
                total = {name: torch.stack([data[r][name] for r in ranks]).sum(0) for name in shapes}
                right = {f"d{name}": total[name] if name in MARKED else data[rank][name] for name in shapes}
                numel = sum(total[name].numel() for name in MARKED)
                expected.append({**right, "traffic": Traffic.expected(p, ("all_reduce", numel), group=ranks)})
                for name in MARKED if len(ranks) > 1 else ():
                    values = (data[rank][name], total[name] / len(ranks), total[name] * len(ranks))
                    for label, value in zip((OWN, MEAN, TWICE), values, strict=True):
                        alike[f"d{name}"][label].append(value)
            questions = [*QUESTIONS[:1], group_question(WHOSE_GROUP)] if groups else QUESTIONS
            lookalikes = alike if p > 1 else {}
            verify("12.3", p, seen, expected, questions=questions, lookalikes=lookalikes, note=note)
    return Verdict("One small all-reduce a step, and the replicas are one model again.")


def marked(differences: Differences) -> set[str]:
    return {name for name in MARKED if f"d{name}" in differences.names}


def any_kind(*kinds: str) -> Callable[[Differences], bool]:
    return lambda d: any(has_kind(f"d{name}", *kinds)(d) for name in MARKED)


WHOSE_GROUP = "Which call was not given `group`, and so adds up over all ranks?"
CRASH = (
    "A parameter that took no part in this step has the gradient None, and a gradient may lie transposed in memory. "
    "Which line expects something else? (`flatten()` copes with any layout, `view` does not.)"
)
QUESTIONS = (
    Question(
        lambda d: "parameters unchanged" in d.names,
        "The parameters themselves have changed. Which tensor is summed, `param` or `param.grad`?",
    ),
    Question(lambda d: RETURNS in d.names, "The result is in the gradients; nothing has to be returned. What is?"),
    Question(
        lambda d: any(f"d{name}" in d.names for name in UNMARKED),
        "A gradient that belongs to this rank alone was changed too. Which parameters are marked, and with which "
        "value? (Shards have the attribute `tensor_parallel`; here what counts is `sequence_parallel`, which may be "
        "False.)",
    ),
    Question(
        any_kind(MEAN, "1/p"),
        "The loss is not divided by p: each rank's tokens gave one term of one gradient. Sum or mean?",
    ),
    Question(any_kind(TWICE, "p times"), "How many times does each rank's term enter the sum?"),
    Question(
        lambda d: bool(marked(d)) and any_kind(OWN)(d) and "traffic" in d.names,
        "The marked gradients are still this rank's own. Which parameters does your loop find? (Also those of modules "
        "within modules.)",
    ),
    Question(
        lambda d: bool(marked(d)) and any_kind(OWN)(d),
        "The sum was sent and did not arrive in `param.grad`. `torch.cat` makes a new tensor: who copies its parts "
        "back?",
    ),
    Question(
        lambda d: bool(marked(d)),
        "The sum is there, but its parts are in the wrong places. In which order were the gradients put together, with "
        "which lengths are they taken apart, and in which shape do they go back?",
    ),
    Question(
        lambda d: "traffic" in d.names,
        "The gradients are right, the communication is not: one all-reduce with the numbers of all marked gradients, "
        "since each message costs its latency. What does yours send?",
    ),
    Question(lambda d: KEEPS in d.names, "It took no part in this step, and its gradient is None. Leave it so."),
)
