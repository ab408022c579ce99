"""Run a ring of exercises 1.2 to 1.4 on 2, 3, 4 and 1 ranks, against plain sums, with every message counted.

Three ranks are the smallest ring with a direction. A ring to the left is as good as one to the right.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tplab.course.checks import (
    Call,
    CheckFailed,
    Differences,
    Lookalikes,
    Observed,
    Question,
    Snapshot,
    Traffic,
    fresh_generator,
    random_tensor,
    run_ranks,
    traffic,
    verify,
)
from tplab.runtime import Deadlock, Results, device, record

ORDER = (2, 3, 4, 1)  # two ranks tell most about a mistake, three are the first to have a left and a right
Ring = Callable[[Tensor], Tensor]
TORCHS_OWN = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "gather", "scatter", "reduce")

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
_SELF_SAID = ("destination rank should not be the same", "Pair is not connected")  # torch of a send, gloo of a recv


def check_ring(
    number: str,
    function: Ring,
    shapes: Callable[[int], Sequence[tuple[int, ...]]],
    expected: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    messages: Callable[[Tensor, int], tuple[int, int]],
    lookalikes: Callable[[Sequence[Tensor]], Lookalikes],
    questions: Sequence[Question],
) -> None:
    """Random inputs of shapes(p), another on each rank; expected(xs) is what the ranks should return.

    messages(x, p): how many messages each rank sends, and of how many elements
    """
    for p in ORDER:
        generator = fresh_generator()
        cases = [[random_tensor(generator, *shape) for _ in range(p)] for shape in shapes(p)]
        seen = run_on_ranks(run_cases, p, function, cases)
        for index, xs in enumerate(cases):
            observed = [noted[index] for noted in seen]
            moved = ring_traffic(p, *messages(xs[0], p), direction(observed))
            verify(
                number,
                p,
                observed,
                [{"out": out, "traffic": moved[rank]} for rank, out in enumerate(expected(xs))],
                questions=questions,
                lookalikes=lookalikes(xs) if p > 1 else {},
                note=f"x of shape {list(xs[0].shape)}",
            )


def run_cases(function: Ring, cases: Sequence[Sequence[Tensor]]) -> list[Observed]:
    """On a rank: function(x) for every case; cases[i][rank] is what this rank is given."""
    noted = []
    for case in cases:
        x = case[dist.get_rank()].to(device())
        before = Snapshot(x=x)
        with record() as section:
            out = function(x)
        noted.append({"out": out, "traffic": traffic(section), "inputs unchanged": before.changed()})
        if unwaited(noted[-1]):
            break  # what comes next might wait for it for ever
    return noted


def unwaited(noted: Observed) -> bool:
    """Whether a message was started that nobody waited for."""
    return any(not call.waited for value in noted.values() if isinstance(value, Traffic) for call in value)


def run_on_ranks(program: Callable[..., Any], p: int, *args: Any) -> Results:
    """`run_ranks`, with a question about sends and receives where ranks wait for each other, or one for itself."""
    try:
        return run_ranks(program, p, *args)
    except CheckFailed as failure:
        if isinstance(failure.__cause__, Deadlock):
            failure.question = LOST if failure.report.startswith(("not finished", "a message was lost")) else STUCK
        elif any(words in failure.report for words in _SELF_SAID):
            failure.question = TO_ITSELF
        raise


def direction(observed: Sequence[Observed]) -> int:
    """-1 where rank 0 sends to its left neighbour, else 1."""
    sends = [call for call in observed[0]["traffic"] if call.kind == "send"]
    p = len(observed)
    return -1 if p > 2 and sends and sends[0].group == (0, p - 1) else 1


def ring_traffic(p: int, count: int, numel: int, step: int) -> list[Traffic]:
    """For each rank: `count` messages of `numel` elements to the next rank of the ring, as many from the one before."""
    if p == 1:
        return [Traffic()]
    return [
        Traffic(
            [Call("send", numel, "float64", (rank, (rank + step) % p))] * count
            + [Call("recv", numel, "float64", ((rank - step) % p, rank))] * count
        )
        for rank in range(p)
    ]


# When to ask


def sent(*words: str) -> Callable[[Differences], bool]:
    """The recorded traffic differs on some rank, and has one of these words in it."""
    return lambda d: any(
        row.name.endswith("traffic") and f" {word}" in row.text.partition("saw")[2] for row in d for word in words
    )


def only_traffic(differences: Differences) -> bool:
    """The right numbers came by another way."""
    return all(name.endswith("traffic") for name in differences.names)


NOT_WAITED = Question(
    lambda d: "never waited" in d.kinds(),
    "isend and irecv only start a message. From when on does the received tensor hold the numbers, and the sent one "
    "may be changed? What do they return, and what do you do with it?",
)

CHANGED = Question(
    lambda d: "changed" in d.kinds(),
    "x belongs to the caller, who still needs it. Which line adds or receives into x, or into a view of it such as "
    "x[i], instead of into a tensor of your own?",
)

TORCH_DID_IT = Question(
    sent(*TORCHS_OWN),
    "torch has a collective that does this, and you called one. The exercise is to build it: which messages to the "
    "right neighbour, in which order, give the same?",
)

SILENT = Question(
    lambda d: any(row.name.endswith("traffic") and row.kind == "no traffic" for row in d),
    "Nothing was sent. The other ranks' numbers are in the memory of other processes: what brings them here? If your "
    "loop does: how often does it run for this p?",
)

FAR = Question(
    lambda d: only_traffic(d) and d.p > 2,
    "The numbers are right, but not by the messages of a ring. Compare what was expected with what was seen: to whom "
    "does each rank send, how often, and how much? On a ring everybody sends to one neighbour only, so each wire "
    "carries one part at a time.",
)

ZEROS = Question(
    lambda d: "zeros" in d.kinds() and not d.malformed,
    "The shape is right, and it is all zeros. Which line puts the numbers in, and is it reached?",
)

ROUNDED = Question(
    lambda d: bool({"rounded", "dtype"} & d.kinds()),
    "Which step leaves the dtype of x? torch.empty and torch.zeros give float32 unless they are told otherwise.",
)
