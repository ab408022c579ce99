"""A message that nobody waits for reaches the check's verdict, and nothing that runs after it."""

import torch
import torch.distributed as dist

from tplab.course.checks.cases import Batch, Case
from tplab.course.checks.layouts import packed
from tplab.course.checks.messages import messages_kept, one_sided
from tplab.course.checks.recorded_traffic import traffic
from tplab.course.checks.trials import OnRanks, observed_by_each
from tplab.runtime import launch, record


def forgets(x):
    """Send x to the right-hand neighbor, whose receive is started and thrown away as well."""
    rank, p = dist.get_rank(), dist.get_world_size()
    dist.isend(x, (rank + 1) % p)
    dist.irecv(torch.empty_like(x), (rank - 1) % p)
    return x


def starts_half(x):
    """Start a receive on rank 1 whose message is never sent."""
    if dist.get_rank() == 1:
        dist.irecv(torch.empty_like(x), 0)
    return x


def passes_on(x):
    """Return the x of the left-hand neighbor."""
    rank, p = dist.get_rank(), dist.get_world_size()
    y = torch.empty_like(x)
    messages = [dist.P2POp(dist.isend, x, (rank + 1) % p), dist.P2POp(dist.irecv, y, (rank - 1) % p)]
    for request in dist.batch_isend_irecv(messages):
        request.wait()
    return y


def run(answer, case, given, group):
    x = torch.tensor([10.0 + dist.get_rank()])
    with record() as section:
        out = answer(x)
    return {"out": out, "traffic": traffic(section)}


def test_answers_after_one_that_leaves_a_message_behind_get_their_own_messages():
    trial = OnRanks(cases=[Case()], run=run, right=lambda case, problem, place: {})
    batch = Batch(2, [Case(), Case()], [], [[packed(None)] * 2] * 2)
    answers = [passes_on, forgets, passes_on, starts_half, passes_on]
    seen = observed_by_each(trial, answers, batch)
    late = [[any(not call.waited for call in rank["traffic"]) for rank in ranks] for ranks, _ in seen]
    assert late == [[False, False], [True, True], [False, False], [False, True], [False, False]]
    for answer, cases in zip(answers, seen, strict=True):
        if answer is passes_on:
            assert [[float(rank["out"]) for rank in ranks] for ranks in cases] == [[11.0, 10.0]] * 2


def a_forgotten_send():
    """Rank 1 asks for the message once its sender has thrown the request away."""
    x, group = torch.tensor([7.0]), dist.new_group()
    with messages_kept(), record() as section:
        if dist.get_rank() == 0:
            dist.isend(x + 1, 1)
        dist.barrier(group)
        if dist.get_rank() == 1:
            dist.recv(x, 0)
    return float(x), one_sided(section)


def half_a_message():
    with messages_kept(), record() as section:
        starts_half(torch.zeros(1))
    return one_sided(section)


def test_a_message_arrives_even_if_its_sender_forgets_it_and_every_rank_hears_of_half_a_message():
    ranks = launch(lambda: (a_forgotten_send(), half_a_message()), 2)
    assert list(ranks) == [((7.0, False), True), ((8.0, False), True)]
    assert one_sided([]) is False, "without ranks"
