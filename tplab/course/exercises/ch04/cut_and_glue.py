"""The check for exercise 4.3, in which the learner splits a weight into shards and joins the shards again.

The check launches no ranks. It repeats each case with float32 tensors, with bfloat16 tensors, and with non-contiguous
tensors. These variants of a case are called twins.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tplab.course import checks
from tplab.tensor.sharding import shard

CUTS = (((16, 3), 0, 1), ((3, 16), 1, 1), ((24,), 0, 2), ((2, 24, 3), 1, 3), ((5, 24), -1, 2))  # sizes, dim, stride
OWN_MEMORY = "each shard has its own memory"
CONTIGUOUS = "one contiguous slice, which is correct only for stride 1"
EVERY_PTH = "every p-th entry"
GLUED_CONTIGUOUS = "the shards, simply concatenated"

CUT_QUESTIONS = (
    checks.Question(
        checks.changed,
        "The caller still needs the full tensor and the shards, so your functions must not change them. Which line "
        "modifies one of these inputs?",
    ),
    checks.Question(
        checks.has_kind("shard", CONTIGUOUS),
        "The tensor consists of several blocks, and a rank needs its slice of each block. For p = 2 and stride = "
        "2, write down the rows that rank 0 should get. Which rows does your code give to rank 0?",
    ),
    checks.Question(
        checks.has_kind("shard", EVERY_PTH),
        "A rank's slice of a block consists of n / (p·stride) contiguous rows. Which rows does your code take for p = "
        "2 and stride = 1?",
    ),
    checks.Question(
        checks.has_kind("shard", "other rank"),
        "The slices are correct, but at least one rank ended up with another rank's slices. Suppose you number all the "
        "slices in the order of the full tensor. How do you compute a slice's number from the number of its block and "
        "the rank?",
    ),
    checks.Question(
        checks.differs(OWN_MEMORY),
        "How many bytes of memory stay allocated for as long as your shard exists? A slice is a view of the full "
        "tensor, and along dimension 0, even `contiguous()` returns the view instead of making a copy. "
        "Which call always allocates new memory?",
    ),
    checks.Question(
        lambda d: (
            checks.has_kind("shard", "shape", "whole", "part", "transposed")(d)
            or checks.has_kind("unshard", "shape", "part", "transposed")(d)
        ),
        "Along which dimension does your code split or concatenate tensors? Into how many pieces does your code split "
        "that dimension, and how many of these pieces does each rank get? Keep in mind that `dim` may be 0, 1, or "
        "-1, and that the tensor may have more than two dimensions.",
    ),
    checks.Question(
        checks.has_kind("unshard", GLUED_CONTIGUOUS),
        "`unshard` has to undo `shard`, so the full tensor must start with all the rows of the first block. Which "
        "slice of each shard belongs to the first block?",
    ),
    checks.Question(
        lambda d: d.names == {"unshard"},
        "Your `shard` is correct. In `unshard`, start by splitting each shard into `stride` slices, one per block. "
        "In what order do the slices from all ranks appear in the full tensor?",
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
                call = f"shard(a tensor of shape {list(sizes)}, {options})"
                with checks.twins.calling(twin, call, CRASH) as watch:
                    shards.append(cut(full, dim, rank, p, stride=stride))
                elsewhere |= watch.claims({"shard": shards[-1]})
            with checks.twins.calling(
                twin, f"unshard({p} shards of shape {list(right[0].shape)}, dim={dim}, stride={stride})", CRASH
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
        "You can't split 8 rows into 3 blocks of 4 equal slices each. What would `chunk` do with these 8 rows? "
        "Raise a ValueError whose message includes the size.",
        says=(8,),
        what="8 rows, in 3 blocks, for 4 ranks",
    )
    checks.must_refuse(
        "4.3",
        lambda: cut(torch.zeros(12, 3), 0, 0, 4, stride=6),
        "Although 12 is divisible by both 4 and 6, you can't split 12 rows into 6 blocks of 4 equal slices each. "
        "By what number does the size have to be divisible? Raise a ValueError whose message includes the "
        "size.",
        says=(12,),
        what="12 rows, in 6 blocks, for 4 ranks",
    )
    checks.must_refuse(
        "4.3",
        lambda: cut(torch.zeros(6, 3), 0, 0, 4),
        "You can't split 6 rows into 4 equal slices. `chunk` silently returns three slices of 2 rows, so the last rank "
        "gets nothing. Raise a ValueError whose message includes the size.",
        says=(6,),
        what="6 rows for 4 ranks",
    )
    return checks.Verdict("For every dimension and every number of blocks, your `unshard` undoes your `shard`.")


CRASH = (
    "Which dimension does `dim` refer to in this call? Does every line of your code use the dimension `dim`? "
    "Remember that -1 means the last dimension, no matter how many dimensions the tensor has. Work through "
    "this call by hand. How many pieces do you get along dimension `dim`? How long is each piece?"
)


def memory(mine: Any, full: Tensor) -> checks.Claim:
    """Return the claim that a shard keeps only its own memory alive and shares no memory with the full tensor."""
    if not isinstance(mine, Tensor):
        return checks.Claim("there is no tensor")
    kept, needed = mine.untyped_storage().nbytes(), mine.numel() * mine.element_size()
    shares = "it is the full tensor itself" if checks.same_memory(mine, full) else ""
    return checks.Claim(f"it keeps {kept} bytes alive but needs only {needed}" if kept > needed else shares)
