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
CONTIGUOUS = "the contiguous cut, which is right only for stride 1"
EVERY_PTH = "every p-th entry, taken one by one"
GLUED_CONTIGUOUS = "the shards simply put one after another"

CUT_QUESTIONS = (
    checks.Question(
        checks.changed,
        "The caller still needs the full tensor and the shards. Which line writes into one of them?",
    ),
    checks.Question(
        checks.has_kind("shard", CONTIGUOUS),
        "With `stride` blocks side by side a rank needs its piece of every block. Write the row numbers down "
        "for p = 2, stride = 2: which rows does rank 0 have now, and which should it have?",
    ),
    checks.Question(
        checks.has_kind("shard", EVERY_PTH),
        "A rank takes whole pieces: n / (p·stride) neighbouring entries of each block. Which entries did you "
        "take for p = 2, stride = 1?",
    ),
    checks.Question(
        checks.has_kind("shard", "other rank"),
        "The pieces are right, but a rank has the pieces of another. How does the number of a piece depend on "
        "the rank, and how on the block?",
    ),
    checks.Question(
        checks.differs(OWN_MEMORY),
        "How many bytes does the shard keep alive? A slice is a view of the full tensor, and `contiguous()` "
        "of a slice along dimension 0 is still that view. Which call always makes new memory?",
    ),
    checks.Question(
        lambda d: (
            checks.has_kind("shard", "shape", "whole", "part", "transposed")(d)
            or checks.has_kind("unshard", "shape", "part", "transposed")(d)
        ),
        "Which dimension is cut, and by what is it divided? `dim` may be 0, 1 or -1, and the tensor may have "
        "more than two dimensions.",
    ),
    checks.Question(
        checks.has_kind("unshard", GLUED_CONTIGUOUS),
        "Glueing undoes cutting: the full tensor starts with all of block 0. Which pieces of which ranks make "
        "up block 0?",
    ),
    checks.Question(
        lambda d: d.names == {"unshard"},
        "Cutting is right. To glue, cut each shard into its `stride` pieces first: in which order do the "
        "pieces of all ranks follow each other in the full tensor?",
    ),
)


@checks.exercise("4.3", "Cut and glue")
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
        "8 rows can't be 3 blocks of 4 equal pieces each. What does `chunk` do with them, and who would notice? "
        "Raise ValueError and name the numbers.",
        says=(8,),
        what="8 rows cut into 3 blocks for 4 ranks",
    )
    checks.must_refuse(
        "4.3",
        lambda: cut(torch.zeros(12, 3), 0, 0, 4, stride=6),
        "12 can be divided by 4 and by 6, but 12 rows aren't 6 blocks of 4 equal pieces each. What does n have to be a "
        "multiple of? Raise ValueError and name the numbers.",
        says=(12,),
        what="12 rows cut into 6 blocks for 4 ranks",
    )
    checks.must_refuse(
        "4.3",
        lambda: cut(torch.zeros(6, 3), 0, 0, 4),
        "6 rows can't be cut into 4 equal pieces: `chunk` gives three pieces of 2 without a word, and the "
        "last rank gets none. Raise ValueError and name the numbers.",
        says=(6,),
        what="6 rows cut for 4 ranks",
    )
    return checks.Verdict("unshard undoes shard, for every dimension and every number of fused blocks.")


CRASH = (
    "Which dimension does this `dim` name, and does every line of yours take it so? -1 is the last one, however many "
    "there are. By hand for this call: how many pieces are cut along it, how long is each, and which belong to this "
    "rank?"
)


def memory(mine: Any, full: Tensor) -> checks.Claim:
    """Return the claim that a shard keeps no memory alive except its own, which isn't that of the full tensor."""
    if not isinstance(mine, Tensor):
        return checks.Claim("there is no tensor")
    kept, needed = mine.untyped_storage().nbytes(), mine.numel() * mine.element_size()
    shares = "it is the full tensor itself" if checks.same_memory(mine, full) else ""
    return checks.Claim(f"it keeps {kept} bytes alive and needs {needed}" if kept > needed else shares)
