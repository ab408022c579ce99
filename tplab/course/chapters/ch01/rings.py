"""Run the checks of exercises 1.2 to 1.4, the rings: on 2, 3, 4 and 1 ranks, against plain sums, message by message.

Three ranks are the smallest ring with a direction. A ring that runs to the left is as good as one to the right.

A message that is never waited for can block whatever comes after it, even in the next case. The first case exposes such
a message, because it has its own launch.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tplab.course import checks
from tplab.runtime import Deadlock, device, record

ORDER = (2, 3, 4, 1)  # two ranks reveal the most about a mistake; three are the first with a left and a right
Ring = Callable[[Tensor], Tensor]
Tensors = list[Tensor]
OWN_MEMORY = "the result has memory of its own"
TORCHS_OWN = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "gather", "scatter", "reduce")


@dataclass(frozen=True)
class Input(checks.Case):
    shape: tuple[int, ...]  # shape of x

    def describe(self, name: str) -> str:
        return f"x of shape {list(self.shape)}"


def draw(case: Input, generator: torch.Generator, size: int) -> Tensors:
    return [checks.random_tensor(generator, *case.shape) for _ in range(size)]


def give(case: Input, xs: Tensors, place: checks.Place) -> Tensor:
    return xs[place.index]


def run(ring: Ring, case: Input, given: Tensor, group: Any) -> checks.Observed:
    x = given.to(device())
    before = checks.Snapshot(x=x)
    with record() as section:
        out = ring(x)
    shares = "writing into it would change the caller's tensor" if checks.same_memory(out, x) else ""
    seen = {"out": out, "traffic": checks.traffic(section), "inputs unchanged": before.changed()}
    return seen | {OWN_MEMORY: checks.Claim(shares)}


def check_ring(
    number: str,
    ring: Ring,
    shapes: Callable[[int], Sequence[tuple[int, ...]]],
    expect: Callable[[Input, Tensors, checks.Place], checks.Expected],
    questions: Sequence[checks.Question],
    without: Collection[checks.Twin] = (checks.Twin.STRIDED,),
) -> None:
    """Check a ring with inputs of each shape in shapes(p). Every rank has a different x.

    without: twins to leave out. A message has to be contiguous, so x may have gaps only where the answer copies it
    """
    checks.check_cases(
        number, ring, lambda p: [Input(shape) for shape in shapes(p)], draw=draw, give=give, run=run, expect=expect,
        questions=questions, ask_instead=about_messages, world_sizes=ORDER, without=without,
    )  # fmt: skip


def ring_traffic(place: checks.Place, count: int, numel: int) -> checks.Traffic:
    """Return the traffic of `count` messages of `numel` elements to the next rank, and from the previous rank."""
    if place.size == 1:
        return checks.Traffic()
    rank, p, step = place.index, place.size, direction(place.observed)
    return checks.Traffic(
        [checks.Call("send", numel, "float64", (rank, (rank + step) % p))] * count
        + [checks.Call("recv", numel, "float64", ((rank - step) % p, rank))] * count
    )


def direction(observed: Sequence[checks.Observed]) -> int:
    """Return the direction of the ring: -1 if rank 0 sends to its left neighbor, else 1."""
    sends = [call for call in observed[0]["traffic"] if call.kind == "send"]
    p = len(observed)
    return -1 if p > 2 and sends and sends[0].group == (0, p - 1) else 1


# Questions for a run that doesn't end


STUCK = (
    "What does each rank wait for in the line that the report names, and which call of its neighbour would let it go "
    "on? Can the neighbour come to that call? (A send may wait for its receiver: start both with "
    "dist.batch_isend_irecv, then wait for both.)"
)
LOST = (
    "Both halves of a message were started, and yet it does not arrive. Does every isend "
    "and irecv have its wait()? A request that is thrown away may take its message with it."
)
TO_ITSELF = (
    "With whom does this rank exchange a message in that line: with itself? What a rank has for itself, it "
    "only copies. Which ranks must not come to that line?"
)
_SELF_SAID = ("destination rank should not be the same", "Pair is not connected")  # by torch on send, gloo on recv


def about_messages(failure: checks.CheckFailed) -> str | None:
    """Return a question about sends and receives if ranks wait for each other or a rank waits for itself."""
    if isinstance(failure.__cause__, Deadlock):
        return LOST if failure.report.startswith(("not finished", "a message was lost")) else STUCK
    return TO_ITSELF if any(words in failure.report for words in _SELF_SAID) else None


# Conditions for questions


def sent(*words: str) -> Callable[[checks.Differences], bool]:
    """Return a predicate that tests whether the traffic on some rank is wrong and contains one of these words."""
    return lambda d: any(
        row.name.endswith("traffic") and f" {word}" in row.text.partition("saw")[2] for row in d for word in words
    )


def only_traffic(differences: checks.Differences) -> bool:
    """Return whether the values are right and only the traffic differs."""
    return all(name.endswith("traffic") for name in differences.names)


NOT_WAITED = checks.Question(
    lambda d: "never waited" in d.kinds(),
    "isend and irecv only start a message. From when on does the received tensor hold the numbers, and the sent one "
    "may be changed? What do they return, and what do you do with it?",
)

CHANGED = checks.Question(
    lambda d: "changed" in d.kinds(),
    "x belongs to the caller, who still needs it. Which line adds or receives into x, or into a view of it such as "
    "x[i], instead of into a tensor of your own?",
)

SHARES = checks.Question(
    OWN_MEMORY,
    "The numbers are right, and they are in the caller's own tensor: the result is that tensor or a view of it. What "
    "happens to the caller's numbers when somebody adds to the result? Which call always makes new memory?",
)

TORCH_DID_IT = checks.Question(
    sent(*TORCHS_OWN),
    "torch has a collective that does this, and you called one. The exercise is to build it: which messages to the "
    "right neighbour, in which order, give the same?",
)

SILENT = checks.Question(
    lambda d: any(row.name.endswith("traffic") and row.kind == "no traffic" for row in d),
    "Nothing was sent. The other ranks' numbers are in the memory of other processes: what brings them here? If your "
    "loop does: how often does it run for this p?",
)

FAR = checks.Question(
    lambda d: only_traffic(d) and d.p > 2,
    "The numbers are right, but not by the messages of a ring. Compare what was expected with what was seen: to whom "
    "does each rank send, how often, and how much? On a ring everybody sends to one neighbour only, so each wire "
    "carries one part at a time.",
)

ZEROS = checks.Question(
    lambda d: "zeros" in d.kinds() and not d.malformed,
    "The shape is right, and it is all zeros. Which line puts the numbers in, and is it reached?",
)

ROUNDED = checks.Question(
    lambda d: bool({"rounded", "dtype"} & d.kinds()),
    "Which step leaves the dtype of x? torch.empty and torch.zeros give float32 unless they are told otherwise.",
)

COMMON = (NOT_WAITED, TORCH_DID_IT, CHANGED, SHARES, ROUNDED, SILENT, ZEROS)  # tried first for every ring
