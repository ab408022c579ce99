"""A GPT in stages, with tensor parallelism inside each: loss, gradients and text are those of the whole model.

The reference is ParallelGPT on one process, which other tests hold to Hugging Face's. One launch runs all programs, on
two stages of two ranks each.
"""

import dataclasses

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.gpt.random_models import NEW, VOCAB, given, hugging_face, prompt, their_text
from tests.gpt.random_models import make as make_gpt
from tests.reference import assert_close
from tplab import launch
from tplab.data.grid import mesh
from tplab.gpt.generation import generate
from tplab.gpt.model import ParallelGPT
from tplab.memory.config import GPTConfig
from tplab.pipeline.executor import Pipeline
from tplab.pipeline.generation import PipelinedGPT
from tplab.pipeline.p2p import Channels
from tplab.pipeline.schedules import interleaved, one_f_one_b, zero_bubble
from tplab.pipeline.stages import gpt_stages
from tplab.sequence.gpt import SequenceParallelGPT
from tplab.tensor.rng import seed_all

DTYPE = torch.float64
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


def _parts_of_a_sequence(tp):
    """Loss and gradients of a sequence-parallel GPT, and of its stages, which exchange only this rank's tokens."""
    found = []
    ids, target = torch.randint(0, GPT.vocab_size, (2, 2, 6), generator=torch.Generator().manual_seed(3))

    def made():
        seed_all(5, tp)
        return SequenceParallelGPT(dataclasses.replace(GPT, dropout=0.3), dtype=DTYPE, group=tp)

    for cuts in ([4], [3, 1]):
        stages, x, shapes = gpt_stages(made(), cuts, rng=seed_all(7, tp)), ids, []
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
    model = made()
    loss = model(ids, target, rng=seed_all(7, tp))
    loss.backward()
    return found, (loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()})


def drawn(model):
    generator = torch.Generator().manual_seed(5)
    return generate(model, prompt(), NEW, temperature=0.8, top_k=20, generator=generator)


def _texts(models, grid: DeviceMesh):
    found = {}
    for kind, model in models.items():
        stage = gpt_stages(make_gpt(*model, grid.get_group("tp")), 2)[grid.get_local_rank("pp")]
        writer = PipelinedGPT(stage, grid.get_group("pp"))
        found[kind] = generate(writer, prompt(), NEW), drawn(writer)
    return found


def _everything(models):
    grid = mesh(pp=2, tp=2)
    tp, channels = grid.get_group("tp"), Channels(grid.get_group("pp"))
    return [_gpt(tp, channels, *case) for case in GPT_CASES], _parts_of_a_sequence(tp), _texts(models, grid)


@pytest.fixture(scope="module")
def ranks():
    return launch(_everything, 4, args=({kind: given(kind) for kind in ("gpt2", "llama 3.1")},), timeout=250)


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


def test_a_gpt_in_two_stages_of_two_ranks_each_equals_the_whole_one(ranks):
    for number, (config, schedule, _) in enumerate(GPT_CASES):
        loss, whole = whole_gpt(config, schedule.micro_batches)
        seen = set()
        for rank, result in enumerate(ranks):
            mine, gradients = result[0][number]
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


def test_stages_of_a_sequence_parallel_model_drop_and_compute_the_same_as_all_of_it(ranks):
    for of_stages, (loss, gradients) in (result[1] for result in ranks):
        for own_loss, own_gradients, _ in of_stages:
            assert_close(own_loss, loss)
            assert own_gradients.keys() == gradients.keys()
            for name, gradient in gradients.items():
                assert_close(own_gradients[name], gradient)
        assert of_stages[1][2] == [[2, 3, 8], [2, 6, 128]]


@pytest.mark.parametrize("kind", ["gpt2", "llama 3.1"])
def test_stages_generate_the_text_of_the_whole_model(kind, ranks):
    greedy, alone = their_text(hugging_face(kind), prompt(), NEW), drawn(make_gpt(*given(kind)))
    assert not torch.equal(alone, greedy)
    assert int(alone.max()) < VOCAB
    for result in ranks:
        assert torch.equal(result[2][kind][0], greedy)
        assert torch.equal(result[2][kind][1], alone)


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
    with pytest.raises(ValueError, match="the next token of a text can't be split"):
        PipelinedGPT(gpt_stages(SequenceParallelGPT(GPT), 2)[0], None)
