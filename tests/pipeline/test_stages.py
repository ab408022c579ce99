"""Pipeline with a GPT in stages, tensor parallelism inside each, and beside torch's own executor.

The reference of the GPT is ParallelGPT on one process, which other tests hold to Hugging Face's.
"""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tests.reference import assert_close, random
from tplab import launch
from tplab.gpt.model import ParallelGPT
from tplab.memory.config import GPTConfig
from tplab.pipeline.executor import Pipeline
from tplab.pipeline.p2p import Channels
from tplab.pipeline.schedules import gpipe, interleaved, one_f_one_b, zero_bubble
from tplab.pipeline.stages import gpt_stages
from tplab.sequence.gpt import SequenceParallelGPT
from tplab.tensor.rng import seed_all

HIDDEN, BATCH, LENGTH = 6, 2, 3
SHAPE, DTYPE = (BATCH, LENGTH, HIDDEN), torch.float64


# A GPT in stages, with tensor parallelism inside each


GPT = GPTConfig(num_layers=4, hidden_size=8, num_heads=2, vocab_size=37, seq_length=6, dropout=0.0)
UNTIED = dataclasses.replace(GPT, tied_embedding=False, learned_positions=False, bias=False, gated=True)
GPT_CASES = [
    (GPT, one_f_one_b(2, 3), {}),
    (GPT, zero_bubble(2, 3), {"async_grad_allreduce": True}),
    (GPT, interleaved(2, 2, 2), {"recompute": "layers"}),
    (UNTIED, zero_bubble(2, 2), {}),
]


def gpt_batch(m):
    generator = torch.Generator().manual_seed(3)
    ids, targets = torch.randint(0, GPT.vocab_size, (2, m, 2, 5), generator=generator)
    targets[0, 0, :3] = -100
    return list(ids), list(targets)


def _gpt(tp, channels, config, schedule, options):
    seed_all(5)
    model = ParallelGPT(config, dtype=DTYPE, group=tp, **options)
    stages = gpt_stages(model, schedule.stages)
    rank = channels.rank
    mine = [stages[schedule.stage(rank, chunk)] for chunk in range(schedule.chunks)]
    tied = mine[0].tied if rank == 0 else mine[-1].tied
    options = {"shape": (2, 5, config.hidden_size), "dtype": DTYPE, "tied": tied, "channels": channels}
    pipeline = Pipeline(mine, schedule, loss_sum=mine[-1].loss_sum, **options)
    ids, targets = gpt_batch(schedule.micro_batches)
    loss = pipeline.step(ids, targets)
    parameters = [named for stage in mine for named in stage.named_parameters()]
    return loss, {name: (p.grad, getattr(p, "tensor_parallel", None)) for name, p in parameters}


def _gpts():
    rank = dist.get_rank()
    tp = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    pp = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    channels = Channels(pp)
    return [_gpt(tp, channels, *case) for case in GPT_CASES]


def whole_gpt(config, m):
    seed_all(5)
    model = ParallelGPT(config, dtype=DTYPE)
    ids, targets = map(torch.cat, gpt_batch(m))
    loss = model(ids, targets)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name in gradients.keys() & {"embedding.weight", "head.weight"}:
        gradients[name] = gradients[name][: config.vocab_size]  # without the padding
    return loss.item(), gradients


def test_a_gpt_in_two_stages_of_two_ranks_each_equals_the_whole_one():
    results = launch(_gpts, 4, timeout=200)
    for number, (config, schedule, _) in enumerate(GPT_CASES):
        loss, whole = whole_gpt(config, schedule.micro_batches)
        seen = set()
        for rank, result in enumerate(results):
            mine, gradients = result[number]
            assert (mine is None) if rank < 2 else (mine.item() == pytest.approx(loss, abs=1e-10))
            for name, (gradient, sharding) in gradients.items():
                expected = whole[name] if sharding is None else sharding.shard(whole[name], rank % 2, 2)
                assert_close(gradient, expected)
                seen.add(name)
        assert seen == whole.keys()


def test_the_last_stage_has_a_copy_of_a_tied_table_and_no_other_stage_has_one():
    first, middle, last = gpt_stages(ParallelGPT(dataclasses.replace(GPT, num_layers=3)), 3)
    assert torch.equal(first.tied, last.tied)
    assert first.tied.data_ptr() != last.tied.data_ptr()
    assert middle.tied is None
    (alone,) = gpt_stages(ParallelGPT(GPT), 1)
    assert alone.tied is None


@pytest.mark.parametrize(
    ("dropout", "options"),
    [
        (0.3, {"dtype": DTYPE}),
        (0.3, {"dtype": DTYPE, "recompute": "layers"}),  # it is drawn again
        (0.0, {"dtype": torch.bfloat16, "float32_residual": True}),
    ],
)
def test_stages_one_after_the_other_are_the_whole_model(dropout, options):
    model = ParallelGPT(dataclasses.replace(GPT, dropout=dropout), **options)
    ids = torch.cat(gpt_batch(2)[0])
    whole = model(ids, rng=seed_all(7))
    x = ids
    for stage in gpt_stages(model, 2, rng=seed_all(7)):
        x = stage(x)
    assert torch.equal(x, whole)


