"""The record of a ring: every message of every step against a closed formula, and what is said of what is no ring."""

import re
from functools import cache
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests import saying
from tests.collectives.rings import held_after, messages_to_the_right, mirrored
from tplab.collectives import RingRun, record_ring, ring_all_reduce, ring_run, tree_all_reduce
from tplab.collectives.by_hand import ring_reduce_scatter


def plain(run: RingRun) -> list[list[tuple]]:
    return [[tuple(message) for message in row] for row in run.messages]


@pytest.fixture(scope="module", autouse=True)
def record_once():
    """A run of the same function on as many ranks is recorded once for all tests."""
    with mock.patch.object(ring_run, "_recorded", cache(ring_run._recorded)):
        yield


@pytest.mark.parametrize("p", [2, 5])
def test_every_message_of_every_step_is_recorded_and_what_the_ranks_have_after_it(p):
    run = record_ring(ring_all_reduce, p)
    assert plain(run) == messages_to_the_right(p)
    assert re.search(saying("tplab", "ring_all_reduce"), run.name)
    assert (run.note, run.size) == ("", 1000 * p)
    assert run.held == tuple(
        tuple(tuple(held_after(step, rank, chunk, p) for chunk in range(p)) for rank in range(p))
        for step in range(2 * p - 1)
    )


def test_a_ring_may_go_to_the_left():
    def to_the_left(x):
        p, rank = dist.get_world_size(), dist.get_rank()
        chunks = list(x.reshape(p, -1).clone())
        for step in range(2 * (p - 1)):
            outgoing, incoming = chunks[(rank + 1 + step) % p], torch.empty_like(chunks[0])
            index = (rank + 2 + step) % p
            pair = [dist.P2POp(dist.isend, outgoing, (rank - 1) % p), dist.P2POp(dist.irecv, incoming, (rank + 1) % p)]
            for request in dist.batch_isend_irecv(pair):
                request.wait()
            chunks[index] = incoming + chunks[index] if step < p - 1 else incoming
        return torch.stack(chunks).reshape(x.shape)

    run = record_ring(to_the_left, 3)
    assert run.note == ""
    assert plain(run) == mirrored(3, messages_to_the_right(3))


def unwritten(x):
    raise NotImplementedError("exercise 1.3")


def fails(x):
    return x.reshape(7, -1) if dist.get_rank() == 0 else x  # only there: of several, any rank may be the first


def stuck(x):
    dist.recv(x, (dist.get_rank() - 1) % dist.get_world_size())
    return x


def forgets_the_copies(x):
    chunks = x.reshape(dist.get_world_size(), -1)
    return ring_reduce_scatter(chunks)


def of_torch(x):
    total = x.clone()
    dist.all_reduce(total)
    return total


NOTES = [
    (unwritten, r"unwritten.*\bwritten\b"),
    (fails, saying("fails", "RuntimeError", "rank 0", "shape '[7, -1]' is invalid for input of size 375")),
    (stuck, saying("stuck", "stuck")),
    (forgets_the_copies, saying("forgets_the_copies", "wrong", "rank 0")),
    (of_torch, saying("of_torch", "0 messages", "rank 0", "2(p-1) = 4")),
    (tree_all_reduce, saying("tree_all_reduce", "rank 0", "chunk")),
]


@pytest.mark.parametrize(("function", "why"), NOTES, ids=[function.__name__ for function, _ in NOTES])
def test_where_a_function_is_no_ring_tplabs_own_runs_and_the_note_says_why(function, why):
    run = record_ring(function, 3)
    assert re.search(why, run.note)
    assert re.search(saying("tplab", "ring_all_reduce"), run.name)
    assert plain(run) == messages_to_the_right(3)


def test_a_function_of_a_notebook_is_called_yours():
    def my_ring(x):
        return ring_all_reduce(x)

    my_ring.__module__ = "__main__"
    assert re.search(saying("your", "my_ring"), record_ring(my_ring, 2).name)
