"""Collectives by hand: `tplab.collectives.by_hand`, against sums in plain torch, on real ranks.

Every rank has other random numbers, so that a chunk that went to the wrong rank, or was added twice, is seen. A single
launch of five ranks has groups of one to five. tests/gpu/test_on_the_cpu.py has other dtypes.
"""

import re
from math import prod

import torch
import torch.distributed as dist

from tests import saying
from tests.reference import assert_close, random
from tests.tensor.on_ranks import refusals
from tests.tensor.operators import contiguous, every_second, expanded_rows, transposed
from tplab import launch, record
from tplab.collectives.by_hand import (
    all_gather_steps,
    chunk_sizes,
    exchange,
    rank_and_size,
    reduce_scatter_steps,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    tree_all_reduce,
    tree_depth,
)

SHAPES = [(60,), (60, 2), (7,), (3, 2, 2), (1,), (0,), (4, 0), (2, 5)]  # 60: divided by every p; others are not
LAYOUTS = (contiguous, transposed, every_second, expanded_rows)
CASES = [(shape, contiguous) for shape in SHAPES] + [(s, layout) for s in ((6, 4), (5, 3, 2)) for layout in LAYOUTS]


def members(group):
    """The global ranks of a group, of which a process without a group has one."""
    return dist.get_process_group_ranks(group) if dist.is_initialized() else [0]


def ring_sent(shape, rank, p, kind="all_reduce"):
    """The number of elements that a rank sends for a tensor of this shape, also if p doesn't divide it."""
    if kind == "all_reduce":
        return sum(ring_sent((prod(shape),), rank, p, half) for half in ("reduce_scatter", "all_gather"))
    sizes = chunk_sizes(shape[0], p)
    kept = {"reduce_scatter": sizes[rank], "all_gather": sizes[(rank + 1) % p]}[kind]
    return (shape[0] - kept) * prod(shape[1:])


def assert_right(group=None):
    """Sums and parts are right, also where p doesn't divide, and nothing shares memory with the caller's tensors."""
    rank, p = rank_and_size(group)
    for shape, layout in CASES:
        xs = [layout(shape, member, shape) for member in members(group)]
        x, total = xs[rank], torch.stack(xs).sum(0)
        before, chunk = x.clone(), x.tensor_split(p)[rank]
        pieces = torch.cat([other.tensor_split(p)[number] for number, other in enumerate(xs)])
        results = [
            (ring_reduce_scatter(x, group), total.tensor_split(p)[rank]),
            (ring_all_gather(chunk, group, size=shape[0]), pieces),
            (ring_all_gather(x, group), torch.cat(xs)),
            (ring_all_reduce(x, group), total),
            (tree_all_reduce(x, group), total),
        ]
        assert all(out.is_contiguous() for out, _ in results)
        for out, expected in results:
            assert_close(out, expected)
            shares = out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
            assert not (shares and out.numel()), "a result shares memory with the caller's tensor"
        assert torch.equal(x, before), "the caller's tensor was written to"


def tree_sent(shape, rank, p):
    """The number of elements that a rank sends in a tree all-reduce: N to its parent, and N to each child."""
    distances = [2**k for k in range(tree_depth(p))]
    below = sum(rank % (2 * d) == 0 and rank + d < p for d in distances)
    return torch.Size(shape).numel() * (below + (rank > 0))


def assert_traffic(group):
    """From the record, against the closed formulas and against the formula of the books."""
    for shape in ((120, 2), (7, 3), (2,), (0, 4)):
        _assert_traffic_of(shape, group)


