"""The check for exercise 1.1: scatter and gather, built from send and recv.

Messages have to be contiguous, so the check leaves out the twin that repeats each case on non-contiguous tensors.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tplab.course import checks
from tplab.course.exercises.ch01.rings import (
    ORDER,
    SILENT,
    TORCHS_OWN,
    Tensors,
    about_messages,
    only_traffic,
    sent,
)
from tplab.runtime import device, record

Scatter = Callable[[Tensor, Tensors | None, int], Tensor]
Gather = Callable[[Tensor, int], Tensors | None]
SHAPES = ((5,), (2, 3))

NAMES_SENDER = "every receive names its sender"
RETURNS_OUT = "scatter returns out itself"
OWN_MEMORY = "the gathered tensors share no memory with x"

_FIRST = "the first of the chunks"
_NEXT = "the chunk of the next rank"
_BEFORE = "the chunk of the previous rank"


@dataclass(frozen=True)
class Root(checks.Case):
    """A scatter from rank `root` followed by a gather to the same rank, or only one of the two.

    shape: the shape of each rank's chunk in the scatter, and of each rank's tensor in the gather
    """

    root: int
    shape: tuple[int, ...]
    scatters: bool = True
    gathers: bool = True

    def describe(self, name: str) -> str:
        return " = ".join([*["src"] * self.scatters, *["dst"] * self.gathers, str(self.root)])


FIRST = (Root(0, SHAPES[0], gathers=False), Root(0, SHAPES[0], scatters=False))


def cases(p: int) -> list[Root]:
    roots = sorted({0, p - 1, p // 2})
    return [Root(root, SHAPES[index % len(SHAPES)]) for index, root in enumerate(roots)]


class Problem(NamedTuple):
    chunks: Tensors  # the root scatters these
    xs: Tensors  # the root gathers these


class Given(NamedTuple):
    chunks: Tensors | None  # None on every rank except the root
    x: Tensor


def draw(case: Root, generator: torch.Generator, size: int) -> Problem:
    chunks, xs = ([checks.random_tensor(generator, *case.shape) for _ in range(size)] for _ in range(2))
    return Problem(chunks, xs)


def give(case: Root, problem: Problem, place: checks.Place) -> Given:
    return Given(problem.chunks if place.index == case.root else None, problem.xs[place.index])


def run(answers: tuple[Scatter, Gather], case: Root, given: Given, group: Any) -> checks.Observed:
    scatter, gather = answers
    chunks = None if given.chunks is None else [chunk.to(device()) for chunk in given.chunks]
    buffer = torch.full((2, *case.shape), 7.0, dtype=case.dtype, device=device())
    out = buffer[1]  # the check reads the buffer itself, to see whether this memory was filled
    x = given.x.to(device())
    before = checks.Snapshot(
        x=x, chunks=chunks, **{f"chunks[{index}]": chunk for index, chunk in enumerate(chunks or [])}
    )
    seen: checks.Observed = {}
    unnamed: list[str] = []
    if case.scatters:
        with record() as section, receives_from_any_rank("scatter", unnamed):
            returned = scatter(out, chunks, case.root)
        seen |= {"out": buffer[1], "returned": returned, "scatter traffic": checks.traffic(section)}
        is_out = not isinstance(returned, Tensor) or checks.same_memory(returned, out)
        seen[RETURNS_OUT] = checks.Claim("" if is_out else "it returns a different tensor with the same values")
    if case.gathers:
        with record() as section, receives_from_any_rank("gather", unnamed):
            gathered = gather(x, case.root)
        seen |= {"gathered": gathered, "gather traffic": checks.traffic(section)}
        shares = isinstance(gathered, list) and any(checks.same_memory(each, x) for each in gathered)
        seen[OWN_MEMORY] = checks.Claim("one of them does" if shares else "")
    text = f"{unnamed[0]} has {len(unnamed)} without" if unnamed else ""
    return seen | {NAMES_SENDER: checks.Claim(text), "inputs unchanged": before.changed()}


@contextmanager
def receives_from_any_rank(name: str, found: list[str]) -> Iterator[None]:
    """Context manager that appends `name` to `found` for every receive that doesn't name its sender."""
    original = ProcessGroup.recv_anysource

    def receive(*args: Any) -> Any:
        found.append(name)
        return original(*args)

    ProcessGroup.recv_anysource = receive  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        ProcessGroup.recv_anysource = original  # type: ignore[method-assign]


def expect(case: Root, problem: Problem, place: checks.Place) -> checks.Expected:
    chunks, rank, p = problem.chunks, place.index, place.size
    at_root, numel = rank == case.root, chunks[rank].numel()
    # the root's partners in the messages that this rank sends or receives
    partners = [other for other in range(p) if other != case.root] if at_root else [rank]
    right: checks.Observed = {}
    if case.scatters:
        right |= {
            "out": chunks[rank],
            "returned": chunks[rank],
            "scatter traffic": checks.Traffic(
                checks.Call("send" if at_root else "recv", numel, "float64", (case.root, other)) for other in partners
            ),
        }
    if case.gathers:
        right |= {
            "gathered": problem.xs if at_root else None,
            "gather traffic": checks.Traffic(
                checks.Call("recv" if at_root else "send", numel, "float64", (other, case.root)) for other in partners
            ),
        }
    mistakes = {
        _FIRST: chunks[0] if rank else chunks[0] + float("nan"),  # on rank 0, the first chunk is correct
        _NEXT: chunks[(rank + 1) % p],
        _BEFORE: chunks[rank - 1],
    }
    return checks.Expected(right, {"out": mistakes} if p > 1 else {})


