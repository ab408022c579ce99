"""The check for exercise 9.1, in which each rank draws its own shard with the standard deviation of the full weight.

The right values are drawn from a generator with the rank's seed and multiplied by Xavier's standard deviation. The
current random state must not change, nothing may be sent, and no rank may create a tensor as large as the full weight.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tplab.course import checks
from tplab.runtime import record


class Shards(checks.Case):
    """A case in which a rank draws its shard of each weight, one after the other."""

    def describe(self, name: str) -> str:
        return ""


CASES = (Shards(), Shards(groups=checks.GROUPS))
WEIGHTS = {  # shape of the full weight [out, in], and the dimension that is sharded
    "weight cut by rows": ((48, 20), 0),
    "weight cut by columns": ((24, 64), 1),
}
BEFORE = 3  # number of values drawn first, so that the current state isn't the one right after seeding
ELSEWHERE = 10**7  # distance between the current state's seed and the shards' seed
AFTERWARDS = "numbers drawn afterwards"
SMALL = "nobody makes a tensor as large as the whole weight"

SHARD_STD = "what is drawn with the standard deviation of the shard's own shape"
SAME_SEED = "what is drawn from the same seed on every rank"
SAME_SEED_AND_STD = (
    "what is drawn from the same seed on every rank, with the standard deviation of the shard's own shape"
)
CURRENT = "what is drawn from torch's current state, which is the same on every rank"
CURRENT_AND_STD = f"{CURRENT}, with another std"
FROM_MASTER = "the shard of a master weight that was drawn whole"
FROM_OWN_MASTER = f"{FROM_MASTER} from a seed of this rank's own"
NO_STD = "what is drawn with standard deviation 1"
VARIANCE = "what is scaled by the variance, not by its square root"
FAN_IN = "what is scaled by sqrt(1 / in)"


class Largest(TorchDispatchMode):
    """Dispatch mode whose `numel` is the size of the largest tensor created so far, not counting tensors on "meta"."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [t.untyped_storage().nbytes() for t in tree_leaves(out) if isinstance(t, Tensor) and not t.is_meta]
        self.numel = max([self.numel, *(size // 4 for size in sizes)])
        return out


def draw(case: Shards, generator: torch.Generator, size: int) -> int:
    return int(torch.randint(10**6, (), generator=generator))


def run(draw_shard: Callable[..., Any], case: Shards, seed: int, group: Any) -> checks.Observed:
    torch.manual_seed(seed + ELSEWHERE)
    torch.rand(BEFORE)
    seen: checks.Observed = {}
    with record() as section, Largest() as largest:
        for number, (name, (shape, dim)) in enumerate(WEIGHTS.items()):
            given = list(shape)
            before = checks.Snapshot(shape=given)
            with checks.called_as(f"draw_shard({given}, {dim}, seed={seed + 100 * number}, group=group)"):
                out = draw_shard(given, dim, seed=seed + 100 * number, group=group)
            if before.changed():
                seen["inputs unchanged"] = before.changed()
            seen[name] = out.detach().clone() if isinstance(out, Tensor) else out
    seen[AFTERWARDS] = torch.rand(4)
    seen["traffic"] = checks.traffic(section)
    full = min(math.prod(shape) for shape, _ in WEIGHTS.values())
    too_large = dist.get_world_size(group) > 1 and largest.numel >= full
    seen[SMALL] = checks.Claim(f"one has room for {largest.numel} numbers" if too_large else "")
    return seen


def normal(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def expect(case: Shards, seed: int, place: checks.Place) -> checks.Expected:
    generator = torch.Generator().manual_seed(seed + ELSEWHERE)
    torch.rand(BEFORE, generator=generator)
    right: checks.Observed = {AFTERWARDS: torch.rand(4, generator=generator), "traffic": checks.Traffic()}
    mistakes: dict[str, dict[str, Tensor]] = {}
    generator = torch.Generator().manual_seed(seed + ELSEWHERE)
    torch.rand(BEFORE, generator=generator)
    for number, (name, (full, dim)) in enumerate(WEIGHTS.items()):
        shape = [size // place.size if d == dim else size for d, size in enumerate(full)]
        mine, same = (normal(shape, seed + 100 * number + offset) for offset in (place.index, 0))
        std, shard_std = math.sqrt(2 / sum(full)), math.sqrt(2 / sum(shape))
        current = torch.randn(shape, generator=generator)
        right[name] = mine * std
        made = {NO_STD: mine, VARIANCE: mine * std**2, FAN_IN: mine / math.sqrt(full[1])}
        if place.size > 1:
            made |= {SHARD_STD: mine * shard_std, SAME_SEED: same * std, SAME_SEED_AND_STD: same * shard_std}
            for label, offset in ((FROM_MASTER, 0), (FROM_OWN_MASTER, place.index)):
                made[label] = place.part(normal(full, seed + 100 * number + offset) * std, dim)
        mistakes[name] = made | {CURRENT: current * std, CURRENT_AND_STD: current * shard_std}
    return checks.Expected(right, mistakes)


@checks.exercise("9.1", "A shard drawn by its own rank")
def first_values(draw_shard: Callable[..., Any]) -> checks.Verdict:
    checks.check_cases(
        "9.1", draw_shard, CASES, draw=draw, run=run, expect=expect, questions=QUESTIONS, whose_group=WHOSE_GROUP,
        tol=1e-6,
        values_on_cpu=True,
    )  # fmt: skip
    return checks.Verdict("The right standard deviation, other numbers on every rank, and nothing else has moved.")


def in_any(*kinds: str) -> Callable[[checks.Differences], bool]:
    return lambda d: any(checks.has_kind(name, *kinds)(d) for name in WEIGHTS)


WHOSE_GROUP = "Which call for a rank or a size was not given `group`, and so counts all four ranks?"
QUESTIONS = (
    checks.Question(
        lambda d: bool(d.names) and d.names <= {"traffic"},
        "The numbers are right, but something was sent. What does a rank that draws for itself need from the others?",
    ),
    checks.Question(
        in_any("shape", "part", "whole", "transposed"),
        "A weight [out, in] that is cut along `dim` becomes shorter in that dimension alone. What shape is a shard?",
    ),
    checks.Question(
        in_any("other rank"),
        "A rank has the numbers of another rank. The rank's own generator has the seed `seed + rank`, with the rank "
        "counted within `group`.",
    ),
    checks.Question(
        in_any(CURRENT, CURRENT_AND_STD),
        "The numbers come from torch's current state, and that is the same on every rank: all shards are equal. "
        "From which generator does `normal_` draw, if nobody tells it? It takes `generator=`.",
    ),
    checks.Question(
        in_any(SAME_SEED, SAME_SEED_AND_STD),
        "All ranks draw the same numbers, so all shards of the weight are equal. What has to be in the seed?",
    ),
    checks.Question(
        in_any(SHARD_STD),
        "`xavier_normal_` looks at the tensor that it is handed. Of which shape is this rank's tensor, and from which "
        "shape must the standard deviation come?",
    ),
    checks.Question(
        in_any(FROM_MASTER, FROM_OWN_MASTER),
        "These numbers were drawn for the whole weight and then cut. This exercise is about the weight that is too "
        "large for that: which shape has the only tensor that a rank may make?",
    ),
    checks.Question(
        in_any(NO_STD, VARIANCE, FAN_IN),
        "The random numbers are the right ones, their scale is not. sqrt(2 / (in + out)): which of the two sizes, the "
        "2 or the root is missing?",
    ),
    checks.Question(
        lambda d: AFTERWARDS in d.names and not d.malformed,
        "What torch draws afterwards is no longer the same: your function has drawn from the current state, or seeded "
        "it anew. Replicated parameters that are drawn next would differ. Which generator belongs to you alone?",
    ),
    checks.Question(
        lambda d: SMALL in d.names and not d.malformed,
        "Somebody makes a tensor as large as the whole weight. Which shape do you hand to `torch.empty`?",
    ),
    checks.Question(
        in_any("value"),
        "These are other random numbers. Three things make them: the generator's seed, `seed + rank`; the "
        "distribution, normal with mean 0; the shape, which is drawn in one go. Which of them differs?",
    ),
)
