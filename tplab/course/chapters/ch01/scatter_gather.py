"""The check of exercise 1.1: scatter and gather, by send and recv."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tplab.course.chapters.ch01.rings import (
    NOT_WAITED,
    ORDER,
    SILENT,
    TORCHS_OWN,
    only_traffic,
    run_on_ranks,
    sent,
    unwaited,
)
from tplab.course.checks import (
    Call,
    Observed,
    Question,
    Snapshot,
    Traffic,
    Verdict,
    exercise,
    fresh_generator,
    has_kind,
    kind_is,
    random_tensor,
    traffic,
    verify,
)
from tplab.runtime import device, record

Scatter = Callable[[Tensor, list[Tensor] | None, int], Tensor]
Gather = Callable[[Tensor, int], list[Tensor] | None]
Case = tuple[int, list[Tensor], list[Tensor]]  # root, what it scatters, what is gathered
SHAPES = ((5,), (2, 3))
_OF_SCATTER = ("out", "returned", "scatter traffic")
_OF_GATHER = ("gathered", "gather traffic")

_FIRST = "the first one of the parts"
_NEXT = "the part of the next rank"
_BEFORE = "the part of the rank before"

_QUESTIONS = (
    NOT_WAITED,
    Question(
        lambda d: "changed" in d.kinds(),
        "Scattering and gathering only copy. Which line writes into a tensor that the caller still needs?",
    ),
    Question(
        sent(*TORCHS_OWN),
        "torch has a collective that does this, and you called one. Build it from dist.send and dist.recv: who sends "
        "what to whom?",
    ),
    SILENT,
    Question(
        lambda d: "out" in d.names and "returned" not in d.names,
        "What is returned is right, but the tensor `out` that the caller passed in was not filled. `out = ...` only "
        "gives a name to another tensor; what copies numbers into an existing one? And does the source fill its own?",
    ),
    Question(
        lambda d: "returned" in d.names and "out" not in d.names,
        "`out` is filled rightly. What does the function return, on the source and on the others?",
    ),
    Question(
        kind_is("out", _FIRST, _NEXT, _BEFORE),
        "The right numbers went to the wrong rank. Rank r gets parts[r], also when the source stands in the middle of "
        "the ranks: which index does each send use?",
    ),
    Question(
        lambda d: "out" in d.names and len(d.ranks("out")) == 1 and d.p > 1,
        "All ranks but one are right. Is it the source, which sends nothing to itself?",
    ),
    Question(
        has_kind("gathered", "none"),
        "Rank dst got None. Is there a `return` on every way through the function, and is dst always rank 0?",
    ),
    Question(
        lambda d: (
            "gathered" in d.names and any("where None is right" in row.text for row in d if row.name == "gathered")
        ),
        "Only rank dst gathers. What do the other ranks return?",
    ),
    Question(
        lambda d: any("where a list" in row.text for row in d if row.name == "gathered"),
        "A list of p tensors is wanted. Which line makes something else of it?",
    ),
    Question(
        lambda d: "gathered" in d.names,
        "The list is in rank order, with rank dst's own tensor at its own place. Whose tensor stands where in yours? "
        "([buffer] * p is p times the same tensor.)",
    ),
    Question(
        lambda d: only_traffic(d) and "scatter traffic" in d.names,
        "Every rank has its part, but more or other messages were sent than have to be. Each rank needs parts[rank] "
        "and nothing else: how many messages is that, and how large?",
    ),
    Question(
        lambda d: only_traffic(d) and "gather traffic" in d.names,
        "Rank dst has the list, but more or other messages were sent than have to be. Who has to send, to whom, and "
        "how often?",
    ),
)


@exercise("1.1", "scatter and gather by send and recv")
def scatter_and_gather(scatter: Scatter, gather: Gather) -> Verdict:
    for p in ORDER:
        generator = fresh_generator()
        roots = sorted({0, p - 1, p // 2})
        cases = [
            (
                root,
                [random_tensor(generator, *shape) for _ in range(p)],
                [random_tensor(generator, *shape) for _ in range(p)],
            )
            for root, shape in zip(roots, (SHAPES * 2)[: len(roots)], strict=True)
        ]
        if p == ORDER[0]:  # first each alone: a message that nobody waits for can stop whatever comes after it
            _check(p, scatter, None, cases[:1])
            _check(p, None, gather, cases[:1])
        _check(p, scatter, gather, cases)
    return Verdict("From and to any rank, with p - 1 messages each.")


def _check(p: int, scatter: Scatter | None, gather: Gather | None, cases: Sequence[Case]) -> None:
    """Either may be None: then only the other is called."""
    seen = run_on_ranks(_run, p, scatter, gather, cases)
    for index, (root, parts, xs) in enumerate(cases):
        expected = [_right(root, parts, xs, rank, p) for rank in range(p)]
        names = (_OF_SCATTER if scatter else ()) + (_OF_GATHER if gather else ())
        verify(
            "1.1",
            p,
            [noted[index] for noted in seen],
            [{name: right[name] for name in names} for right in expected],
            questions=_QUESTIONS,
            lookalikes={"out": _lookalikes(parts)} if p > 1 else {},
            note=" = ".join(["src"] * bool(scatter) + ["dst"] * bool(gather) + [str(root)]),
        )


def _run(scatter: Scatter | None, gather: Gather | None, cases: Sequence[Case]) -> list[Observed]:
    rank, noted = dist.get_rank(), []
    for root, parts, xs in cases:
        given = [part.to(device()) for part in parts] if rank == root else None
        out = torch.full_like(parts[0], 7.0, device=device())
        x = xs[rank].to(device())
        before = Snapshot(x=x, **{f"parts[{index}]": part for index, part in enumerate(given or [])})
        case: dict[str, Any] = {}
        if scatter:
            with record() as section:
                returned = scatter(out, given, root)
            case |= {"out": out, "returned": returned, "scatter traffic": traffic(section)}
        if gather:
            with record() as section:
                gathered = gather(x, root)
            case |= {"gathered": gathered, "gather traffic": traffic(section)}
        noted.append(case | {"inputs unchanged": before.changed()})
        if unwaited(noted[-1]):
            break  # what comes next might wait for it for ever
    return noted


def _right(root: int, parts: list[Tensor], xs: list[Tensor], rank: int, p: int) -> dict[str, Any]:
    others = [other for other in range(p) if other != root] if rank == root else [rank] if p > 1 else []
    numel = parts[0].numel()
    kinds = ("send", "recv") if rank == root else ("recv", "send")
    out, back = [(root, other) for other in others], [(other, root) for other in others]
    return {
        "out": parts[rank],
        "returned": parts[rank],
        "scatter traffic": Traffic(Call(kinds[0], numel, "float64", pair) for pair in out),
        "gathered": xs if rank == root else None,
        "gather traffic": Traffic(Call(kinds[1], numel, "float64", pair) for pair in back),
    }


def _lookalikes(parts: list[Tensor]) -> dict[str, list[Tensor]]:
    p = len(parts)
    return {
        _FIRST: [parts[0] if rank else parts[0] + float("nan") for rank in range(p)],
        _NEXT: [parts[(rank + 1) % p] for rank in range(p)],
        _BEFORE: [parts[rank - 1] for rank in range(p)],
    }
