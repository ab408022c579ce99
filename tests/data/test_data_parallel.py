"""Data parallelism equals one process with the whole batch."""

import re
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tests import saying
from tests.data.small_net import Net, batch, gradients, loss_of, plain_gradients, uneven_batch, whole_batch
from tests.reference import assert_close
from tests.tensor.on_ranks import own_group, refusals
from tplab import launch, record
from tplab.data.data_parallel import DataParallel, tokens_of_all
from tplab.data.flat_parameters import broadcast, in_buckets

P = 4
BUCKETS = [1, 500, 25 * 2**20]  # bytes: a parameter each, a few, all in one


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def assert_same_gradients(actual, expected):
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        if gradient is None:
            assert actual[name] is None or not actual[name].any(), name
        else:
            assert_close(actual[name], gradient)


# Buckets


def test_buckets_hold_the_last_parameters_first_of_one_dtype_and_no_more_than_they_may():
    dtypes = [torch.float32, torch.bfloat16] * 4  # of tensors with 1, 2, .., 8 elements
    parameters = [nn.Parameter(torch.zeros(n, dtype=dtype)) for n, dtype in enumerate(dtypes, 1)]
    buckets = in_buckets(parameters, bucket_bytes=28)
    assert [[len(parameter) for parameter in bucket] for bucket in buckets] == [[8, 6], [7], [5], [4, 2], [3, 1]]
    with pytest.raises(ValueError, match="bucket_bytes=0"):
        in_buckets(parameters, 0)


# Gradients


def _mean(bucket_bytes, group=None):
    rank = dist.get_rank(group)
    model = Net(rank)  # the constructor has to make them alike
    data = DataParallel(model, bucket_bytes=bucket_bytes, group=group)
    with record() as sent:
        loss_of(model, batch(rank, 0)).backward()
        data.finish()
    kinds = {(collective.kind, collective.op, len(collective.group)) for collective in sent}
    assert [collective.bytes for collective in sent] == [sum(8 * p.numel() for p in bucket) for bucket in data.buckets]
    return gradients(model), [collective.bytes for collective in sent], kinds


def _unequal_counts():
    model, rank = Net(), dist.get_rank()
    data = DataParallel(model, average=False, bucket_bytes=500)
    x, target = uneven_batch(rank, 0)
    total = tokens_of_all(int((target != -100).sum()))
    loss = F.cross_entropy(model(x), target, reduction="sum") / total
    loss.backward()
    data.finish()
    dist.all_reduce(loss := loss.detach())
    return gradients(model), total, loss


def _accumulated(last_sends):
    """Three backwards, of which one or none sends; each bucket leaves once."""
    model = Net()
    data = DataParallel(model, bucket_bytes=500)
    with record() as sent:
        for k in range(3):
            with nullcontext() if k == 2 and last_sends else data.no_sync():
                (loss_of(model, batch(dist.get_rank(), k), spare=True) / 3).backward()
        assert (data.started > 0) == last_sends
        data.finish()
    assert len(sent) == len(data.buckets)
    return gradients(model)


def _used_by(ranks):
    """Gradients where only these ranks use the spare layer."""
    model, rank = Net(), dist.get_rank()
    data = DataParallel(model, bucket_bytes=500)
    loss_of(model, batch(rank, 0), spare=rank in ranks).backward()
    data.finish()
    return gradients(model)


def _overlap():
    """Full buckets leave while backward runs, and their gradients are gone then."""
    model, seen = Net(), []
    data = DataParallel(model, bucket_bytes=500)
    x, target = batch(dist.get_rank(), 0)
    with record() as sent:
        z = model.first(x)
        z.register_hook(lambda gradient: seen.append((data.started, [p.grad for p in data.buckets[0]])))
        x = model.frozen(z @ model.scale)
        for block in model.blocks:
            x = block(x)
        F.cross_entropy(model.last(model.spare(x)), target).backward()
        assert data.started == len(data.buckets)
        data.finish()
    ((at_the_first_layer, early),) = seen
    assert 0 < at_the_first_layer < len(data.buckets) == len(sent)
    assert early == [None] * len(early)
    assert data.started == 0


def _second_backward():
    model, rank = Net(), dist.get_rank()
    data = DataParallel(model, bucket_bytes=1)
    loss_of(model, batch(rank, 0)).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    messages = refusals(lambda: loss_of(model, batch(rank, 1)).backward(), optimizer.step)
    data.finish()
    optimizer.step()
    return messages


