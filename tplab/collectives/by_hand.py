"""Chapter 01: collectives, built by hand from send and receive.

The ranks form a ring, in which rank r sends to r + 1 and receives from r - 1. A tensor of N elements is split along its
first dimension into p chunks. In p - 1 steps, each chunk is passed around the ring once, and each rank adds its values:

    ring reduce-scatter, p = 3      step 0               step 1                step 2: complete
                      rank 0    chunk 2: x0         chunk 1: x2 + x0      chunk 0: x1 + x2 + x0
                      rank 1    chunk 0: x1         chunk 2: x0 + x1      chunk 1: x2 + x0 + x1
                      rank 2    chunk 1: x2         chunk 0: x1 + x2      chunk 2: x0 + x1 + x2

A second round without additions, the all-gather, brings every chunk to every rank. The two rounds together are an
all-reduce in 2(p-1) steps of N/p elements. Each rank sends 2(p-1)/p N elements, which hardly depends on p. A tree takes
only 2 log2(p) steps, but each step sends N elements, and the rank at the root sends log2(p) N. (Patarasuk and Yuan
2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations"; NCCL's Ring and Tree.)

Why doesn't any rank wait forever? If every rank sent first and then received, all of them could get stuck in send,
because a send may block until its receiver is ready (gloo's always does, NCCL's if the message is large). `exchange`
starts both messages at the same time and then waits for both. It uses a *batch* because NCCL runs the messages between
two GPUs in the order of the calls. If both ranks called isend and irecv separately, in the same order, they would
deadlock.

The collectives accept inputs with any strides and don't modify them. Results are new, contiguous tensors in the input's
dtype. Without a process group, there is a single rank.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def rank_and_size(group: ProcessGroup | None = None) -> tuple[int, int]:
    """Return this process's rank in the group and the group's size, or (0, 1) if no process group was initialized.

    Raises ValueError on a rank that isn't a member of the group.
    """
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError(f"rank {dist.get_rank()} isn't a member of this group: only its members take part in it")
    return rank, world_size


def ring_reduce_scatter(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Sum x [n, ..] over the ranks and return this rank's chunk of the sum, [n/p, ..], split as in `chunk_sizes`.

    This takes p - 1 steps, in which each rank sends all of x except its own chunk.
    """
    *_, (_, total) = reduce_scatter_steps(x, group)
    return total


def reduce_scatter_steps(
    x: Tensor, group: ProcessGroup | None = None, *, offset: int = 0
) -> Iterator[tuple[int, Tensor]]:
    """Yield (chunk index, its sum so far) on this rank, before the first step and after each of the p - 1 steps.

    The last of the p pairs contains the complete sum of chunk rank + offset (modulo p). By default, that's this rank's
    own chunk. With offset=1, every rank starts with its own chunk instead.
    """
    rank, p = rank_and_size(group)
    chunks = x.tensor_split(p)  # p views of about [n/p, ..]
    index = (rank + offset - 1) % p  # this chunk takes p - 1 steps to reach its owner
    running = chunks[index].clone(memory_format=torch.contiguous_format)
    yield index, running
    for _ in range(p - 1):
        index = (index - 1) % p
        received = _empty(chunks[index])
        exchange(running, received, group)
        running = received.add_(chunks[index])
        yield index, running


def ring_all_gather(chunk: Tensor, group: ProcessGroup | None = None, *, size: int | None = None) -> Tensor:
    """Concatenate the chunks [n/p, ..] of all ranks in rank order. Returns [n, ..] on every rank.

    size: n, if the chunks are split as in `chunk_sizes(n, p)`; if None, all chunks have the shape of this rank's chunk

    This takes p - 1 steps, in which each rank sends all chunks except its right neighbor's. Raises ValueError if this
    rank's chunk doesn't have the size that `chunk_sizes` gives it.
    """
    *_, (_, whole) = all_gather_steps(chunk, group, size=size)
    return whole


def all_gather_steps(
    chunk: Tensor, group: ProcessGroup | None = None, *, size: int | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Yield (latest chunk's index, the full tensor so far), before the first step and after each of the p - 1 steps."""
    rank, p = rank_and_size(group)
    sizes = chunk_sizes(chunk.shape[0] * p if size is None else size, p)
    if chunk.shape[0] != sizes[rank]:
        raise ValueError(
            f"rank {rank} holds {chunk.shape[0]} of {size} rows; of {p} ranks it should hold {sizes[rank]}"
        )
    whole = chunk.new_zeros(sum(sizes), *chunk.shape[1:])
    chunks = whole.split(sizes)  # views, so that each chunk is received in place
    chunks[rank].copy_(chunk)
    yield rank, whole
    for index in range(rank, rank - p + 1, -1):
        exchange(chunks[index % p], chunks[(index - 1) % p], group)
        yield (index - 1) % p, whole


def ring_all_reduce(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return a new tensor with the sum of x [..] over the ranks, using a reduce-scatter and then an all-gather."""
    flat = x.reshape(-1)  # [N]
    return ring_all_gather(ring_reduce_scatter(flat, group), group, size=len(flat)).view(x.shape)


def tree_all_reduce(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return a new tensor with the sum of x [..] over the ranks, using a reduce up a binomial tree and a broadcast.

    This takes 2 ceil(log2 p) steps, each of which sends all of x. On the way up the tree, for each distance d = 1, 2,
    4, .., every rank that is an odd multiple of d sends its sum to the rank whose number is smaller by d. Ranks never
    wait in a cycle, so plain send and recv work.
    """
    rank, p = rank_and_size(group)
    total = x.clone(memory_format=torch.contiguous_format)
    distances = [2**k for k in range(tree_depth(p))]
    for d in distances:
        if rank % (2 * d) == d:
            dist.send(total, group=group, group_dst=rank - d)
        elif rank % (2 * d) == 0 and rank + d < p:
            received = torch.empty_like(total)
            dist.recv(received, group=group, group_src=rank + d)
            total += received
    for d in reversed(distances):
        if rank % (2 * d) == 0 and rank + d < p:
            dist.send(total, group=group, group_dst=rank + d)
        elif rank % (2 * d) == d:
            dist.recv(total, group=group, group_src=rank - d)
    return total


def exchange(outgoing: Tensor, incoming: Tensor, group: ProcessGroup | None = None) -> None:
    """Send `outgoing` to the right neighbor and receive `incoming` from the left neighbor. Both must be contiguous.

    Empty tensors aren't sent, because both sides know the sizes. All ranks of the group must call this, or none.
    """
    rank, p = rank_and_size(group)
    messages = []
    if outgoing.numel():
        messages.append(dist.P2POp(dist.isend, outgoing, group=group, group_peer=(rank + 1) % p))
    if incoming.numel():
        messages.append(dist.P2POp(dist.irecv, incoming, group=group, group_peer=(rank - 1) % p))
    for request in dist.batch_isend_irecv(messages) if messages else ():
        request.wait()


# Closed formulas, which are exact even if p doesn't divide n


def chunk_sizes(n: int, p: int) -> list[int]:
    """Return the sizes of the p chunks into which `tensor_split` splits n rows.

    The first chunks may have one more element than the others.
    """
    return [n // p + (rank < n % p) for rank in range(p)]


def tree_depth(p: int) -> int:
    """Return ceil(log2 p), the number of steps from the deepest leaf of a binomial tree of p ranks to its root."""
    return (p - 1).bit_length()


def _empty(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)