@checks.exercise("1.1", "Scatter and gather from send and receive")
def scatter_and_gather(scatter: Scatter, gather: Gather) -> checks.Verdict:
    check = partial(
        checks.check_cases, "1.1", (scatter, gather), draw=draw, give=give, run=run, expect=expect,
        questions=_QUESTIONS, ask_instead=about_messages, without={checks.Twin.STRIDED},
    )  # fmt: skip
    for case in FIRST:  # in launches of their own, because a message that's never waited for can block what follows
        check([case], world_sizes=ORDER[:1])
    check(cases, world_sizes=ORDER)
    return checks.Verdict("Scatter and gather work with any root, and each of them needs only p - 1 messages.")


_QUESTIONS = (
    checks.Question(
        lambda d: NAMES_SENDER in d.names,
        "If you call `dist.recv` without a source, it takes whichever message arrives first, and the order of arrival "
        "can change from run to run. On GPUs, NCCL doesn't allow this kind of call. Which rank's data belongs in this "
        "tensor?",
    ),
    checks.Question(
        lambda d: "changed" in d.kinds(),
        "Scatter and gather should only copy data. Which line writes into a tensor that your caller still needs?",
    ),
    checks.Question(
        sent(*TORCHS_OWN),
        "You called one of torch's collectives. Build your function from `dist.send` and `dist.recv` instead. Which "
        "ranks have to send something, and which rank receives each message?",
    ),
    SILENT,
    checks.Question(
        lambda d: RETURNS_OUT in d.names and "out" not in d.names,
        "Your caller expects to get `out` back, but on the source rank, your function returns a tensor that shares no "
        "memory with `out`. Which tensor does your last line return on the source rank?",
    ),
    checks.Question(
        lambda d: OWN_MEMORY in d.names,
        "Rank dst put its own x into the list. If your caller overwrites x later, for example with the next batch, the "
        "gathered tensor changes as well. How do you put a copy of x into the list instead?",
    ),
    checks.Question(
        lambda d: "out" in d.names and "returned" not in d.names,
        "You return the right tensor, but you never fill `out`, the tensor that your caller passed in. An assignment "
        "such as `out = ...` just makes `out` a new name for a different tensor. What copies data into an existing "
        "tensor? Does the source rank also copy its own chunk into `out`?",
    ),
    checks.Question(
        lambda d: "returned" in d.names and "out" not in d.names,
        "The tensor `out` is filled correctly, but your function also has to return `out`. What does your function "
        "return on the source rank? What does your function return on the other ranks?",
    ),
    checks.Question(
        checks.kind_is("out", _FIRST, _NEXT, _BEFORE),
        "The chunks are right, but they went to the wrong ranks. Rank r should get `chunks[r]`, even if the source "
        "isn't rank 0. Which index do you use in each of your sends?",
    ),
    checks.Question(
        lambda d: "out" in d.names and len(d.ranks("out")) == 1 and d.p > 1,
        "Only one rank has the wrong values. Is that rank the source? Remember that the source has to copy its own "
        "chunk, because it doesn't send anything to itself.",
    ),
    checks.Question(
        checks.has_kind("gathered", "none"),
        "Rank dst returned None instead of a list. Does every path through your function end in a `return`? Does your "
        "code assume that dst is rank 0?",
    ),
    checks.Question(
        lambda d: "gathered" in d.names and any("expected None" in row.text for row in d if row.name == "gathered"),
        "Only rank dst should return a list. What should the other ranks return?",
    ),
    checks.Question(
        lambda d: any(
            "expected a list" in row.text and "got a list" not in row.text for row in d if row.name == "gathered"
        ),
        "The result should be a list of p tensors. What type of object does rank dst return instead?",
    ),
    checks.Question(
        lambda d: "gathered" in d.names,
        "The list should be in rank order, with rank dst's own tensor at index dst. Which rank's tensor is at each "
        "index of your list? If you built the list by repeating one tensor, all p entries are the same tensor.",
    ),
    checks.Question(
        lambda d: only_traffic(d) and "scatter traffic" in d.names,
        "Every rank has the correct chunk, but you sent more data than necessary. Each rank needs `chunks[rank]` and "
        "nothing else. How many messages does the source rank have to send, and how large is each message?",
    ),
    checks.Question(
        lambda d: only_traffic(d) and "gather traffic" in d.names,
        "Rank dst has the correct list, but you sent more data than necessary. Which ranks have to send a message? "
        "How many messages does each sender need?",
    ),
)