def _with_sequence_parallelism():
    """Loss and gradients of a sequence-parallel GPT, and of its stages, which exchange only this rank's tokens."""
    found = []
    ids, target = torch.randint(0, GPT.vocab_size, (2, 2, 6), generator=torch.Generator().manual_seed(3))
    for cuts in ([4], [3, 1]):
        seed_all(5)
        model = SequenceParallelGPT(dataclasses.replace(GPT, dropout=0.3), dtype=DTYPE)
        stages, x, shapes = gpt_stages(model, cuts, rng=seed_all(7)), ids, []
        for stage in stages:
            x = stage(x)
            shapes.append(list(x.shape))
        loss = stages[-1].loss_sum(x, target) / target.numel()
        loss.backward()
        named: dict = {}
        for stage in stages:
            for name, parameter in stage.named_parameters():
                named[name] = named.get(name, 0) + parameter.grad
        found.append((loss.detach(), named, shapes))
    seed_all(5)
    model = SequenceParallelGPT(dataclasses.replace(GPT, dropout=0.3), dtype=DTYPE)
    loss = model(ids, target, rng=seed_all(7))
    loss.backward()
    return found, (loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()})


def test_stages_of_a_sequence_parallel_model_drop_and_compute_the_same_as_all_of_it():
    for of_stages, (loss, gradients) in launch(_with_sequence_parallelism, 2, timeout=120):
        for own_loss, own_gradients, _ in of_stages:
            assert_close(own_loss, loss)
            assert own_gradients.keys() == gradients.keys()
            for name, gradient in gradients.items():
                assert_close(own_gradients[name], gradient)
        assert of_stages[1][2] == [[2, 3, 8], [2, 6, 128]]


def test_layers_that_cannot_be_divided_are_refused():
    model = ParallelGPT(GPT)
    with pytest.raises(ValueError, match="4 layers can't be divided evenly over 3 stages: pass a list"):
        gpt_stages(model, 3)
    with pytest.raises(ValueError, match=r"stages of \[3, 2\] layers have 5 in all; the model has 4"):
        gpt_stages(model, [3, 2])
    with pytest.raises(ValueError, match="every stage needs one at least"):
        gpt_stages(model, [4, 0])
    with pytest.raises(ValueError, match="7 tokens are more than seq_length=6"):
        gpt_stages(model, [1, 3])[0](torch.zeros(1, 7, dtype=torch.long))


# torch.distributed.pipelining, an executor that others wrote


def _block(number):
    block = nn.Sequential(nn.Linear(HIDDEN, HIDDEN, dtype=DTYPE), nn.Tanh())
    block[0].weight.data, block[0].bias.data = random((HIDDEN, HIDDEN), "w", number), random((HIDDEN,), "b", number)
    return block


def _theirs_and_ours():
    from torch.distributed import pipelining

    rank, p, m = dist.get_rank(), dist.get_world_size(), 4
    schedules = {
        pipelining.ScheduleGPipe: gpipe(p, m),
        pipelining.Schedule1F1B: one_f_one_b(p, m),
        pipelining.ScheduleInterleaved1F1B: interleaved(p, m, 2),
    }
    x, target = random((m * BATCH, LENGTH, HIDDEN), "x"), random((m * BATCH, LENGTH, HIDDEN), "target")
    found, channels = [], Channels()
    for theirs, schedule in schedules.items():
        numbers = [schedule.stage(rank, chunk) for chunk in range(schedule.chunks)]
        blocks = [_block(number) for number in numbers]
        stages = [
            pipelining.PipelineStage(block, number, schedule.stages, torch.device("cpu"))
            for block, number in zip(blocks, numbers, strict=True)
        ]
        runner = theirs(stages if schedule.chunks > 1 else stages[0], m, loss_fn=F.mse_loss)
        losses: list[torch.Tensor] = []
        runner.step(*([x] if rank == 0 else []), **({"target": target, "losses": losses} if rank == p - 1 else {}))
        gradients = [parameter.grad for block in blocks for parameter in block.parameters()]

        blocks = [_block(number) for number in numbers]
        pipeline = Pipeline(
            blocks, schedule, shape=SHAPE, dtype=DTYPE, count=torch.numel,
            loss_sum=lambda y, t: F.mse_loss(y, t, reduction="sum"), channels=channels,
        )  # fmt: skip
        loss = pipeline.step(x.chunk(m), target.chunk(m))
        own = [parameter.grad for block in blocks for parameter in block.parameters()]
        found.append((loss, sum(losses) / m if losses else None, gradients, own))
    return found


def test_torchs_own_schedules_give_the_same():
    for rank, results in enumerate(launch(_theirs_and_ours, 2, timeout=200)):
        for loss, their_loss, theirs, ours in results:
            if rank == 1:
                assert_close(loss, their_loss)
            for gradient, expected in zip(ours, theirs, strict=True):
                assert_close(gradient, expected)
