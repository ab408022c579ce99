"""The check of exercise 11.3: a backward pass that computes dW while the sum of dx travels.

What is compared is not how long anything takes but the order in which the rank does things: the products by the shape
of what they give, the start of the all-reduce, the wait for it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tplab.course.chapters.ch11.async_questions import (
    CRASH,
    LAST_TOKEN,
    MEAN,
    NOT_SUMMED,
    ORDER,
    ORDER_QUESTIONS,
    OWN_TIMES_P,
    STUCK,
    SUMMED_WEIGHTS,
    WHOSE_GROUP,
)
from tplab.course.checks import (
    GROUPS,
    IN_GROUPS,
    WORLD_SIZES,
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

HIDDEN, SHARD = 5, 7  # h, and the rows of weight that a rank holds: sizes by which the products can be told apart
RIGHT = "dx, all-reduce, dW, wait"
_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "mv", "dot", "sum", "linear", "matmul", "einsum"}
_SENT = {"allreduce_", "all_reduce", "all_reduce_"}


@dataclass(frozen=True)
class Case:
    """An input's leading dimensions, and whether the ranks work in two groups."""

    leading: tuple[int, ...] = (3, 2)
    groups: tuple[tuple[int, ...], ...] | None = None

    def note(self) -> str:
        return f"x {[*self.leading, HIDDEN]}" + (f" {IN_GROUPS}" if self.groups else "")


CASES = (Case(), Case(leading=(2,)), Case(groups=GROUPS))


class Watch(TorchDispatchMode):
    """Notes, in order: what gives a tensor as large as dx or as dW, the start of an all-reduce, the wait for it."""

    def __init__(self, dx: int, dw: int) -> None:
        super().__init__()
        self.sizes = {dx: "dx", dw: "dW"}
        self.events: list[str] = []

    def note(self, event: str) -> None:
        if self.events[-1:] != [event]:
            self.events.append(event)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.__name__.split(".")[0]
        if name in _SENT:
            self.note("all-reduce")
        if name == "wait_tensor":
            self.note("wait")
        result = func(*args, **(kwargs or {}))
        if name in _PRODUCTS:
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor) and tensor.numel() in self.sizes:
                    self.note(self.sizes[tensor.numel()])
        return result

    @contextmanager
    def watching(self) -> Iterator[None]:
        original = dist.Work.wait

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            self.note("wait")
            return original(work, *args, **kwargs)

        dist.Work.wait = wait  # type: ignore[method-assign, assignment]
        try:
            with self:
                yield
        finally:
            dist.Work.wait = original  # type: ignore[method-assign]


def run_backward(function: Any, cases: Sequence[Case], data: Sequence[Sequence[dict[str, Any]]]) -> list[Observed]:
    """On a rank: every case, one after the other."""
    return [run_case(function, case, mine[dist.get_rank()]) for case, mine in zip(cases, data, strict=True)]


def run_case(function: Any, case: Case, mine: dict[str, Any]) -> Observed:
    group = make_group(case.groups)
    x, weight, dy = (mine[name].to(device()) for name in ("x", "weight", "dy"))
    weight.requires_grad_()
    watch = Watch(x.numel(), weight.numel())

    class Watched(function):
        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            with watch.watching():
                return function.backward(ctx, *gradients)

    seen = observe(lambda leaf: Watched.apply(leaf, weight, group), dy, inputs={"x": x}, parameters={"W": weight})
    order = ", ".join(watch.events)
    return seen | ({ORDER: order} if dist.get_world_size(group) > 1 else {})


def expect(case: Case, generator: torch.Generator, p: int) -> list[tuple[dict, dict, dict]]:
    """For each rank: what it is given, what is right there, and what known mistakes give."""
    members = member_of(p, case.groups)
    xs = [random_tensor(generator, *case.leading, HIDDEN) for _ in case.groups or (0,)]
    weights = [random_tensor(generator, SHARD, HIDDEN) for _ in range(p)]
    dys = [random_tensor(generator, *case.leading, SHARD) for _ in range(p)]
    own = [torch.tensordot(dy, weight, dims=1) for dy, weight in zip(dys, weights, strict=True)]
    rows = []
    for rank, (index, ranks) in enumerate(members):
        x, q = xs[index], len(ranks)
        total = torch.stack([own[member] for member in ranks]).sum(0)
        dw = sum(torch.outer(a, b) for a, b in zip(dys[rank].reshape(-1, SHARD), x.reshape(-1, HIDDEN), strict=True))
        right = {
            "out": torch.tensordot(x, weights[rank].T, dims=1),
            "dx": total,
            "dW": dw,
            "forward traffic": Traffic(),
            "backward traffic": Traffic.expected(p, ("all_reduce", x.numel()), group=ranks),
            **({ORDER: RIGHT} if q > 1 else {}),
        }
        last = torch.outer(dys[rank].reshape(-1, SHARD)[-1], x.reshape(-1, HIDDEN)[-1])
        alike: dict[str, dict[str, Tensor]] = {"dx": {}, "dW": {LAST_TOKEN: last}}
        if q > 1:
            alike["dx"] = {NOT_SUMMED: own[rank], MEAN: total / q, OWN_TIMES_P: q * own[rank]}
        rows.append(({"x": x, "weight": weights[rank], "dy": dys[rank]}, right, alike))
    for row, (_, ranks) in zip(rows, members, strict=True):
        if len(ranks) > 1:
            row[2]["dW"][SUMMED_WEIGHTS] = torch.stack([rows[member][1]["dW"] for member in ranks]).sum(0)
    return rows


@exercise("11.3", "a backward pass that does not wait")
def async_backward(function: Any) -> Verdict:
    for p in WORLD_SIZES:
        generator = fresh_generator()
        here = [case for case in CASES if case.groups is None or p == 4]
        table = [expect(case, generator, p) for case in here]
        runs = run_cases(
            run_backward,
            p,
            function,
            here,
            [[row[0] for row in rows] for rows in table],
            note=Case.note,
            question=lambda case: ask_about_group(WHOSE_GROUP) if case.groups else CRASH,
            stuck=lambda case: ask_about_group(WHOSE_GROUP) if case.groups else STUCK,
        )
        for case, rows, seen in zip(here, table, runs, strict=True):
            verify(
                "11.3",
                p,
                seen,
                [row[1] for row in rows],
                questions=[group_question(WHOSE_GROUP), *ORDER_QUESTIONS] if case.groups else ORDER_QUESTIONS,
                lookalikes=by_name([row[2] for row in rows]),
                note=case.note(),
            )
    return Verdict(f"In this order on every rank: {RIGHT}.")
