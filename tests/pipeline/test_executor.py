"""The executor: any schedule on real ranks gives the loss and the gradients of one process, and keeps what it should.

Each launch runs all cases of its p. The reference is the same chain of plain torch modules on one process, over the
whole batch at once.
"""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tests.pipeline.messages import traffic
from tests.reference import assert_close, random
from tests.tensor.on_ranks import assert_refuses
from tplab import launch, record
from tplab.pipeline.executor import Pipeline
from tplab.pipeline.p2p import Channels
from tplab.pipeline.schedules import (
    Action,
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    peak_live,
    zero_bubble,
)

HIDDEN, CLASSES, BATCH, LENGTH = 6, 5, 2, 3
SHAPE, DTYPE = (BATCH, LENGTH, HIDDEN), torch.float64
MESSAGE = 8 * BATCH * LENGTH * HIDDEN


def out_of_step(p, m):
    """Every other rank takes the micro-batches in the opposite order: messages aren't used in the order of sending."""
    made = gpipe(p, m)
    rows = [
        [dataclasses.replace(a, micro_batch=m - 1 - a.micro_batch if rank % 2 else a.micro_batch) for a in row]
        for rank, row in enumerate(made.actions)
    ]
    return dataclasses.replace(made, name="out of step", actions=tuple(map(tuple, rows)))


def schedules(p):
    return [
        one_f_one_b(p, 1), zero_bubble(p, 1), gpipe(p, 3), one_f_one_b(p, 6), zero_bubble(p, 6),
        interleaved(p, 2 * p, 2), out_of_step(p, 4),
    ]  # fmt: skip


class Stage(nn.Module):
    """Plain modules; the first embeds ids, the last gives logits, with the same table if it is tied."""

    def __init__(self, number, stages, tied=False):
        super().__init__()
        self.first, self.last = number == 0, number == stages - 1
        table = random((CLASSES, HIDDEN), "table").requires_grad_()
        self.table = nn.Parameter(table) if self.first or (self.last and tied) else None
        self.layers = nn.Sequential(nn.Linear(HIDDEN, 8, dtype=DTYPE), nn.Tanh(), nn.Linear(8, HIDDEN, dtype=DTYPE))
        for name, parameter in self.layers.named_parameters():
            parameter.data = random(tuple(parameter.shape), number, name)
        self.head = nn.Linear(HIDDEN, CLASSES, dtype=DTYPE) if self.last and not tied else None
        if self.head is not None:
            self.head.weight.data, self.head.bias.data = random((CLASSES, HIDDEN), "w"), random((CLASSES,), "b")

    def forward(self, x):
        x = F.embedding(x, self.table) if self.first else x
        x = x + self.layers(x)
        if self.last:
            x = x @ self.table.T if self.head is None else self.head(x)
        return x


