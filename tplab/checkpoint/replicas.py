"""Chapter 10: check that replicated parameters, such as norms, final biases and copied K and V heads, are identical.

If a gradient wasn't summed, or a dropout mask differed between ranks, replicas drift apart, but neither the output nor
the loss shows it (chapter 05). A checkpoint keeps only one replica, so this is a good time to check. Each rank computes
checksums of the data that other ranks also have, and the ranks compare them. That takes a few bytes per tensor.
"""

import zlib

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tplab.checkpoint.files import gathered, together
from tplab.checkpoint.pieces import pieces
from tplab.collectives.by_hand import rank_and_size
from tplab.tensor.sharding import Sharding, check_group, sharding_of
from tplab.tensor.wrappers import plain_state

Piece = tuple[str, tuple[int, ...]]  # the name of a tensor, and the offset of this chunk in the full tensor
Checksums = dict[Piece, int]


def compare_replicas(model: nn.Module, group: ProcessGroup | None = None) -> None:
    """Raise ValueError on all ranks if a parameter or buffer that should be identical differs between ranks.

    All ranks of the model's group must call it. Replicas must match bit for bit, which they do if all ranks compute
    them in the same way.
    """
    if rank_and_size(group)[1] == 1:
        return
    mine = together(lambda: _checksums(model, group), group)
    if differ := _differences(gathered(mine, group)):
        named = [f"{name} (ranks {', '.join(pairs)})" for name, pairs in differ.items()]
        more = f" and {len(named) - 4} more" if len(named) > 4 else ""
        raise ValueError(
            f"several ranks hold these, and not the same numbers: {'; '.join(named[:4])}{more}. A checkpoint keeps "
            "only one of them. Look for a gradient that is not added up over the ranks, or for a dropout of a "
            "replicated tensor whose places differ"
        )


def _checksums(model: nn.Module, group: ProcessGroup | None) -> Checksums:
    """Return checksums of all data that this rank shares with at least one other rank."""
    rank, world_size = rank_and_size(group)
    found: Checksums = {}
    for name, value in plain_state(model).items():
        if not isinstance(value, Tensor):
            continue
        check_group(name, value, group)
        sharding = sharding_of(value)
        if _is_held_by_several(sharding, world_size):
            for offset, view in pieces(value, sharding, rank, world_size).views.items():
                found[name, tuple(offset)] = _checksum(view)
    return found


def _is_held_by_several(sharding: Sharding | None, world_size: int) -> bool:
    return sharding is None or any(block.copies(world_size) > 1 for block in sharding.blocks)


def _checksum(tensor: Tensor) -> int:
    copy = tensor.detach().to("cpu", copy=True)  # numpy() makes storage unresizable, but ZeRO-3 has to resize it
    return zlib.crc32(copy.contiguous().flatten().view(torch.uint8).numpy().data)


def _differences(of_ranks: list[Checksums]) -> dict[str, list[str]]:
    """Return {name: ["0 and 1", "0 and 3"]}, which lists a chunk's first owner and each rank whose copy differs."""
    first: dict[Piece, int] = {}
    differ: dict[str, list[str]] = {name: [] for name, _ in of_ranks[0]}  # each rank has a chunk of each tensor
    for rank, checksums in enumerate(of_ranks):
        for piece, checksum in checksums.items():
            holder = first.setdefault(piece, rank)
            pair = f"{holder} and {rank}"
            if checksum != of_ranks[holder][piece] and pair not in differ[piece[0]]:
                differ[piece[0]].append(pair)
    return {name: pairs for name, pairs in differ.items() if pairs}
