"""The check for exercise 5.2: the message sizes, in bytes, of the collectives in an MLP."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from tplab.course.checks import Question, Verdict, calling, exercise, fresh_generator, run_ranks, verify
from tplab.runtime import device, record
from tplab.tensor.linear import ColumnParallelLinear, RowParallelLinear
from tplab.tensor.mlp import ParallelMLP


def measure(b: int, s: int, h: int, m: int, dtype: torch.dtype) -> dict[str, int]:
    """Measure the message sizes of the course's MLP and the naive MLP, per direction. Runs on every rank."""
    mlp = ParallelMLP(h, m, device=device(), dtype=dtype)
    first = ColumnParallelLinear(h, m, gather_output=True, device=device(), dtype=dtype)
    second = RowParallelLinear(m, h, input_is_parallel=False, device=device(), dtype=dtype)

    def naive(x: torch.Tensor) -> torch.Tensor:
        return second(F.gelu(first(x)))

    sizes = {}
    for name, run in (("ParallelMLP", mlp), ("naive", naive)):
        x = torch.randn(b, s, h, device=device(), dtype=dtype, requires_grad=True)
        with record() as forward:
            out = run(x)
        with record() as backward:
            out.backward(torch.randn_like(out))
        for direction, section in (("forward", forward), ("backward", backward)):
            sizes[f"{name} {direction}"] = sum(c.bytes for c in section if len(c.group) > 1)
    return sizes


def answers(formula: Callable[..., Any], b: int, s: int, h: int, m: int, p: int, size: int) -> dict[str, Any]:
    """Call the learner's formula, and return its results under the names that `measure` uses."""
    said = {}
    for name, naive in (("ParallelMLP", False), ("naive", True)):
        with calling(f"mlp_traffic({b}, {s}, {h}, {m}, {p}, bytes_per_number={size}, naive={naive})"):
            said[name] = formula(b, s, h, m, p, bytes_per_number=size, naive=naive)
    return {
        f"{name} {direction}": value[direction] if isinstance(value, dict) and direction in value else "no such entry"
        for name, value in said.items()
        for direction in ("forward", "backward")
    }


@exercise("5.2", "The bytes of an MLP")
def bytes_of_an_mlp(formula: Callable[..., Any]) -> Verdict:
    generator = fresh_generator()

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    for p in (1, 4, 2):  # 4 before 2, because at 2 a factor of two could mean p or two directions
        for size, dtype in ((4, torch.float32), (8, torch.float64)):
            b, s, h, m = pick(2, 3), pick(5, 7), 4 * pick(2, 3), 4 * pick(5, 9)
            m += 4 * (m % h == 0)  # if m is 2h or p·h, different mistakes give the same number
            said = answers(formula, b, s, h, m, p, size)
            measured = run_ranks(measure, p, b, s, h, m, dtype)[0]
            note = f"b = {b}, s = {s}, h = {h}, m = {m}, {size} bytes a number"
            questions = bytes_questions(said, measured, b * s * h * size, b * s * m * size, p, size)
            verify("5.2", p, [said], [measured], questions=questions, note=note, alone=True)
    return Verdict("The messages of an MLP do not depend on p, once p is more than 1.")


def bytes_questions(
    said: dict[str, Any], measured: dict[str, int], outer: int, inner: int, p: int, size: int
) -> list[Question]:
    """Return questions about wrong byte counts. `outer` and `inner` are the bytes of [b, s, h] and of [b, s, m]."""

    def says(name: str, *values: float) -> bool:
        return said[name] != measured[name] and any(said[name] == value for value in values)

    plain, naive = "ParallelMLP forward", "naive forward"
    rules = [
        (
            "no such entry" in said.values(),
            'The result is a dictionary with two numbers: {"forward": bytes, "backward": bytes}.',
        ),
        (p == 1, "With one rank there is nobody to send anything to. What do f and g do then?"),
        (
            all(said[name] == value / size for name, value in measured.items()),
            "That is how many numbers the messages hold. How many bytes has each?",
        ),
        (
            all(said[name] == value * 4 / size for name, value in measured.items()),
            "Right for float32. How many bytes has a number here, and which argument says so?",
        ),
        (
            says(plain, outer * p, outer / p),
            "The size of a message is the size of the tensor that one rank puts in. Does that tensor shrink or grow "
            "with p? What is its shape after g?",
        ),
        (
            says(plain, outer * 2 * (p - 1) / p, outer * (p - 1) / p),
            "That is what one rank sends in a ring algorithm. Here the size of the message is asked for, as nccl-tests "
            "counts it: the whole tensor.",
        ),
        (
            says(plain, inner, inner / p, outer + inner),
            "Which tensor is all-reduced: the one between the layers, or the one that leaves the MLP?",
        ),
        (
            says(plain, 2 * outer),
            "How many all-reduces run in the forward pass? f runs in the backward pass, g in the forward pass.",
        ),
        (
            said["ParallelMLP forward"] == measured["ParallelMLP forward"]
            and said["ParallelMLP backward"] != measured["ParallelMLP backward"],
            "The forward pass is right. What does f do in the backward pass, and with which tensor?",
        ),
        (
            says(naive, outer),
            "The naive MLP also gathers the inner activation [b, s, m]. Where is that in your formula?",
        ),
        (
            says(naive, outer + inner / p),
            "The size of an all-gather is that of the gathered tensor, all parts together, not of one part.",
        ),
        (
            says(naive, inner),
            "The naive MLP has g at its output as well. Which message is missing?",
        ),
        (
            said[naive] == measured[naive] and said["naive backward"] != measured["naive backward"],
            "The naive forward pass is right. What is the backward of the scatter before the second layer?",
        ),
        (
            True,
            "Go through the table of section 2 row by row: which tensor, which shape, how many bytes a number?",
        ),
    ]
    return [Question(lambda d: True, ask) for fits, ask in rules if fits]