def _assert_traffic_of(shape, group):
    (rank, p), ranks = rank_and_size(group), members(group)
    x, numel = random(shape, dist.get_rank()), torch.Size(shape).numel()
    chunk = x.tensor_split(p)[rank]
    for kind, function, sent in [
        ("reduce_scatter", lambda: ring_reduce_scatter(x, group), ring_sent(shape, rank, p, "reduce_scatter")),
        ("all_gather", lambda: ring_all_gather(chunk, group, size=len(x)), ring_sent(shape, rank, p, "all_gather")),
        ("all_reduce", lambda: ring_all_reduce(x, group), ring_sent(shape, rank, p)),
        ("tree", lambda: tree_all_reduce(x, group), tree_sent(shape, rank, p)),
    ]:
        with record() as section:
            function()
        sends = [call.numel for call in section if call.kind == "send"]
        assert sum(sends) == sent, (kind, shape)
        assert all(call.kind in ("send", "recv") and call.end is not None for call in section)
        if (steps := {"reduce_scatter": p - 1, "all_gather": p - 1, "all_reduce": 2 * (p - 1)}.get(kind)) is None:
            continue
        assert {call.group for call in section} <= {
            (ranks[rank], ranks[(rank + 1) % p]),
            (ranks[rank - 1], ranks[rank]),
        }
        if numel % (p * p) == 0 and len(x) % p == 0:
            assert sends == [numel // p] * (steps if numel else 0)


def assert_large_messages_do_not_wait_for_each_other(group):
    (rank, p), ranks = rank_and_size(group), members(group)
    x = torch.full((2**21,), float(dist.get_rank()))  # 8 MiB: no buffer holds a chunk of it
    incoming = torch.empty_like(x)
    if p > 1:
        exchange(x, incoming, group)
        assert incoming[0] == ranks[rank - 1]
    assert ring_all_reduce(x, group)[-1] == sum(ranks)


def assert_every_step_adds_one_rank_and_brings_one_chunk(group):
    """The steps that pictures are drawn from, of ranks 0 to 3."""
    rank, _ = rank_and_size(group)
    x = torch.tensor([1.0] * 4) * 10**rank
    for offset, first in ((0, rank - 1), (1, rank)):
        steps = [(chunk, int(total)) for chunk, total in reduce_scatter_steps(x, group, offset=offset)]
        assert [chunk for chunk, _ in steps] == [(first - step) % 4 for step in range(4)]
        assert [str(total).count("1") for _, total in steps] == [1, 2, 3, 4]
    gathered = [(chunk, int(whole.count_nonzero())) for chunk, whole in all_gather_steps(x[:1], group)]
    assert gathered == [((rank - step) % 4, step + 1) for step in range(4)]


def _in_groups_of_one_to_five():
    rank = dist.get_rank()
    threes, twos, four, one = map(dist.new_group, ([0, 2, 4], [1, 3], [0, 1, 2, 3], [4]))
    for group in (twos if rank % 2 else threes, one if rank == 4 else four, None):
        assert_right(group)
        assert_traffic(group)
        assert_large_messages_do_not_wait_for_each_other(group)
    if rank < 4:
        assert_every_step_adds_one_rank_and_brings_one_chunk(four)
    x = torch.zeros(4, 2)
    return refusals(
        lambda: ring_all_gather(x, size=3),
        lambda: ring_all_reduce(x, four if rank == 4 else one),
    )


def test_sums_parts_traffic_and_steps_are_right_in_groups_of_one_to_five_and_what_cannot_be_is_refused():
    for rank, (rows, no_member) in enumerate(launch(_in_groups_of_one_to_five, 5)):
        assert re.search(saying(f"rank {rank}", "4", "3 rows", "5 ranks", f"{int(rank < 3)}"), rows)
        assert re.search(saying(f"rank {rank}", "member"), no_member)


def test_without_a_process_group_there_is_one_rank():
    assert_right()


def test_formulas_of_the_books():
    for p in range(1, 18):
        n = 16 * p * p
        assert [ring_sent((n,), rank, p) for rank in range(p)] == [2 * (p - 1) * n // p] * p
        assert sum(ring_sent((n + 1,), rank, p) for rank in range(p)) == 2 * (p - 1) * (n + 1)
        assert 2 ** tree_depth(p) >= p > 2 ** (tree_depth(p) - 1)
        for size in (0, 1, p - 1, n, n + 1):
            assert chunk_sizes(size, p) == [len(chunk) for chunk in torch.zeros(size).tensor_split(p)]
