"""The checks of exercises 11.2, a backward pass that sends while it multiplies, and 11.5, the mean of buffers.

In all cases, messages arrive at the last moment (see `checks.late`), so whatever touches a tensor before `wait()` fails
every time. Neither check compares how long anything takes. They compare the order of matmuls, starts and waits.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tplab.course.checks.cases import GROUPS, Case, Place, random_tensor
from tplab.course.checks.late import late
from tplab.course.checks.observation import Claim, Observed, observe
from tplab.course.checks.recorded_traffic import Traffic, traffic
from tplab.course.checks.run_answer import called_as
from tplab.course.checks.trials import OnRanks, exercise
from tplab.course.checks.twins import Twin
from tplab.runtime import device, record

HIDDEN, SHARD = 5, 7  # h, and the weight's rows on a rank; these sizes identify the matmuls
_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "mv", "dot", "sum", "linear", "matmul", "einsum"}
_MAKES = {"dx": _PRODUCTS, "dW": {*_PRODUCTS, "mul"}}  # torch.outer, which computes one token's term of dW, is a mul
_SENT = {"allreduce_", "all_reduce", "all_reduce_"}
SEND, WAIT = "all-reduce", "wait"


class Watch(TorchDispatchMode):
    """Records matmuls with results of the given sizes, all-reduces, and waits, in their order.

    An all-reduce of dW, which nobody needs, isn't the all-reduce that the check looks for, so it has a name of its own.
    """

    def __init__(self, sizes: Mapping[int, str]) -> None:
        super().__init__()
        self.sizes, self.events = sizes, []  # type: tuple[Mapping[int, str], list[str]]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.__name__.split(".")[0]
        if name in _SENT:
            sent = {self._name_of(tensor) for tensor in tree_leaves(args)}
            self.events.append(f"{SEND} of dW" if "dW" in sent else SEND)
        if name == "wait_tensor":
            self.events.append(WAIT)
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            what = self._name_of(tensor)
            if name in _MAKES.get(what, ()):
                self.events.append(what)
        return result

    def _name_of(self, value: Any) -> str:
        return self.sizes.get(value.numel(), "") if isinstance(value, Tensor) else ""

    @contextmanager
    def watching(self) -> Iterator[None]:
        original = dist.Work.wait

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            self.events.append(WAIT)
            before = len(self.events)
            done = original(work, *args, **kwargs)
            del self.events[before:]  # `late` waits for the message itself, which isn't one of the learner's waits
            return done

        dist.Work.wait = wait  # type: ignore[method-assign, assignment]
        try:
            with self:
                yield
        finally:
            dist.Work.wait = original  # type: ignore[method-assign]

    def is_before(self, first: str, second: str) -> bool:
        """Return whether every event of one kind comes before every event of the other. True if one is missing."""
        places = {kind: [i for i, event in enumerate(self.events) if event == kind] for kind in (first, second)}
        return not all(places.values()) or max(places[first]) < min(places[second])


# 11.2: a backward pass that sends dx while it computes dW

SENT_FIRST = "the all-reduce of dx starts before dW is computed"
WAITS_LAST = "the rank computes dW before it waits"


@dataclass(frozen=True)
class Input(Case):
    """A case with an x of shape [*leading, h]. With `frozen`, the weight needs no gradient."""

    leading: tuple[int, ...] = (3, 2)
    frozen: bool = False

    def describe(self, name: str) -> str:
        return f"x {[*self.leading, HIDDEN]}" + ", with a weight that needs no gradient" * self.frozen


class Problem(NamedTuple):
    """The x that all ranks of a group share, and the tensors that differ between ranks."""

    x: Tensor  # [.., h]
    weights: list[Tensor]  # one per rank, [m/p, h]
    dys: list[Tensor]  # one per rank, [.., m/p]


def draw(case: Input, generator: torch.Generator, size: int) -> Problem:
    x = random_tensor(generator, *case.leading, HIDDEN)
    weights = [random_tensor(generator, SHARD, HIDDEN) for _ in range(size)]
    return Problem(x, weights, [random_tensor(generator, *case.leading, SHARD) for _ in range(size)])


def give(case: Input, problem: Problem, place: Place) -> tuple[Tensor, Tensor, Tensor]:
    return problem.x, problem.weights[place.index], problem.dys[place.index]


def run(function: Any, case: Input, given: tuple[Tensor, Tensor, Tensor], group: Any) -> Observed:
    x, weight, dy = (tensor.to(device()) for tensor in given)
    weight.requires_grad_(not case.frozen)
    watch = Watch({x.numel(): "dx", weight.numel(): "dW"})

    class Watched(function):
        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            with nullcontext() if watch.events else watch.watching():  # watch only the first backward pass
                return function.backward(ctx, *gradients)

    with late():
        seen = observe(lambda leaf: Watched.apply(leaf, weight, group), dy, inputs={"x": x}, parameters={"W": weight})
    if case.frozen or dist.get_world_size(group) == 1:  # then there's no dW to compute, or no message
        return seen
    events = ", ".join(watch.events)
    return seen | {
        SENT_FIRST: Claim("" if watch.is_before(SEND, "dW") else f"the order is {events}"),
        WAITS_LAST: Claim("" if watch.is_before("dW", WAIT) else f"the order is {events}"),
    }


def terms_of_dx(problem: Problem) -> list[Tensor]:
    return [torch.tensordot(dy, weight, dims=1) for dy, weight in zip(problem.dys, problem.weights, strict=True)]


def terms_of_dw(problem: Problem) -> list[Tensor]:
    tokens = problem.x.reshape(-1, HIDDEN)  # [b·s, h]
    return [torch.einsum("tm,th->mh", dy.reshape(-1, SHARD), tokens) for dy in problem.dys]


def right(case: Input, problem: Problem, place: Place) -> Observed:
    return {
        "out": torch.tensordot(problem.x, problem.weights[place.index].T, dims=1),
        "dx": torch.stack(terms_of_dx(problem)).sum(0),
        "dW": None if case.frozen else terms_of_dw(problem)[place.index],
        "forward traffic": Traffic(),
        "backward traffic": place.traffic(("all_reduce", problem.x.numel())),
    }


exercise(
    "11.2", "A backward pass that doesn't wait", takes=["LinearAsync"],
    trials=[
        OnRanks(
            cases=(
                Input(), Input(leading=(2,)), Input(leading=(2, 2, 2)), Input(groups=GROUPS), Input(frozen=True),
            ),
            draw=draw, give=give, run=run, right=right, world_sizes=(2, 4, 1),
            terms=lambda case, problem, size: {"dx": terms_of_dx(problem), "dW": terms_of_dw(problem)},
        )
    ],
    passed="On every rank, dx comes first. While its sum is on the way, the rank computes dW, and waits after that.",
)  # fmt: skip

# 11.5: the mean of buffers, all of them under way at the same time

TOGETHER = "all messages have started before the rank waits for the first one"


@dataclass(frozen=True)
class Buffers(Case):
    """Buffers of these shapes."""

    shapes: tuple[tuple[int, ...], ...] = ((3,), (2, 5), (4,))

    def describe(self, name: str) -> str:
        return f"{name} of {len(self.shapes)} buffer{'s' * (len(self.shapes) != 1)}"


def run_average(average_buffers: Any, case: Buffers, given: list[Tensor], group: Any) -> Observed:
    buffers = [tensor.to(device()) for tensor in given]
    watch = Watch({})
    with called_as(f"average_buffers({len(buffers)} buffers, group)"), late(), watch.watching(), record() as section:
        average_buffers(list(buffers), group)
    sent = traffic(section)
    whole = sum(buffer.numel() for buffer in buffers)
    if sent and all(call.kind == "all_reduce" for call in sent) and sum(call.numel for call in sent) == whole:
        sent = Traffic(sent[0]._replace(numel=buffer.numel()) for buffer in buffers)  # some may share a message
    together = watch.is_before(SEND, WAIT)
    return {
        "buffers": buffers,
        "traffic": sent,
        TOGETHER: Claim("" if together else f"the order is {', '.join(watch.events)}"),
    }


def right_average(case: Buffers, full: list[list[Tensor]], place: Place) -> Observed:
    return {
        "buffers": [torch.stack(tensors).mean(0) for tensors in zip(*full, strict=True)],
        "traffic": place.traffic(*(("all_reduce", tensor.numel()) for tensor in full[0])),
    }


exercise(
    "11.5", "Fix it: divided too early", takes=["average_buffers"],
    trials=[
        OnRanks(
            cases=(Buffers(), Buffers(((2, 3), (6,))), Buffers(((1,), (7,), (2, 2), (5,))), Buffers(((4,),)),
                   Buffers(()), Buffers(groups=GROUPS)),
            draw=lambda case, generator, size: [
                [random_tensor(generator, *shape) for shape in case.shapes] for _ in range(size)
            ],
            give=lambda case, full, place: full[place.index], run=run_average, right=right_average,
            without=(Twin.STRIDED,), world_sizes=(2, 4, 1),
            terms=lambda case, full, size: {
                f"buffer {index}": tensors for index, tensors in enumerate(zip(*full, strict=True))
            },
        )
    ],
    passed="All messages travel at the same time, and no buffer is touched while its message is on the way.",
)  # fmt: skip