def _in_groups():
    rank, group = dist.get_rank(), own_group()
    tensor = torch.arange(6.0).view(2, 3).t() + rank
    broadcast([tensor], group)
    return _mean(500, group)[0], tensor, tokens_of_all(rank + 1, group)


def _everything():
    _overlap()
    return {
        "mean": [_mean(size) for size in BUCKETS],
        "unequal counts": _unequal_counts(),
        "accumulated": [_accumulated(last_sends) for last_sends in (True, False)],
        "unused": _used_by([]),
        "used by rank 1": _used_by([1]),
        "refused": _second_backward(),
        "in groups": _in_groups(),
    }


@pytest.fixture(scope="module")
def runs():
    results = launch(_everything, P, timeout=200)
    assert len(results) == P
    return results


def test_the_mean_of_the_gradients_is_that_of_the_whole_batch_and_a_step_sends_every_gradient_once(runs):
    wanted, size = plain_gradients(range(P)), 8 * sum(parameter.numel() for parameter in trained(Net()))
    for found in (run["mean"] for run in runs):
        for own, bytes_of, kinds in found:
            assert_same_gradients(own, wanted)
            assert kinds == {("all_reduce", "sum", P)}
            assert sum(bytes_of) == size
        one_each, some, all_at_once = (len(bytes_of) for _, bytes_of, _ in found)
        assert one_each == len(trained(Net())) > some > all_at_once == 1


def test_every_token_counts_the_same_where_ranks_have_different_numbers(runs):
    wanted = plain_gradients(range(P), of_rank=uneven_batch)
    whole_loss = loss_of(Net(), whole_batch(range(P), 0, uneven_batch)).detach()
    for found, total, loss in (run["unequal counts"] for run in runs):
        assert total == 4 + 3 + 2 + 1
        assert_close(loss, whole_loss)
        assert_same_gradients(found, wanted)


def test_accumulated_gradients_are_those_of_one_process(runs):
    wanted: dict = {}
    for k in range(3):
        for name, gradient in plain_gradients(range(P), k, spare=True).items():
            wanted[name] = gradient if gradient is None else gradient / 3 + wanted.get(name, 0)
    for run in runs:
        for found in run["accumulated"]:
            assert_same_gradients(found, wanted)


def test_a_parameter_that_no_rank_uses_gets_zero_and_one_that_some_ranks_use_gets_the_mean_on_all(runs):
    wanted: dict = {}
    for rank in range(P):
        for name, gradient in plain_gradients([rank], spare=rank == 1).items():
            wanted[name] = wanted.get(name, 0) + (0 if gradient is None else gradient / P)
    for run in runs:
        assert not any(run["unused"][name].any() for name in ("spare.weight", "spare.bias"))
        assert run["unused"]["frozen.weight"] is None
        for name, gradient in run["used by rank 1"].items():
            if not name.startswith("frozen"):
                assert_close(gradient, wanted[name])


def test_a_second_backward_and_an_update_before_finish_are_refused(runs):
    for second, update in (run["refused"] for run in runs):
        assert re.search(saying("finish()", "no_sync()"), second)
        assert re.search(saying("weights", ".grad", "DataParallel", "finish()"), update)


# Other groups, one rank


def test_two_groups_side_by_side_do_not_mix(runs):
    wanted = plain_gradients(range(2))
    for rank, (found, tensor, count) in enumerate(run["in groups"] for run in runs):
        assert_same_gradients(found, wanted)  # each has ranks 0 and 1 of its own
        assert torch.equal(tensor, torch.arange(6.0).view(2, 3).t() + rank % 2)
        assert count == (4 if rank % 2 == 0 else 6)


def test_one_process_needs_no_group_and_a_step_leaves_nothing_to_the_next_even_if_it_is_abandoned():
    model = Net()
    data = DataParallel(model, bucket_bytes=500)
    loss_of(model, batch(0, 1), spare=True).backward()
    data.abandon()
    for _ in range(2):
        model.zero_grad()
        loss_of(model, batch(0, 0), spare=True).backward()
        data.finish()
        assert_same_gradients(gradients(model), plain_gradients([0], spare=True))
    assert tokens_of_all(7) == 7


def test_a_parameter_that_is_unfrozen_afterwards_is_refused():
    model = Net()
    data = DataParallel(model)
    model.frozen.requires_grad_(True)
    loss_of(model, batch(0, 0)).backward()
    with pytest.raises(ValueError, match=saying("2 parameters", "DataParallel")):
        data.finish()
