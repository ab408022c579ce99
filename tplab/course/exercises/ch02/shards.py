"""The check for exercise 2.1 (`shard` and `unshard`). Neither function communicates, so the check launches no ranks."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from tplab.course import checks

# Some shapes have another dimension that isn't divisible by p. Other shapes have a dimension whose size is at most p
CUTS = [((8,), 0), ((8, 12), 0), ((8, 12), 1), ((3, 8), 1), ((8, 5), 0), ((3, 4, 5), 1), ((2, 3, 8), -1), ((8, 3), -2)]
REFUSED = [((8, 10), 1, 4), ((10, 8), 0, 4), ((4, 6, 8), -2, 4), ((2,), 0, 4), ((5,), 0, 2)]

OWN_MEMORY = "the shard has its own memory"
CONTIGUOUS = "the shard is contiguous"

_EVEN = (
    "What does your code do when `size % world_size` isn't 0? Does `shard` raise a ValueError on every rank, and does "
    "the message mention both the size and the number of ranks?"
)

_DIVIDES = (
    "In this call, the size along `dim` is divisible by the number of ranks, so `shard` should return a shard. "
    "Does the line of code in the report use the size of the correct dimension?"
)

_SHARD_QUESTIONS = (
    checks.Question(
        checks.changed,
        "Neither `shard` nor `unshard` should modify its inputs. Which line of your code writes into an input tensor?",
    ),
    checks.Question(
        lambda d: "dtype" in d.kinds(),
        "A shard should have the same dtype as the full tensor. Which line of your code changes the dtype?",
    ),
    checks.Question(
        lambda d: d.names == {CONTIGUOUS},
        "Collectives need contiguous tensors, but this shard isn't contiguous. How do you make a contiguous copy? "
        "Note that `clone()` by itself preserves the memory layout of the tensor it copies.",
    ),
    checks.Question(
        lambda d: d.names <= {OWN_MEMORY, CONTIGUOUS} and OWN_MEMORY in d.names,
        "Is your shard a copy, or is it a view of the full tensor? As long as a view exists, the full tensor stays in "
        "memory. Note that `.contiguous()` doesn't copy a tensor that's already contiguous.",
    ),
    checks.Question(
        lambda d: d.kind("shard") == "zeros",
        "The shard has the right shape, but all of its elements are zero. Which line should fill in the values?",
    ),
    checks.Question(
        lambda d: "shard" in d.names and not d.malformed,
        "Along dimension `dim`, rank r should hold the r-th of p equal, contiguous blocks. Where does your block for "
        "rank r start, and where does it end? Do all the other dimensions keep their full size?",
    ),
    checks.Question(
        "unshard",
        "The full tensor was split along `dim`, and `unshard` receives the shards in rank order. Does your code "
        "concatenate the shards along `dim` and in rank order?",
    ),
)


@checks.exercise("2.1", "Split a tensor into shards, and put it back together")
def shard_and_unshard(shard: Callable[..., Tensor], unshard: Callable[..., Tensor]) -> checks.Verdict:
    for layout, dtype in (
        ("", torch.float64),
        (", transposed in memory", torch.float64),
        (", in float32", torch.float32),
        (", in bfloat16", torch.bfloat16),
    ):
        for p in checks.WORLD_SIZES:
            for whole, parts, dim in _even_cuts(p, dtype, transposed="transposed" in layout):
                seen = [_cut_and_paste(shard, unshard, whole, parts, dim, rank, p) for rank in range(p)]
                expected = [{"shard": part, "unshard": whole} for part in parts]
                note = f"shape {list(whole.shape)}, dim={dim}{layout}"
                checks.verify("2.1", p, seen, expected, questions=_SHARD_QUESTIONS, tol=0, note=note)
    for shape, dim, p in REFUSED:
        for rank in range(p):
            checks.must_refuse(
                "2.1",
                lambda: shard(torch.zeros(shape), dim, rank, p),  # noqa: B023 (called immediately)
                _EVEN,
                says=(shape[dim], p),
                what=f"shard(a tensor of shape {list(shape)}, dim={dim}, rank={rank}, world_size={p})",
            )
    return checks.Verdict(
        "Your functions work along any dimension, and every rank rejects a size that isn't divisible by the number "
        "of ranks."
    )


def _even_cuts(p: int, dtype: torch.dtype, transposed: bool) -> Iterator[tuple[Tensor, list[Tensor], int]]:
    """For each entry in CUTS that can be split into p equal shards, yield (full tensor, shards, dimension)."""
    generator = checks.fresh_generator()
    for shape, dim in CUTS:
        whole = torch.randn(*shape, generator=generator, dtype=dtype)
        if transposed:
            whole = whole.transpose(0, -1).contiguous().transpose(0, -1)
        parts = [part.clone(memory_format=torch.contiguous_format) for part in whole.chunk(p, dim)]
        if len(parts) == p and all(part.shape == parts[0].shape for part in parts):
            yield whole, parts, dim


def _cut_and_paste(
    shard: Callable[..., Tensor],
    unshard: Callable[..., Tensor],
    whole: Tensor,
    parts: Sequence[Tensor],
    dim: int,
    rank: int,
    p: int,
) -> checks.Observed:
    given = [part.clone() for part in parts]
    before = checks.Snapshot(tensor=whole, shards=given, **{f"shards[{i}]": part for i, part in enumerate(given)})
    with checks.calling(
        f"shard(a tensor of shape {list(whole.shape)}, dim={dim}, rank={rank}, world_size={p})", _DIVIDES
    ) as cutting:
        mine = shard(whole, dim, rank, p)
    with checks.calling(f"unshard({p} shards of shape {list(given[0].shape)}, dim={dim})") as pasting:
        pasted = unshard(given, dim)
    seen: checks.Observed = {"shard": mine, "unshard": pasted, "inputs unchanged": before.changed()}
    seen |= cutting.claims({"the shard": mine}) | pasting.claims({"the whole": pasted})
    if isinstance(mine, Tensor):
        kept, needed = mine.untyped_storage().nbytes(), parts[rank].numel() * mine.element_size()
        shares = "it is the full tensor itself" if checks.same_memory(mine, whole) else ""
        seen[OWN_MEMORY] = checks.Claim(
            f"it keeps {kept} bytes alive but only needs {needed}" if kept > needed else shares
        )
        seen[CONTIGUOUS] = checks.Claim("" if mine.is_contiguous() else f"its strides are {mine.stride()}")
    return seen
