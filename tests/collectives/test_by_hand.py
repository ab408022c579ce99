"""Collectives by hand: `tplab.collectives.by_hand`, against torch's own and against sums in plain torch, on real ranks.

Every rank has other random numbers, so that a chunk that went to the wrong rank, or was added twice, is seen.
"""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from tests.reference import assert_close, random
from tplab import launch, record
from tplab.collectives.by_hand import (
    all_gather_steps,
    chunk_sizes,
    exchange,
    gather,
    reduce_scatter_steps,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    ring_sent,
    scatter,
    tree_all_reduce,
    tree_depth,
    tree_sent,
)

WORLD_SIZES = (1, 2, 3, 4, 5)
SHAPES = [(60,), (60, 2), (7,), (3, 2, 2), (1,), (0,), (4, 0), (2, 5)]  # 60: divided by every p; others are not
ALL_REDUCES = (ring_all_reduce, tree_all_reduce)


def contiguous(shape, *key):
    return random(shape, *key)


def transposed(shape, *key):
    return random(shape[::-1], *key).permute(*reversed(range(len(shape))))


def every_second(shape, *key):
    return random((*shape[:-1], 2 * shape[-1]), *key)[..., ::2]


def expanded(shape, *key):
    return random((1, *shape[1:]), *key).expand(shape)


LAYOUTS = (contiguous, transposed, every_second, expanded)


