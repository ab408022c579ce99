"""The check for exercise 3.1, which builds operators from the learner's table and runs small networks with them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from tplab.course import checks
from tplab.runtime import device

Table = dict[str, tuple[str, str]]
WAYS = ("nothing", "all-reduce", "all-gather", "my slice")
NAMES = ("f", "g", "scatter", "gather")
RIGHT: Table = {
    "f": ("nothing", "all-reduce"),
    "g": ("all-reduce", "nothing"),
    "scatter": ("my slice", "all-gather"),
    "gather": ("all-gather", "my slice"),
}
H, INNER, OUT = 8, 12, 16  # divisible by every p, and different, so that the check notices if they're mixed up
ERROR = "the network runs"


class Meeting(Function):
    """An operator that does `forward_way` in the forward pass and `backward_way` in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_way: str, backward_way: str) -> Tensor:
        ctx.way = backward_way
        return done(forward_way, x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return done(ctx.way, gradients[0]), None, None


def done(way: str, x: Tensor) -> Tensor:
    p = dist.get_world_size()
    if way == "nothing":
        return x.view_as(x)
    if way == "my slice":
        return x.chunk(p, -1)[dist.get_rank()].clone()
    y = x.clone(memory_format=torch.contiguous_format)
    if way == "all-reduce":
        dist.all_reduce(y)
        return y
    parts = [torch.empty_like(y) for _ in range(p)]
    dist.all_gather(parts, y)
    return torch.cat(parts, -1)


class Problem(NamedTuple):
    x: Tensor  # [5, H]
    a: Tensor  # [H, INNER]
    b: Tensor  # [INNER, OUT]
    gradient: Tensor  # the gradient of the network's output


def network(name: str, x: Tensor, a: Tensor, b: Tensor, op: Callable[[str, Tensor], Tensor]) -> Tensor:
    """Run the small network that tests operator `name`, with full weights or with this rank's shards of them.

    f, g:    two layers
    scatter: one layer, which is split by rows. It doesn't use b
    gather:  one layer, which is split by columns. It doesn't use b
    """
    if name in ("f", "g"):
        return op("g", torch.tanh(op("f", x) @ a) @ b)
    if name == "scatter":
        return op("g", op("scatter", x) @ a)
    return op("gather", op("f", x) @ a)


def split(name: str, problem: Problem, rank: int, p: int) -> tuple[Tensor, Tensor]:
    a = problem.a.chunk(p, 0 if name == "scatter" else 1)[rank]
    return a.contiguous(), problem.b.chunk(p, 0)[rank].contiguous()


def program(name: str, table: Table, problem: Problem) -> checks.Observed:
    """Return the output and gradients of a network in which only operator `name` follows the learner's table."""
    used = RIGHT | {name: table[name]}
    rank, p = dist.get_rank(), dist.get_world_size()
    shards = split(name, problem, rank, p)
    x, a, b = (tensor.to(device()).clone().requires_grad_() for tensor in (problem.x, *shards))
    try:
        out = network(name, x, a, b, lambda which, tensor: Meeting.apply(tensor, *used[which]))
        out.backward(problem.gradient.to(device()))
    except RuntimeError as error:
        return {ERROR: checks.Claim(str(error).splitlines()[0])}
    seen = {"out": out.detach(), "dx": x.grad, "da": a.grad} | ({"db": b.grad} if name in ("f", "g") else {})
    return {observed: value.cpu() for observed, value in seen.items() if value is not None} | {ERROR: checks.Claim("")}


def expected(name: str, problem: Problem, rank: int, p: int) -> dict[str, Tensor]:
    """Return the correct output and gradients for one rank, computed in a single process.

    The gradients of the weights are those of the rank's shards.
    """
    x, a, b = (tensor.clone().requires_grad_() for tensor in problem[:3])
    out = network(name, x, a, b, lambda which, tensor: tensor)
    out.backward(problem.gradient)
    da, db = (leaf if leaf.grad is None else leaf.grad for leaf in (a, b))
    shards = split(name, Problem(x, da, db, problem.gradient), rank, p)
    right = {"out": out.detach(), "dx": x.grad, "da": shards[0]} | ({"db": shards[1]} if name in ("f", "g") else {})
    return {observed: value for observed, value in right.items() if value is not None}


@checks.exercise("3.1", "A table of four operators")
def table(operator_table: Callable[[], Table]) -> checks.Verdict:
    with checks.calling("operator_table()"):
        said = operator_table()
    _require_form(said)
    generator = checks.fresh_generator()
    for name in NAMES:
        for p in (2, 4):
            problem = Problem(
                checks.random_tensor(generator, 5, H),
                checks.random_tensor(generator, H, INNER),
                checks.random_tensor(generator, INNER, OUT),
                checks.random_tensor(generator, 5, OUT if name in ("f", "g") else INNER),
            )
            ways = tuple(said[name])
            seen = checks.run_ranks(program, p, name, {name: ways}, problem)
            right = [expected(name, problem, rank, p) for rank in range(p)]
            note = f'{name} with "{ways[0]}" forward and "{ways[1]}" backward'
            checks.verify("3.1", p, list(seen), right, questions=_QUESTIONS[name], note=note)
    return checks.Verdict(
        "Networks built with the operators in your table compute the same gradients as a single process does."
    )


def _require_form(said: object) -> None:
    if not isinstance(said, dict) or set(said) != set(NAMES):
        got = f"a dict with the keys {sorted(map(str, said))}" if isinstance(said, dict) else type(said).__name__
        checks.fail(
            "3.1", f"operator_table() returned {got}.", f"It should return a dict with the keys {', '.join(NAMES)}."
        )
    for name, ways in said.items():
        if not isinstance(ways, (tuple, list)) or len(ways) != 2 or not set(ways) <= set(WAYS):
            checks.fail(
                "3.1",
                f"For {name}, the table says {ways!r}.",
                f"Each operator needs two of these words, one for the forward pass and one for the backward pass: "
                f"{', '.join(WAYS)}. Which two words describe {name}?",
            )


def _shape(more: str) -> checks.Question:
    return checks.Question(
        lambda d: ERROR in d.names,
        f"The check built a small network from your table, and one of its tensors had the wrong shape. {more}",
    )


_SIZES = _shape("Neither f nor g changes the size of a tensor. Which of the four options change a tensor's size?")
_QUESTIONS = {
    "f": (
        _SIZES,
        checks.Question(
            lambda d: "out" in d.names,
            "Every rank already has the correct x. Is there anything left for f to do in the forward pass?",
        ),
        checks.Question(
            lambda d: bool(d.names & {"dx", "da", "db"}),
            "Every rank uses x, but the gradient that reaches f only accounts for this rank's own use of x. How does "
            "the chain rule combine the gradients from all uses of a variable?",
        ),
    ),
    "g": (
        _SIZES,
        checks.Question(
            lambda d: "out" in d.names,
            "Each rank passes one term of a sum to g. Which collective gives the sum to every rank?",
        ),
        checks.Question(
            lambda d: bool(d.names & {"dx", "da", "db"}),
            "All ranks compute the same loss from the same z, so each of them already has the gradient of z. How many "
            "times would that loss be counted if you summed the gradients across ranks?",
        ),
    ),
    "scatter": (
        _shape(
            "The output of scatter should be this rank's own slice of x. In the backward pass, each rank only has the "
            "gradient of its own slice, but the layers that come before scatter need the gradient of the full x. How "
            "can a rank get the other ranks' slices of this gradient?"
        ),
    ),
    "gather": (
        _shape(
            "The output of gather should contain the slices from all ranks. In the backward pass, every rank already "
            "has the gradient of the full output. Which part of this gradient belongs to this rank's own slice?"
        ),
    ),
}
