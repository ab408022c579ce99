"""The check of exercise 9.1: a rank draws its own shard, with the standard deviation of the whole weight.

Right is what a generator with the rank's seed draws, times Xavier's standard deviation. The current random state has to
be as it was, nothing is sent, and nobody makes a tensor as large as the whole weight.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tplab.course.checks import (
    GROUPS,
    IN_GROUPS,
    WORLD_SIZES,
    Claim,
    Differences,
    Observed,
    Question,
    Traffic,
    Verdict,
    ask_about_group,
    by_name,
    called_as,
    exercise,
    fresh_generator,
    group_question,
    has_kind,
    make_group,
    member_of,
    run_ranks,
    traffic,
    verify,
)
from tplab.runtime import record

CASES = {  # the whole weight [out, in], and where it is cut
    "weight cut by rows": ((48, 20), 0),
    "weight cut by columns": ((24, 64), 1),
}
ELSEWHERE = 10**7  # from the seed of the shards to that of the current state
AFTERWARDS = "numbers drawn afterwards"
SMALL = "nobody makes a tensor as large as the whole weight"

SHARD_STD = "what is drawn with the standard deviation of the shard's own shape"
SAME_SEED = "what is drawn from the same seed on every rank"
SAME_SEED_AND_STD = (
    "what is drawn from the same seed on every rank, with the standard deviation of the shard's own shape"
)
CURRENT = "what is drawn from torch's current state, which is the same on every rank"
FROM_MASTER = "the shard of a master weight that was drawn whole"
NO_STD = "what is drawn with standard deviation 1"
VARIANCE = "what is scaled by the variance, not by its square root"
FAN_IN = "what is scaled by sqrt(1 / in)"


class Largest(TorchDispatchMode):
    """Within it, `numel` is the size of the largest tensor that was made, but for those without memory."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [t.untyped_storage().nbytes() for t in tree_leaves(out) if isinstance(t, Tensor) and not t.is_meta]
        self.numel = max([self.numel, *(size // 4 for size in sizes)])
        return out


def draw(draw_shard: Callable[..., Any], groups: Sequence[Sequence[int]] | None, seed: int) -> Observed:
    """On a rank: one shard after the other, then some numbers from the current state."""
    group = make_group(groups)
    torch.manual_seed(seed + ELSEWHERE)
    seen: Observed = {}
    with record() as section, Largest() as largest:
        for number, (name, (shape, dim)) in enumerate(CASES.items()):
            with called_as(f"draw_shard({shape}, {dim}, seed={seed + 100 * number}, group=group)"):
                out = draw_shard(shape, dim, seed=seed + 100 * number, group=group)
            seen[name] = out.detach().clone() if isinstance(out, Tensor) else out
    seen[AFTERWARDS] = torch.rand(4)
    seen["traffic"] = traffic(section)
    whole = min(math.prod(shape) for shape, _ in CASES.values())
    too_large = dist.get_world_size(group) > 1 and largest.numel >= whole
    seen[SMALL] = Claim(f"one has room for {largest.numel} numbers" if too_large else "")
    return seen


def normal(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def expect(seed: int, index: int, q: int) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """What is right on a rank of q, and what known mistakes give there."""
    generator = torch.Generator().manual_seed(seed + ELSEWHERE)
    right: dict[str, Any] = {AFTERWARDS: torch.rand(4, generator=generator), "traffic": Traffic()}
    alike: dict[str, dict[str, Tensor]] = {}
    generator = torch.Generator().manual_seed(seed + ELSEWHERE)
    for number, (name, (whole, dim)) in enumerate(CASES.items()):
        shape = [size // q if d == dim else size for d, size in enumerate(whole)]
        mine, same = (normal(shape, seed + 100 * number + offset) for offset in (index, 0))
        std, shard_std = math.sqrt(2 / sum(whole)), math.sqrt(2 / sum(shape))
        right[name] = mine * std
        alike[name] = {NO_STD: mine, VARIANCE: mine * std**2, FAN_IN: mine / math.sqrt(whole[1])}
        current = torch.randn(shape, generator=generator)
        if q > 1:
            masters = {FROM_MASTER: 0, f"{FROM_MASTER} from a seed of this rank's own": index}
            alike[name] |= {
                SHARD_STD: mine * shard_std,
                SAME_SEED: same * std,
                SAME_SEED_AND_STD: same * shard_std,
            }
            for label, offset in masters.items():
                master = normal(whole, seed + 100 * number + offset) * std
                alike[name][label] = master.chunk(q, dim)[index]
        alike[name] |= {CURRENT: current * std, f"{CURRENT}, with another std": current * shard_std}
    return right, alike


@exercise("9.1", "A shard drawn by its own rank")
def first_values(draw_shard: Callable[..., Any]) -> Verdict:
    for p in WORLD_SIZES:
        for groups in (None, GROUPS) if p == 4 else (None,):
            seed = int(torch.randint(10**6, (), generator=fresh_generator()))
            members = member_of(p, groups)
            table = [expect(seed, ranks.index(rank), len(ranks)) for rank, (_, ranks) in enumerate(members)]
            whose = ask_about_group(WHOSE_GROUP) if groups else None
            note = IN_GROUPS if groups else ""
            seen = run_ranks(draw, p, draw_shard, groups, seed, question=whose, stuck=whose, note=note)
            verify(
                "9.1",
                p,
                seen,
                [right for right, _ in table],
                questions=[group_question(WHOSE_GROUP), *QUESTIONS] if groups else QUESTIONS,
                lookalikes=by_name([alike for _, alike in table]),
                tol=1e-6,
                note=note,
            )
    return Verdict("The right standard deviation, other numbers on every rank, and nothing else has moved.")


def in_any(*kinds: str) -> Callable[[Differences], bool]:
    return lambda d: any(has_kind(name, *kinds)(d) for name in CASES)


WHOSE_GROUP = "Which call for a rank or a size was not given `group`, and so counts all four ranks?"
QUESTIONS = (
    Question(
        lambda d: bool(d.names) and d.names <= {"traffic"},
        "The numbers are right, but something was sent. What does a rank that draws for itself need from the others?",
    ),
    Question(
        in_any("shape", "part", "whole", "transposed"),
        "A weight [out, in] that is cut along `dim` becomes shorter in that dimension alone. What shape is a shard?",
    ),
    Question(
        in_any("other rank"),
        "A rank has the numbers of another rank. The rank's own generator has the seed `seed + rank`, with the rank "
        "counted within `group`.",
    ),
    Question(
        in_any(CURRENT, f"{CURRENT}, with another std"),
        "The numbers come from torch's current state, and that is the same on every rank: all shards are equal. "
        "From which generator does `normal_` draw, if nobody tells it? It takes `generator=`.",
    ),
    Question(
        in_any(SAME_SEED, SAME_SEED_AND_STD),
        "All ranks draw the same numbers, so all shards of the weight are equal. What has to be in the seed?",
    ),
    Question(
        in_any(SHARD_STD),
        "`xavier_normal_` looks at the tensor that it is handed. Of which shape is this rank's tensor, and from which "
        "shape must the standard deviation come?",
    ),
    Question(
        in_any(FROM_MASTER, f"{FROM_MASTER} from a seed of this rank's own"),
        "These numbers were drawn for the whole weight and then cut. This exercise is about the weight that is too "
        "large for that: which shape has the only tensor that a rank may make?",
    ),
    Question(
        in_any(NO_STD, VARIANCE, FAN_IN),
        "The random numbers are the right ones, their scale is not. sqrt(2 / (in + out)): which of the two sizes, the "
        "2 or the root is missing?",
    ),
    Question(
        lambda d: AFTERWARDS in d.names and not d.malformed,
        "What torch draws afterwards is no longer the same: your function has drawn from the current state, or seeded "
        "it anew. Replicated parameters that are drawn next would differ. Which generator belongs to you alone?",
    ),
    Question(
        lambda d: SMALL in d.names and not d.malformed,
        "Somebody makes a tensor as large as the whole weight. Which shape do you hand to `torch.empty`?",
    ),
    Question(
        in_any("value"),
        "These are other random numbers. Three things make them: the generator's seed, `seed + rank`; the "
        "distribution, normal with mean 0; the shape, which is drawn in one go. Which of them differs?",
    ),
)
