"""Helpers for the checks of the ring exercises, 1.2 and 1.3.

The checks run a ring on 2, 3, 4 and 1 ranks and compare its results with those of plain PyTorch, and its messages with
those of a correct ring. A ring needs at least three ranks to have a direction. It may send to the left or to the right.

A message that is never waited for can block whatever comes after it, even in the next case. The first case exposes such
a message, because it has its own launch. On two ranks, the checks also run each case's twins, which repeat the case
with a single change, such as a different dtype or memory layout.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tplab.course import checks
from tplab.runtime import Deadlock, device, record

ORDER = (2, 3, 4, 1)  # two ranks reveal the most about a mistake, and three are the fewest with two different neighbors
Ring = Callable[[Tensor], Tensor]
Tensors = list[Tensor]
OWN_MEMORY = "the result has its own memory"
TORCHS_OWN = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "gather", "scatter", "reduce")


@dataclass(frozen=True)
class Input(checks.Case):
    shape: tuple[int, ...]  # the shape of x
    name: str = ""  # the function's name, if the exercise has several functions

    def describe(self, name: str) -> str:
        return f"{self.name} of a tensor of shape {list(self.shape)}" if self.name else f"x of shape {list(self.shape)}"


def draw(case: Input, generator: torch.Generator, size: int) -> Tensors:
    return [checks.random_tensor(generator, *case.shape) for _ in range(size)]


def give(case: Input, xs: Tensors, place: checks.Place) -> Tensor:
    return xs[place.index]


def run(ring: Ring, case: Input, given: Tensor, group: Any) -> checks.Observed:
    x = given.to(device())
    before = checks.Snapshot(x=x)
    with record() as section:
        out = ring(x)
    shares = "writing into the result would change the caller's tensor" if checks.same_memory(out, x) else ""
    seen = {"out": out, "traffic": checks.traffic(section), "inputs unchanged": before.changed()}
    return seen | {OWN_MEMORY: checks.Claim(shares)}


def check_ring(
    number: str,
    ring: Ring,
    shapes: Callable[[int], Sequence[tuple[int, ...]]],
    expect: Callable[[Input, Tensors, checks.Place], checks.Expected],
    questions: Sequence[checks.Question],
    without: Collection[checks.Twin] = (checks.Twin.STRIDED,),
    name: str = "",
) -> None:
    """Check a ring with inputs of each shape in shapes(p). Every rank has a different x.

    without: the twins to leave out. Messages have to be contiguous, so x may be non-contiguous only if the answer has
             to copy x anyway
    """
    checks.check_cases(
        number, ring, lambda p: [Input(shape, name) for shape in shapes(p)], draw=draw, give=give, run=run,
        expect=expect, questions=questions, ask_instead=about_messages, world_sizes=ORDER, without=without,
    )  # fmt: skip


def ring_traffic(place: checks.Place, count: int, numel: int) -> checks.Traffic:
    """Return the traffic of a rank that sends `count` messages of `numel` elements and receives just as many.

    The rank sends them to the next rank in the ring's direction, and receives them from the previous rank.
    """
    if place.size == 1:
        return checks.Traffic()
    rank, p, step = place.index, place.size, direction(place.observed)
    return checks.Traffic(
        [checks.Call("send", numel, "float64", (rank, (rank + step) % p))] * count
        + [checks.Call("recv", numel, "float64", ((rank - step) % p, rank))] * count
    )


def direction(observed: Sequence[checks.Observed]) -> int:
    """Return the direction of the ring, which is -1 if rank 0 sends to its left neighbor first, and 1 otherwise."""
    sends = [call for call in observed[0]["traffic"] if call.kind == "send"]
    p = len(observed)
    return -1 if p > 2 and sends and sends[0].group == (0, p - 1) else 1


# Questions about runs that don't end or that fail


STUCK = (
    "For each rank, the report names the line on which the rank is stuck. Which call of its neighbor is the rank "
    "waiting for, and can the neighbor get to that call? A send may have to wait for its receiver, so start both "
    "messages with `dist.batch_isend_irecv`, and then wait for both messages."
)
LOST = (
    "The send and the receive were both started, but the message never arrived. Do you call `wait()` on every "
    "request returned by `isend` and `irecv`? If you discard a request without waiting, its message may be lost."
)
TO_ITSELF = (
    "In your code, a rank tries to send to or receive from itself. A rank never needs a message for data that it "
    "already has, because it can just copy the data. Which ranks shouldn't make the call that failed?"
)
# torch's error message for a send and gloo's error message for a receive contain these words
_SELF_SAID = ("destination rank should not be the same", "Pair is not connected")


def about_messages(failure: checks.CheckFailed) -> str | None:
    """Return a question if the ranks wait for each other or if a rank exchanges messages with itself, or else None."""
    if isinstance(failure.__cause__, Deadlock):
        return LOST if failure.report.startswith(("not finished", "a message was lost")) else STUCK
    return TO_ITSELF if any(words in failure.report for words in _SELF_SAID) else None


# Conditions for questions


def sent(*words: str) -> Callable[[checks.Differences], bool]:
    """Return a predicate that tests whether some rank's traffic is wrong and its calls contain one of these words."""
    return lambda d: any(
        row.name.endswith("traffic") and f" {word}" in row.text.partition("saw")[2] for row in d for word in words
    )


def only_traffic(differences: checks.Differences) -> bool:
    """Return whether the values are right and only the traffic differs."""
    return all(name.endswith("traffic") for name in differences.names)


CHANGED = checks.Question(
    lambda d: "changed" in d.kinds(),
    "Your caller still needs `x`, but your code changed it. Which line writes into `x`, or into a view of `x` such "
    "as `x[i]`? Use a new tensor in that line instead.",
)

SHARES = checks.Question(
    OWN_MEMORY,
    "The values are right, but your result shares memory with the caller's tensor. What happens to the caller's data "
    "when someone modifies the result? Which call always allocates new memory?",
)

TORCH_DID_IT = checks.Question(
    sent(*TORCHS_OWN),
    "You called one of torch's collectives, but the exercise is to build it yourself. Which messages between "
    "neighbors would have the same effect as that collective?",
)

SILENT = checks.Question(
    lambda d: any(row.name.endswith("traffic") and row.kind == "no traffic" for row in d),
    "Nothing was sent, so this rank can't have the other ranks' data, which is in other processes. Which line "
    "receives that data? If the line is in a loop, how many times does the loop run for this p?",
)

FAR = checks.Question(
    lambda d: only_traffic(d) and d.p > 2,
    "The result is right, but these aren't the messages of a ring. In a ring, each rank sends messages to only one "
    "neighbor, and each message contains one chunk. In your code, which ranks does each rank send to? How many "
    "messages does each rank send? How large are these messages?",
)

ZEROS = checks.Question(
    lambda d: "zeros" in d.kinds() and not d.malformed,
    "The shape is right, but all the values are zero. Which line is supposed to fill in the values, and does your "
    "code ever reach that line?",
)

ROUNDED = checks.Question(
    lambda d: bool({"rounded", "dtype"} & d.kinds()),
    "One of the tensors in your code doesn't have the same dtype as `x`. Unless you pass a dtype, `torch.empty` and "
    "`torch.zeros` create float32 tensors. Which step changes the dtype?",
)

COMMON = (TORCH_DID_IT, CHANGED, SHARES, ROUNDED, SILENT, ZEROS)  # the check of any ring tries these first
