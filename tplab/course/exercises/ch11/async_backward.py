"""The check for exercise 11.3, a backward pass that computes dW while the all-reduce of dx is running.

The check doesn't compare how long anything takes. It compares the order in which a rank runs the two matmuls
(recognized by the sizes of their results), starts the all-reduce, and waits for it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tplab.course import checks
from tplab.runtime import device

HIDDEN, SHARD = 5, 7  # h, and the weight's rows on a rank; these sizes identify the matmuls
RIGHT = "dx, all-reduce, dW, wait"
_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "mv", "dot", "sum", "linear", "matmul", "einsum"}
_MAKES = {"dx": _PRODUCTS, "dW": {*_PRODUCTS, "mul"}}  # torch.outer, which computes one token's term of dW, is a mul
_SENT = {"allreduce_", "all_reduce", "all_reduce_"}

ORDER = "order of the backward pass"
NOT_SUMMED = "this rank's own part of dx, before the sum"
MEAN = "the mean over the ranks"
OWN_TIMES_P = "p times this rank's own part"
SUMMED_WEIGHTS = "the sum of dW over the ranks, whose shards are different ones"
LAST_TOKEN = "what the last token alone gives"


@dataclass(frozen=True)
class Input(checks.Case):
    """A case with an x of shape [*leading, h]. With `frozen`, the weight needs no gradient."""

    leading: tuple[int, ...] = (3, 2)
    frozen: bool = False

    def describe(self, name: str) -> str:
        return f"x {[*self.leading, HIDDEN]}" + ", with a weight that needs no gradient" * self.frozen


CASES = (Input(), Input(leading=(2,)), Input(leading=(2, 2, 2)), Input(groups=checks.GROUPS), Input(frozen=True))


class Watch(TorchDispatchMode):
    """Dispatch mode that records matmuls with results the size of dx or dW, all-reduces, and waits, in their order."""

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
        for tensor in tree_leaves(result):
            what = self.sizes.get(tensor.numel(), "") if isinstance(tensor, Tensor) else ""
            if name in _MAKES.get(what, ()):
                self.note(what)
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


class Problem(NamedTuple):
    """The x that all ranks of a group share, and the tensors that differ between ranks."""

    x: Tensor  # [.., h]
    weights: list[Tensor]  # one per rank, [m/p, h]
    dys: list[Tensor]  # one per rank, [.., m/p]


def draw(case: Input, generator: torch.Generator, size: int) -> Problem:
    x = checks.random_tensor(generator, *case.leading, HIDDEN)
    weights = [checks.random_tensor(generator, SHARD, HIDDEN) for _ in range(size)]
    return Problem(x, weights, [checks.random_tensor(generator, *case.leading, SHARD) for _ in range(size)])


def give(case: Input, problem: Problem, place: checks.Place) -> tuple[Tensor, Tensor, Tensor]:
    return problem.x, problem.weights[place.index], problem.dys[place.index]


def run(function: Any, case: Input, given: tuple[Tensor, Tensor, Tensor], group: Any) -> checks.Observed:
    x, weight, dy = (tensor.to(device()) for tensor in given)
    weight.requires_grad_(not case.frozen)
    watch = Watch(x.numel(), weight.numel())

    class Watched(function):
        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            with nullcontext() if watch.events else watch.watching():  # watch only the first backward pass
                return function.backward(ctx, *gradients)

    seen = checks.observe(
        lambda leaf: Watched.apply(leaf, weight, group), dy, inputs={"x": x}, parameters={"W": weight}
    )
    if case.frozen:  # then there's no dW to compute while the all-reduce is running
        return seen
    return seen | ({ORDER: ", ".join(watch.events)} if dist.get_world_size(group) > 1 else {})


def expect(case: Input, problem: Problem, place: checks.Place) -> checks.Expected:
    x, weights, dys = problem
    tokens, own_dys = x.reshape(-1, HIDDEN), [dy.reshape(-1, SHARD) for dy in dys]  # [b·s, h], [b·s, m/p]
    dxs = [torch.tensordot(dy, weight, dims=1) for dy, weight in zip(dys, weights, strict=True)]  # [.., h]
    dws = [torch.einsum("tm,th->mh", dy, tokens) for dy in own_dys]  # [m/p, h]
    dx, dw = torch.stack(dxs).sum(0), dws[place.index]
    right = {
        "out": torch.tensordot(x, weights[place.index].T, dims=1),
        "dx": dx,
        "dW": dw,
        "forward traffic": checks.Traffic(),
        "backward traffic": place.traffic(("all_reduce", x.numel())),
    }
    if case.frozen:
        right["dW"] = None
    mistakes = {"dx": {}, "dW": {LAST_TOKEN: torch.outer(own_dys[place.index][-1], tokens[-1])}}
    if place.size > 1:
        own = dxs[place.index]
        if not case.frozen:
            right[ORDER] = RIGHT
        mistakes["dx"] = {NOT_SUMMED: own, MEAN: dx / place.size, OWN_TIMES_P: place.size * own}
        mistakes["dW"][SUMMED_WEIGHTS] = torch.stack(dws).sum(0)
    return checks.Expected(right, mistakes)


@checks.exercise("11.3", "A backward pass that does not wait")
def async_backward(function: Any) -> checks.Verdict:
    checks.check_cases(
        "11.3", function, CASES, draw=draw, give=give, run=run, expect=expect,
        questions=lambda case, observed: (*[FROZEN] * case.frozen, *QUESTIONS), crash=CRASH,
        stuck=STUCK, whose_group=WHOSE_GROUP,
    )  # fmt: skip
    return checks.Verdict(f"In this order on every rank: {RIGHT}.")


WHOSE_GROUP = "Which call was not given the group that forward was given?"
CRASH = (
    "Write the shapes next to each line: dy is [.., m/p], weight [m/p, h], x [.., h], and the three that you return "
    "belong to x, weight and group, in this order. What does dist.all_reduce give back with async_op=True?"
)
STUCK = "Does every rank start the all-reduce of dx, with the same shape, and wait for what it started?"


def _order(*parts: str) -> Callable[[checks.Differences], bool]:
    """Return a predicate that tests whether the order is wrong and contains these events one right after the other."""
    return lambda d: ORDER in d.names and ", ".join(parts) in d.text(ORDER).partition(", expected")[0]


FROZEN = checks.Question(
    lambda d: {"dx", "backward traffic"} & d.names != set() and "out" not in d.names,
    "Your code is correct if the weight needs a gradient. Here the weight is frozen, so there's no dW to compute. But "
    "x still needs its gradient, and every rank still has only one term of it. Which of your lines skips the "
    "all-reduce?",
)
QUESTIONS = (
    checks.INPUTS_QUESTION,
    checks.Question(
        lambda d: d.malformed and "out" in d.names, "forward is given. What does it return, and did you change it?"
    ),
    checks.Question(
        checks.has_no_gradient("dx", "dW"),
        "backward returns one gradient for each argument of forward: x, weight, group. Which one is None or zero, and "
        "should not be?",
    ),
    checks.Question(
        lambda d: checks.has_kind("backward traffic", "no traffic")(d),
        "Each rank's weight gives its own part of dx, and x went to every rank. Who adds the parts up?",
    ),
    checks.Question(
        checks.has_kind("dW", SUMMED_WEIGHTS),
        "The ranks hold different rows of the weight. Does the gradient of this rank's rows need anything from the "
        "others?",
    ),
    checks.Question(
        checks.has_kind("dW", LAST_TOKEN),
        "dW adds up over all tokens. Which of them are in your product, and how do you make x and dy two-dimensional?",
    ),
    checks.Question(checks.has_kind("dx", MEAN), "The chain rule adds over all uses of x. Does it take their mean?"),
    checks.Question(
        lambda d: checks.has_kind("dx", NOT_SUMMED, OWN_TIMES_P)(d) and "backward traffic" not in d.names,
        "An all-reduce ran, but the tensor that you return does not hold the sum. Which tensor did it write into?",
    ),
    checks.Question(
        lambda d: "backward traffic" in d.names and ORDER not in d.names,
        "One all-reduce of dx, as large as x, is all that has to be sent. Which call sends more, or something else?",
    ),
    checks.Question(
        lambda d: checks.has_kind("backward traffic", "traffic")(d),
        "One all-reduce, of dx, as large as x, is all that has to be sent. What does your backward send?",
    ),
    checks.Question(
        _order("all-reduce, wait, dW"),
        "The gradients are right, but the rank waits for the sum before it computes dW, so nothing runs beside it. "
        "Does dW need the sum? Where is the last line at which you may wait?",
    ),
    checks.Question(
        _order("dW, all-reduce"),
        "The gradients are right, but by the time the all-reduce starts, dW is there already: nothing is left to do "
        "beside it. Which of the two products can be sent away while the other is computed?",
    ),
    checks.Question(
        _order("dW, dx, all-reduce"),
        "The gradients are right, but dW was computed before there was anything to send. Which product comes first?",
    ),
    checks.Question(
        lambda d: d.names == {ORDER},
        "The gradients are right. In which order should the rank compute dx, start its all-reduce, compute dW, wait?",
    ),
    checks.Question(
        lambda d: "dx" in d.names and "dW" not in d.names,
        "dW is right. dx is dy times weight, [.., m/p] times [m/p, h], summed over the ranks: where does yours differ?",
    ),
    checks.Question(
        lambda d: "dW" in d.names and "dx" not in d.names,
        "dx is right. dW is the sum over all tokens of dy's row times x's row: [m/p, b·s] times [b·s, h]. Where does "
        "yours differ?",
    ),
)
