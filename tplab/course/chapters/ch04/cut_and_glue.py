"""The check for exercise 4.3: split a weight into shards, and join the shards again. It runs in this process."""

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tplab.course import checks
from tplab.tensor.sharding import shard

CUTS = (((16, 3), 0, 1), ((3, 16), 1, 1), ((24,), 0, 2), ((2, 24, 3), 1, 3), ((5, 24), -1, 2))  # sizes, dim, stride
OWN_MEMORY = "each shard has memory of its own"
CONTIGUOUS = "one contiguous slice, which is right only for stride 1"
EVERY_PTH = "every p-th entry"
GLUED_CONTIGUOUS = "the shards, one after another"

CUT_QUESTIONS = (
    checks.Question(
        checks.changed,
        "The caller still needs the full tensor and the shards. Which line writes into one of them?",
    ),
    checks.Question(
        checks.has_kind("shard", CONTIGUOUS),
        "There are several blocks, and a rank needs its slice of each. Write down the rows for p = 2 and stride = 2. "
        "Which of them does rank 0 have now, and which should it have?",
    ),
    checks.Question(
        checks.has_kind("shard", EVERY_PTH),
        "A rank's slice of a block is n / (p·stride) neighboring entries. Which entries do you take for p = 2 and "
        "stride = 1?",
    ),
    checks.Question(
        checks.has_kind("shard", "other rank"),
        "The slices are right, but one rank has those of another. How does a slice's number depend on the rank, and "
        "how does it depend on the block?",
    ),
    checks.Question(
        checks.differs(OWN_MEMORY),
        "How many bytes does the shard keep alive? A slice is a view of the full tensor, and along dimension 0 even "
        "`contiguous()` returns that same view. Which call always makes new memory?",
    ),
    checks.Question(
        lambda d: (
            checks.has_kind("shard", "shape", "whole", "part", "transposed")(d)
            or checks.has_kind("unshard", "shape", "part", "transposed")(d)
        ),
        "Which dimension do you split, and by what do you divide its size? `dim` may be 0, 1 or -1, and the tensor "
        "may have more than two dimensions.",
    ),
    checks.Question(
        checks.has_kind("unshard", GLUED_CONTIGUOUS),
        "`unshard` has to undo `shard`, so the full tensor starts with all of block 0. Which slices of which shards "
        "make up block 0?",
    ),
    checks.Question(
        lambda d: d.names == {"unshard"},
        "`shard` is right. For `unshard`, split each shard into its `stride` slices first. In which order do all "
        "these slices follow each other in the full tensor?",
    ),
)


@checks.exercise("4.3", "Shard and unshard, with a stride")
def cut_and_glue(cut: Callable[..., Tensor], glue: Callable[..., Tensor]) -> checks.Verdict:
    for twin, p in product(checks.twins.ALONE, checks.WORLD_SIZES):
        for sizes, dim, stride in CUTS:
            full = checks.twins.given(twin, checks.random_tensor(checks.fresh_generator(), *sizes))
            right = [checks.twins.given(twin, shard(full, dim, rank, p, stride=stride)) for rank in range(p)]
            n = full.shape[dim]
            order = torch.arange(n).reshape(stride, p, -1).transpose(0, 1).reshape(p, -1)  # [rank, entries]
            assert all(torch.equal(full.index_select(dim, order[rank]), right[rank]) for rank in range(p))
            given = list(right)
            before = checks.Snapshot(
                **{"the full tensor": full, "the list of shards": given},
                **{f"the shard of rank {rank}": right[rank] for rank in range(p)},
            )
            shards = []
            elsewhere: checks.Observed = {}
            for rank in range(p):
                options = f"dim={dim}, rank={rank}, world_size={p}, stride={stride}"
                with checks.calling(f"shard(a tensor of shape {list(sizes)}, {options})", CRASH) as watch:
                    shards.append(cut(full, dim, rank, p, stride=stride))
                elsewhere |= watch.claims({"shard": shards[-1]})
            with checks.calling(
                f"unshard({p} shards of shape {list(right[0].shape)}, dim={dim}, stride={stride})", CRASH
            ) as watch:
                glued = glue(given, dim, stride=stride)
            elsewhere |= watch.claims({"unshard": glued})
            observed = [
                {
                    "shard": mine,
                    OWN_MEMORY: memory(mine, full),
                    "unshard": glued,
                    "inputs unchanged": before.changed(),
                    **elsewhere,
                }
                for mine in shards
            ]
            expected = [{"shard": mine, "unshard": full} for mine in right]
            alike: dict[str, dict[str, list[Tensor]]] = {"shard": {}, "unshard": {}}
            if p > 1:
                alike["shard"][EVERY_PTH] = [full.movedim(dim, 0)[rank::p].movedim(0, dim) for rank in range(p)]
            if p > 1 and stride > 1:
                alike["shard"][CONTIGUOUS] = list(full.chunk(p, dim))
                alike["unshard"][GLUED_CONTIGUOUS] = [torch.cat(right, dim)] * p
            note = f"a tensor {list(sizes)}, dim = {dim}, stride = {stride}" + (
                f", {checks.twins.note(twin)}" if twin else ""
            )
            asked = [*checks.twins.asked_first(twin), *CUT_QUESTIONS]
            checks.verify("4.3", p, observed, expected, questions=asked, lookalikes=alike, note=note)
    checks.must_refuse(
        "4.3",
        lambda: cut(torch.zeros(8, 3), 0, 0, 4, stride=3),
        "8 rows can't be split into 3 blocks of 4 equal slices. What does `chunk` do with them, and would anyone "
        "notice? Raise ValueError, and name the numbers.",
        says=(8,),
        what="8 rows, in 3 blocks, for 4 ranks",
    )
    checks.must_refuse(
        "4.3",
        lambda: cut(torch.zeros(12, 3), 0, 0, 4, stride=6),
        "12 can be divided by 4 and by 6, but 12 rows can't be 6 blocks of 4 equal slices. What does n have to be a "
        "multiple of? Raise ValueError, and name the numbers.",
        says=(12,),
        what="12 rows, in 6 blocks, for 4 ranks",
    )
    checks.must_refuse(
        "4.3",
        lambda: cut(torch.zeros(6, 3), 0, 0, 4),
        "6 rows can't be split into 4 equal slices. `chunk` returns three slices of 2 without a word, and the last "
        "rank gets nothing. Raise ValueError, and name the numbers.",
        says=(6,),
        what="6 rows for 4 ranks",
    )
    return checks.Verdict("`unshard` undoes `shard`, for every dimension and every number of blocks.")


CRASH = (
    "Which dimension does this `dim` stand for, and do all of your lines treat it that way? (-1 is the last one, "
    "however many there are.) Go through this call by hand. How many pieces do you get along this dimension, how "
    "long are they, and which of them belong to this rank?"
)


def memory(mine: Any, full: Tensor) -> checks.Claim:
    """Return the claim that a shard keeps no memory alive except its own, which isn't that of the full tensor."""
    if not isinstance(mine, Tensor):
        return checks.Claim("there is no tensor")
    kept, needed = mine.untyped_storage().nbytes(), mine.numel() * mine.element_size()
    shares = "it is the full tensor itself" if checks.same_memory(mine, full) else ""
    return checks.Claim(f"it keeps {kept} bytes alive and needs {needed}" if kept > needed else shares)