def _run(shapes, layouts, group=None):
    """Every function on every input: what it gave, and whether the input is as it was."""
    rank, p = dist.get_rank(group), dist.get_world_size(group)
    rows = []
    for shape in shapes:
        for layout in layouts:
            x = layout(shape, dist.get_rank(), shape)
            before = x.clone()
            chunk = x.tensor_split(p)[rank]
            row = {"x": before, "reduce_scatter": ring_reduce_scatter(x, group)}
            row["all_gather"] = ring_all_gather(chunk, group, size=shape[0])
            row["all_gather equal"] = ring_all_gather(x, group)
            row["ring"], row["tree"] = ring_all_reduce(x, group), tree_all_reduce(x, group)
            row["gather"] = gather(x, p - 1, group)
            chunks = [x + other for other in range(p)] if rank == p // 2 else None
            row["scatter"] = scatter(torch.empty_like(x), chunks, p // 2, group)
            outputs = [value for name, value in row.items() if isinstance(value, torch.Tensor) and name != "x"]
            row["aliases"] = any(_share(out, x) for out in outputs if out.numel())
            row["contiguous"] = all(out.is_contiguous() for out in outputs if out is not row["scatter"])
            row["unchanged"] = torch.equal(x, before)
            rows.append(row)
    return rows


def _share(out, x):
    return out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def _assert_right(rows):
    """`rows`: of one input, what the p ranks of one group returned."""
    p, xs = len(rows), [row["x"] for row in rows]
    total = torch.stack(xs).sum(0)
    pieces = torch.cat([x.tensor_split(p)[rank] for rank, x in enumerate(xs)])
    for rank, row in enumerate(rows):
        assert_close(row["reduce_scatter"], total.tensor_split(p)[rank])
        assert_close(row["all_gather"], pieces)
        assert_close(row["all_gather equal"], torch.cat(xs))
        assert_close(row["ring"], total)
        assert_close(row["tree"], total)
        assert_close(row["scatter"], xs[p // 2] + rank)
        if rank == p - 1:
            assert_close(torch.stack(row["gather"]), torch.stack(xs))
        else:
            assert row["gather"] is None
        assert row["unchanged"], "the caller's tensor was written to"
        assert not row["aliases"], "a result shares memory with the caller's tensor"
        assert row["contiguous"]


@pytest.mark.parametrize("p", WORLD_SIZES)
def test_sums_and_parts_are_right_for_every_shape_also_where_p_does_not_divide(p):
    results = launch(_run, p, args=(SHAPES, [contiguous]))
    assert len(results) == p
    for case in range(len(SHAPES)):
        _assert_right([result[case] for result in results])


@pytest.mark.parametrize("p", [2, 3])
def test_any_layout_works_and_the_callers_tensors_stay_as_they_are(p):
    shapes = [(6, 4), (5, 3, 2)]
    results = launch(_run, p, args=(shapes, LAYOUTS))
    for case in range(len(shapes) * len(LAYOUTS)):
        _assert_right([result[case] for result in results])


def _run_in_groups():
    evens, odds = dist.new_group([0, 2, 4]), dist.new_group([1, 3])
    return _run([(6, 2), (5,), (0,)], [contiguous], odds if dist.get_rank() % 2 else evens)


def test_in_groups_each_sums_its_own_ranks():
    results = launch(_run_in_groups, 5)
    for members in ([0, 2, 4], [1, 3]):
        for case in range(3):
            _assert_right([results[rank][case] for rank in members])


def _beside_torch(dtype):
    rank, p = dist.get_rank(), dist.get_world_size()
    x = (random((12, 5), rank) * 100).to(dtype)
    theirs_reduced = x.clone()
    dist.all_reduce(theirs_reduced)
    theirs_scattered = torch.empty_like(x.chunk(p)[rank])
    dist.reduce_scatter(theirs_scattered, list(x.chunk(p)))
    theirs_gathered = [torch.empty_like(x) for _ in range(p)]
    dist.all_gather(theirs_gathered, x)
    return [
        (ring_all_reduce(x), theirs_reduced),
        (tree_all_reduce(x), theirs_reduced),
        (ring_reduce_scatter(x), theirs_scattered),
        (ring_all_gather(x), torch.cat(theirs_gathered)),
    ]


@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int8])
def test_equal_to_torchs_own_collectives_in_every_dtype(dtype, p):
    """Sums may round in another order: by one step of the dtype for each addition, and not at all for integers."""
    tolerance = p * torch.finfo(dtype).eps if dtype.is_floating_point else 0
    for pairs in launch(_beside_torch, p, args=(dtype,)):
        for mine, theirs in pairs:
            assert mine.dtype == theirs.dtype == dtype
            assert_close(mine.double(), theirs.double(), tolerance)


def test_without_a_process_group_there_is_one_rank():
    x = random((3, 4))
    for function in (ring_reduce_scatter, ring_all_gather, ring_all_reduce, tree_all_reduce):
        out = function(x)
        assert_close(out, x)
        assert not _share(out, x)
    assert_close(scatter(torch.empty(4, dtype=x.dtype), [x[0]]), x[0])
    (only,) = gather(x)
    assert_close(only, x)


# Traffic: from the record, against the closed formulas and against the formula of the books


def _traffic(shape):
    x = random(shape, dist.get_rank())
    chunk = x.tensor_split(dist.get_world_size())[dist.get_rank()]
    sections = {}
    for name, function in {
        "reduce_scatter": lambda: ring_reduce_scatter(x),
        "all_gather": lambda: ring_all_gather(chunk, size=shape[0]),
        "all_reduce": lambda: ring_all_reduce(x),
        "tree": lambda: tree_all_reduce(x),
        "scatter": lambda: scatter(x.clone(), [x] * dist.get_world_size() if dist.get_rank() == 0 else None),
        "gather": lambda: gather(x),
    }.items():
        with record() as section:
            function()
        sections[name] = [(c.kind, c.group, c.numel, c.end is not None) for c in section]
    return sections


@pytest.mark.parametrize("shape", [(120, 2), (7, 3), (2,), (0, 4)])
@pytest.mark.parametrize("p", WORLD_SIZES)
def test_traffic_of_every_rank_is_that_of_the_formula(p, shape):
    numel = torch.Size(shape).numel()
    for rank, sections in enumerate(launch(_traffic, p, args=(shape,))):
        for kind in ("reduce_scatter", "all_gather", "all_reduce"):
            assert _sent(sections[kind]) == ring_sent(shape, rank, p, kind)
            if numel % (p * p) == 0 and shape[0] % p == 0:
                steps = (p - 1) * (2 if kind == "all_reduce" else 1)
                assert _sent(sections[kind]) == steps * numel // p
                assert len([call for call in sections[kind] if call[0] == "send"]) == (steps if numel else 0)
            assert {call[1] for call in sections[kind]} <= {(rank, (rank + 1) % p), ((rank - 1) % p, rank)}
        assert _sent(sections["tree"]) == tree_sent(shape, rank, p)
        assert _sent(sections["scatter"]) == (numel * (p - 1) if rank == 0 else 0)
        assert _sent(sections["gather"]) == (numel if rank else 0)
        assert all(kind in ("send", "recv") and waited for calls in sections.values() for kind, *_, waited in calls)


def _sent(calls):
    return sum(numel for kind, _, numel, _ in calls if kind == "send")


@pytest.mark.parametrize("p", range(1, 18))
def test_formulas_of_the_books(p):
    n = 16 * p * p
    assert [ring_sent((n,), rank, p) for rank in range(p)] == [2 * (p - 1) * n // p] * p
    assert sum(ring_sent((n + 1,), rank, p) for rank in range(p)) == 2 * (p - 1) * (n + 1)
    assert sum(tree_sent((n,), rank, p) for rank in range(p)) == 2 * (p - 1) * n
    assert 2 ** tree_depth(p) >= p > 2 ** (tree_depth(p) - 1)
    assert tree_sent((n,), 0, p) == n * tree_depth(p)
    for size in (0, 1, p - 1, n, n + 1):
        assert chunk_sizes(size, p) == [len(chunk) for chunk in torch.zeros(size).tensor_split(p)]


# The steps that pictures are drawn from


def _steps():
    x = torch.tensor([1.0] * 4) * 10 ** dist.get_rank()
    reduced = [(chunk, total.clone()) for chunk, total in reduce_scatter_steps(x)]
    own_first = [
        (chunk, total.clone()) for chunk, total in reduce_scatter_steps(x * x.new_tensor([1, 2, 3, 4]), offset=1)
    ]
    gathered = [(chunk, whole.clone()) for chunk, whole in all_gather_steps(x[:1])]
    return reduced, own_first, gathered


def test_every_step_adds_one_rank_and_brings_one_chunk():
    for rank, (reduced, own_first, gathered) in enumerate(launch(_steps, 4)):
        assert [chunk for chunk, _ in reduced] == [(rank - 1 - step) % 4 for step in range(4)]
        contributors = [[r for r in range(4) if f"{int(total):04d}"[3 - r] == "1"] for _, total in reduced]
        assert [len(ranks) for ranks in contributors] == [1, 2, 3, 4]
        assert all(set(before) < set(after) for before, after in pairwise(contributors))
        assert [chunk for chunk, _ in gathered] == [(rank - step) % 4 for step in range(4)]
        assert [int(whole.count_nonzero()) for _, whole in gathered] == [1, 2, 3, 4]
        assert [chunk for chunk, _ in own_first] == [(rank - step) % 4 for step in range(4)]
        assert int(own_first[-1][1]) == 1111 * ((rank + 1) % 4 + 1)


# No deadlock, whatever the size; and what is refused


def _large():
    x = torch.full((2**21,), float(dist.get_rank()))  # 8 MiB: no buffer holds a chunk of it
    incoming = torch.empty_like(x)
    exchange(x, incoming)
    return float(incoming[0]), float(ring_all_reduce(x)[-1])


@pytest.mark.parametrize("p", [2, 3])
def test_large_messages_do_not_wait_for_each_other(p):
    assert list(launch(_large, p)) == [((rank - 1) % p, sum(range(p))) for rank in range(p)]


def _send_first():
    x = torch.zeros(2**21)
    dist.send(x, (dist.get_rank() + 1) % dist.get_world_size())
    dist.recv(x, (dist.get_rank() - 1) % dist.get_world_size())


def test_plain_sends_all_round_do_wait_for_each_other():
    """What `exchange` is for; should a backend ever let it pass, the chapter has to say so."""
    from tplab import Deadlock

    with pytest.raises(Deadlock, match="is waiting in send"):
        launch(_send_first, 3)


def _refused():
    x = torch.zeros(4, 2)
    for call in (
        lambda: scatter(x, [x] * 3, dist.get_rank()),
        lambda: scatter(x, [x, x.double()], dist.get_rank()),
        lambda: scatter(x, None, dist.get_rank()),
        lambda: scatter(x, None, 2),
        lambda: gather(x, -1),
        lambda: ring_all_gather(x, size=3),
    ):
        with pytest.raises(ValueError) as refusal:
            call()
        yield str(refusal.value)


def _refusals():
    return list(_refused())


def test_what_cannot_be_is_refused_with_the_numbers():
    for rank, said in enumerate(launch(_refusals, 2)):
        assert said[0].startswith(f"rank {rank} scatters 2 tensors [4, 2] torch.float32, got ['[4, 2] torch.float32', ")
        assert "torch.float64" in said[1]
        assert said[2].endswith("got none")
        assert said[3] == "rank 2 isn't one of the 2 ranks of the group: they are numbered 0 to 1"
        assert said[4].startswith("rank -1 isn't one of")
        assert said[5] == f"rank {rank} holds 4 of 3 rows; of 2 ranks it should hold {2 - rank}"


def _foreign_group():
    group = dist.new_group([0])
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="rank 1 isn't a member of this group"):
            ring_all_reduce(torch.zeros(2), group)


def test_a_group_that_this_rank_is_no_member_of_is_refused():
    launch(_foreign_group, 2)
