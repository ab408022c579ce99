"""The check of exercise 12.1: gather and reduce-scatter along the sequence, each tested alone.

Every rank has its own x and its own upstream gradient, so that no wrong sum, slice or order can hide. The plain cases
come first; then an input that autograd has saved, tensors that are not contiguous, and the gradient of .sum().
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from tplab.course.chapters.ch12.mapping_questions import GATHER_QUESTIONS, SCATTER_QUESTIONS, STUCK_BY, lookalikes
from tplab.course.checks import (
    CheckFailed,
    Observed,
    Question,
    Traffic,
    Verdict,
    exercise,
    fail,
    fresh_generator,
    observe,
    random_tensor,
    run_cases,
    verify,
)
from tplab.runtime import device

S = 8  # tokens of the whole sequence: divisible by every p


@dataclass(frozen=True)
class Case:
    """One run. layout: in memory; expanded: the upstream gradient is that of out.sum(); exp: x comes out of exp."""

    note: str
    batch: int = 3
    rest: tuple[int, ...] = (2,)
    layout: str = "contiguous"
    expanded: bool = False
    exp: bool = False


PLAIN = (Case("x [3, .., 2]"), Case("x of 4 dimensions", 2, (3, 2)), Case("one sequence, x [1, .., 2]", 1))
SPECIAL = (
    Case("x after exp, whose output autograd has saved", exp=True),
    Case("x and the gradient laid out [s, b, h] in memory", layout="sequence first"),
    Case("x and the gradient every second column of a larger tensor", layout="every second column"),
    Case("the gradient of .sum(), with strides of 0", expanded=True),
)


@dataclass(frozen=True)
class Mapping:
    """One of the two: what it gives forward and backward, and which collective sends it."""

    name: str
    cut_in: bool  # x is this rank's tokens
    forward: Callable[[Sequence[Tensor]], list[Tensor]]
    backward: Callable[[Sequence[Tensor]], list[Tensor]]
    sends: tuple[str, str]
    questions: Sequence[Question]


def whole(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.cat(list(tensors), 1)] * len(tensors)


def part_of_sum(tensors: Sequence[Tensor]) -> list[Tensor]:
    return list(torch.stack(list(tensors)).sum(0).chunk(len(tensors), 1))


GATHER = Mapping("GatherFromSequence", True, whole, part_of_sum, ("all_gather", "reduce_scatter"), GATHER_QUESTIONS)
SCATTER = Mapping(
    "ReduceScatterToSequence", False, part_of_sum, whole, ("reduce_scatter", "all_gather"), SCATTER_QUESTIONS
)


@exercise("12.1", "Gather and reduce-scatter along the sequence")
def mappings(gather: Any, reduce_scatter: Any) -> Verdict:
    for mapping, answer in ((GATHER, gather), (SCATTER, reduce_scatter)):
        if not (isinstance(answer, type) and issubclass(answer, Function)):
            fail(
                "12.1",
                f"{mapping.name} is not a class made from torch.autograd.Function.",
                "Is the line `class ...(Function):` still there?",
            )
        for p, cases in ((2, PLAIN), (2, SPECIAL), (4, PLAIN + SPECIAL), (1, PLAIN + SPECIAL)):
            check_cases(mapping, answer, p, cases)  # two ranks first: they tell most about a mistake
    return Verdict("Each is the other's backward. Together they send what one all-reduce sends.")


def check_cases(mapping: Mapping, answer: Any, p: int, cases: Sequence[Case]) -> None:
    generator = fresh_generator()
    data = []
    for case in cases:
        tokens, out_tokens = (S // p, S) if mapping.cut_in else (S, S // p)
        x = [random_tensor(generator, case.batch, tokens, *case.rest) for _ in range(p)]
        dy = [random_tensor(generator, case.batch, out_tokens, *case.rest) for _ in range(p)]
        data.append((x, [torch.ones_like(d) for d in dy] if case.expanded else dy))
    for case, (given, dy), seen in zip(cases, data, run(mapping, answer, p, cases, data), strict=True):
        x = [t.exp() if case.exp else t for t in given]
        dx = [d * e if case.exp else d for d, e in zip(mapping.backward(dy), x, strict=True)]
        size = case.batch * S * torch.Size(case.rest).numel()
        out, forward, backward = mapping.forward(x), *(Traffic.expected(p, (kind, size)) for kind in mapping.sends)
        expected = [
            {"out": out[rank], "forward traffic": forward, "dx": dx[rank], "backward traffic": backward}
            for rank in range(p)
        ]
        alike = lookalikes(x, dy, mapping.cut_in) if p > 1 and not case.exp else {}
        note = f"{mapping.name}, {case.note}"
        verify("12.1", p, seen, expected, questions=mapping.questions, lookalikes=alike, note=note)


def run(mapping: Mapping, answer: Any, p: int, cases: Sequence[Case], data: Sequence[Any]) -> Iterator[list[Observed]]:
    """What each case gave on p ranks; a failure that these mappings are known for gets a question of its own."""
    try:
        yield from run_cases(on_rank, p, answer, cases, data, note=lambda case: f"{mapping.name}, {case.note}")
    except CheckFailed as failure:
        failure.question = next((ask for words, ask in STUCK_BY.items() if words in failure.report), failure.question)
        raise


def on_rank(operator: Any, cases: Sequence[Case], data: Sequence[Any]) -> list[Observed]:
    """On a rank: every case; data[case] is (x, upstream gradient), each of every rank."""
    rank, noted = dist.get_rank(), []
    for case, (x, dy) in zip(cases, data, strict=True):
        gradient = None if case.expanded else laid_out(dy[rank].to(device()), case.layout)

        def apply(x: Tensor, case: Case = case) -> Any:
            return operator.apply(x.exp() if case.exp else x)

        noted.append(observe(apply, gradient, inputs={"x": laid_out(x[rank].to(device()), case.layout)}))
    return noted


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same numbers, arranged in memory as `layout` says."""
    if layout == "sequence first":
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "every second column":
        wide = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1]), 7.0)
        wide[..., ::2] = tensor
        return wide[..., ::2]
    return tensor