def loss_sum(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")


def batch(m, seed=0):
    """Micro-batches of ids and targets; from each another number of targets is left out."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, CLASSES, (m, BATCH, LENGTH), generator=generator)
    targets = torch.randint(0, CLASSES, (m, BATCH, LENGTH), generator=generator)
    for k in range(m):
        targets[k].view(-1)[: k % 5] = -100
    return list(ids), list(targets)


def whole_model(stages, tied=False):
    model = nn.Sequential(*(Stage(number, stages, tied) for number in range(stages)))
    if tied and stages > 1:
        model[-1].table = model[0].table
    return model


def one_process(stages, m, tied=False):
    """Loss and gradients of the plain model over the whole batch."""
    model = whole_model(stages, tied)
    ids, targets = map(torch.cat, batch(m))
    loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return loss.item(), gradients


def _run(channels, schedule, tied=False):
    rank, stages = dist.get_rank(), schedule.stages
    mine = [Stage(schedule.stage(rank, chunk), stages, tied) for chunk in range(schedule.chunks)]
    ends = {0: mine[0].table, dist.get_world_size() - 1: mine[-1].table}
    if tied and rank > 0 and rank in ends:
        ends[rank].data.zero_()  # Pipeline has to fetch the first stage's
    table = ends.get(rank) if tied else None
    pipeline = Pipeline(mine, schedule, shape=SHAPE, dtype=DTYPE, loss_sum=loss_sum, tied=table, channels=channels)
    ids, targets = batch(schedule.micro_batches)
    first, last = rank == 0, rank == dist.get_world_size() - 1
    with record() as section:
        loss = pipeline.step(ids if first else None, targets if last else None)
    peaks = [pipeline.peak_live]
    gradients = [{name: p.grad.clone() for name, p in stage.named_parameters()} for stage in mine]
    with record() as forward:
        evaluated = pipeline.evaluate(ids if first else None, targets if last else None)
    peaks.append(pipeline.peak_live)
    pipeline.step(ids if first else None, targets if last else None)  # without zero_grad: gradients add up
    twice = [{name: p.grad for name, p in stage.named_parameters()} for stage in mine]
    return {
        "loss": loss, "evaluated": evaluated, "gradients": gradients, "twice": twice,
        "peaks": peaks, "sent": section.totals(rank), "forward": forward.totals(rank),
        "sends": [(call.start, call.end) for call in section if call.kind == "send"],
    }  # fmt: skip


def _through_new_channels(number):
    found = []
    for _ in range(number):
        channels = Channels()
        rank, p = channels.rank, channels.world_size
        received = torch.empty(1)
        works = [channels.send(torch.tensor([float(rank)]), (rank + 1) % p), channels.receive(received, (rank - 1) % p)]
        for work in works:
            work.wait()
        found.append((received.item(), channels.ends is not None and dist.get_process_group_ranks(channels.ends)))
    return found


def _run_all(cases):
    channels = Channels()
    return [_run(channels, *case) for case in cases], _through_new_channels(3)


def cases(p):
    tied = [(schedule, True) for schedule in (one_f_one_b(p, 5), zero_bubble(p, 4), interleaved(p, 2 * p, 2))]
    return [(schedule,) for schedule in schedules(p)] + tied


@pytest.fixture(scope="module", params=[2, 4])
def ran(request):
    """The number of ranks, what they found in each case, and what else they found."""
    p = request.param
    results, others = zip(*launch(_run_all, p, args=(cases(p),), timeout=200), strict=True)
    return p, list(zip(*results, strict=True)), others


def test_loss_and_gradients_equal_one_process(ran):
    p, results, _ = ran
    for (schedule, *tied), ranks in zip(cases(p), results, strict=True):
        loss, gradients = one_process(schedule.stages, schedule.micro_batches, *tied)
        assert [result["loss"] for result in ranks[:-1]] == [None] * (p - 1), schedule.name
        assert [result["evaluated"] for result in ranks[:-1]] == [None] * (p - 1)
        assert ranks[-1]["loss"].item() == pytest.approx(loss, abs=1e-10), schedule.name
        assert ranks[-1]["evaluated"].item() == pytest.approx(loss, abs=1e-10), schedule.name
        seen = set()
        for rank, result in enumerate(ranks):
            for chunk, mine in enumerate(result["gradients"]):
                for name, gradient in mine.items():
                    stage = 0 if name == "table" else schedule.stage(rank, chunk)
                    assert_close(gradient, gradients[f"{stage}.{name}"])
                    assert_close(result["twice"][chunk][name], 2 * gradients[f"{stage}.{name}"])
                    seen.add(f"{stage}.{name}")
        assert seen == gradients.keys(), schedule.name


def test_no_more_micro_batches_are_kept_than_was_computed_from_the_schedule(ran):
    for (schedule, *_), ranks in zip(cases(ran[0]), ran[1], strict=True):
        for rank, result in enumerate(ranks):
            assert result["peaks"] == [peak_live(schedule)[rank], 0], (schedule.name, rank)


def test_the_messages_are_those_computed_from_the_schedule(ran):
    for (schedule, *tied), ranks in zip(cases(ran[0]), ran[1], strict=True):
        if tied:  # and one all-reduce of the table on the two ranks that have it
            at_the_ends = (1, 8 * CLASSES * HIDDEN)
            sums = [result["sent"].pop("all_reduce", None) for result in ranks]
            assert sums == [at_the_ends, *[None] * (len(ranks) - 2), at_the_ends]
        expected, forward = traffic(schedule, MESSAGE), traffic(forward_only(schedule), MESSAGE)
        for rank, result in enumerate(ranks):
            assert result["sent"].get("send") == expected[rank], (schedule.name, rank)
            assert set(result["sent"]) == {"send", "recv"}
            assert result["forward"].get("send", (0, 0)) == forward[rank], (schedule.name, rank)


def test_every_send_is_waited_for_and_not_only_at_the_end(ran):
    p, results, _ = ran
    for (schedule, *_), ranks in zip(cases(p), results, strict=True):
        for rank, result in enumerate(ranks):
            assert all(end is not None for _, end in result["sends"]), (schedule.name, rank)
        if schedule == one_f_one_b(p, 6):
            begins, ends = zip(*ranks[0]["sends"], strict=True)
            assert ends[0] < begins[5]  # the gradient of micro-batch 0 has proved that its activation arrived


def test_a_process_may_make_channels_again_and_again(ran):
    p, _, through_channels = ran
    for rank, found in enumerate(through_channels):
        assert found == [((rank - 1) % p, [0, p - 1] if rank in (0, p - 1) else False)] * 3


# One rank, and what is refused


def test_one_rank_hands_over_to_itself():
    for schedule in (gpipe(1, 3), interleaved(1, 3, 2), zero_bubble(1, 2)):
        model = whole_model(schedule.stages)
        pipeline = Pipeline(list(model), schedule, shape=SHAPE, dtype=DTYPE, loss_sum=loss_sum)
        loss, gradients = one_process(schedule.stages, schedule.micro_batches)
        assert pipeline.step(*batch(schedule.micro_batches)).item() == pytest.approx(loss, abs=1e-10)
        for name, parameter in model.named_parameters():
            assert_close(parameter.grad, gradients[name])
        assert [pipeline.peak_live] == peak_live(schedule)


def test_what_does_not_fit_is_refused():
    model, (ids, targets) = list(whole_model(2)), batch(3)
    without_backward = dataclasses.replace(gpipe(1, 1), actions=((Action("F", 0),),))

    def one_rank(schedule, stages, shape=SHAPE):
        return Pipeline(stages, schedule, shape=shape, dtype=DTYPE, loss_sum=loss_sum)

    pipeline, other_shape = (one_rank(interleaved(1, 3, 2), model, shape) for shape in (SHAPE, (2, 3, 7)))
    assert_refuses(
        (lambda: one_rank(gpipe(2, 1), model), "2 ranks", "1 stages", "1 ranks", "rank 0", "2 stages"),
        (lambda: one_rank(without_backward, model[:1]), "rank 0", " F ", "micro-batch 0", "chunk 0"),
        (lambda: pipeline.step(ids, targets[:2]), "rank 0", "2 micro-batches", "targets", " 3"),
        (lambda: other_shape.step(ids, targets), "chunk 0", "rank 0", "[2, 3, 6] torch.float64", "[2, 3, 7]"),
    )


class Deaf(nn.Module):
    """Gives the same, whatever goes in."""

    def __init__(self):
        super().__init__()
        self.says = nn.Parameter(random((HIDDEN,), "says"))

    def forward(self, x):
        return self.says.expand(x.shape)


def test_a_stage_that_does_not_use_its_input_gives_a_gradient_of_zeros():
    listens, deaf = nn.Linear(HIDDEN, HIDDEN, dtype=DTYPE), Deaf()
    pipeline = Pipeline([listens, deaf], interleaved(1, 2, 2), shape=SHAPE, dtype=DTYPE, loss_sum=lambda y, _: y.sum())
    micro_batches = [random(SHAPE, k) for k in range(2)]
    pipeline.step(micro_batches, micro_batches)
    assert deaf.says.grad.any()
    assert [parameter.grad.any().item() for parameter in listens.parameters()] == [False, False]
