"""A GPT trained on a grid of ranks has the loss curve, the norms and the weights of one process.

The reference is ParallelGPT on one process, which other tests hold to Hugging Face's, with torch's own clipping.
"""

import pytest
import torch
import torch.distributed as dist

from tests.reference import assert_close
from tplab import launch
from tplab.cluster.three_dimensions import Training3D
from tplab.data.data_parallel import tokens_of_all
from tplab.data.grad_norm import clip, grad_norm_of_pieces
from tplab.data.grid import Grid, mesh
from tplab.data.zero3 import ZeRO3
from tplab.gpt.model import ParallelGPT
from tplab.memory.config import GPTConfig
from tplab.pipeline.executor import counted_tokens
from tplab.tensor.rng import seed_all

CONFIG = GPTConfig(
    num_layers=2, hidden_size=8, num_heads=2, num_kv_heads=1, vocab_size=37, seq_length=6, dropout=0.0
)  # fmt: skip
SEED, STEPS, BATCH, MAX_NORM = 7, 4, 8, 0.5
DTYPE = torch.float64
OPTIONS = {"lr": 0.02, "weight_decay": 0.1}


def batch(step):
    """Whole: [8, 6] ids and targets, some of which don't count, more of them in the first half."""
    generator = torch.Generator().manual_seed(step)
    ids, targets = torch.randint(0, CONFIG.vocab_size, (2, BATCH, 6), generator=generator)
    targets[:3, :4] = -100
    targets[5, 2] = -100
    return ids, targets


def _trained(grid, micro_batches, **options):
    size = BATCH // (grid.dp * micro_batches)
    training = Training3D(
        CONFIG, grid, torch.optim.AdamW, micro_batches=micro_batches, micro_batch_size=size, seed=SEED, dtype=DTYPE,
        **OPTIONS, **options,
    )  # fmt: skip
    losses, norms = [], []
    for step in range(STEPS):
        losses.append(training.step(*batch(step)))
        norms.append(None if training.norm is None else float(training.norm))
    weights = {
        name: (parameter.detach().clone(), getattr(parameter, "tensor_parallel", None))
        for name, parameter in training.stage.named_parameters()
    }
    return losses, norms, weights


def _with_zero_3():
    """ZeRO-3 over dp, tensor parallelism over tp, a unit for each layer and one for the rest."""
    m = mesh(dp=2, tp=2)
    dp, rank = m.get_group("dp"), m.get_local_rank("dp")
    seed_all(SEED)
    model = ParallelGPT(CONFIG, dtype=DTYPE, group=m.get_group("tp"))
    zero = ZeRO3(model, list(model.layers), torch.optim.AdamW, average=False, group=dp, **OPTIONS)
    losses, norms = [], []
    for step in range(STEPS):
        zero.zero_grad()
        ids, targets = (whole.chunk(2)[rank] for whole in batch(step))
        count = counted_tokens(targets)
        loss = model(ids, targets) * count / tokens_of_all(count, dp)  # its part of the mean over all tokens
        loss.backward()
        zero.finish()
        norms.append(grad_norm_of_pieces(zero.pieces(), m))
        clip([piece.values for piece in zero.pieces()], norms[-1], MAX_NORM)
        zero.step()
        dist.all_reduce(loss := loss.detach(), group=dp)
        losses.append(float(loss))
    with zero.gathered():
        weights = {
            name: (parameter.detach().clone(), getattr(parameter, "tensor_parallel", None))
            for name, parameter in model.named_parameters()
        }
    return losses, list(map(float, norms)), weights


def _refused():
    with pytest.raises(ValueError) as error:
        Training3D(CONFIG, Grid(2, 1, 2), torch.optim.SGD, micro_batches=2, micro_batch_size=1, lr=1.0).step(*batch(0))
    return str(error.value)


CASES_4 = [(Grid(2, 1, 2), 2, {"zero": True, "max_norm": MAX_NORM}), (Grid(2, 2, 1), 2, {"max_norm": None})]
CASES_8 = [
    (Grid(2, 2, 2), 2, {"max_norm": MAX_NORM}),
    (Grid(2, 2, 2), 4, {"max_norm": MAX_NORM, "zero": True}),
]


def _on_4():
    return [*(_trained(grid, m, **options) for grid, m, options in CASES_4), _with_zero_3()], _refused()


def _on_8():
    return [_trained(grid, m, **options) for grid, m, options in CASES_8], dist.get_world_size()


def one_process(max_norm):
    seed_all(SEED)
    model = ParallelGPT(CONFIG, dtype=DTYPE)
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(*batch(step))
        loss.backward()
        losses.append(loss.item())
        norms.append(max_norm and float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
    whole = {name: parameter.detach() for name, parameter in model.named_parameters()}
    whole["embedding.weight"] = whole["embedding.weight"][: CONFIG.vocab_size]  # without the padding
    return losses, norms, whole


def assert_same(results, cases):
    for number, (grid, _, options) in enumerate(cases):
        losses, norms, whole = one_process(options["max_norm"])
        assert losses[-1] < losses[0]
        seen = set()
        for rank, result in enumerate(results):
            found, found_norms, weights = result[0][number]
            assert found == pytest.approx(losses, abs=1e-10)
            assert found_norms == pytest.approx(norms, abs=1e-10)
            for name, (weight, sharding) in weights.items():
                name = "embedding.weight" if name == "output.weight" else name
                expected = whole[name]
                if sharding is not None:
                    expected = sharding.shard(expected, grid.place(rank).tp, grid.tp)
                assert_close(weight, expected, 1e-10)
                seen.add(name)
        assert seen == whole.keys()


def test_two_replicas_with_tensor_parallelism_and_zero_1_or_3_or_with_a_pipeline():
    results = launch(_on_4, 4, timeout=200)
    assert_same(results, [*CASES_4, (Grid(2, 1, 2), 1, {"max_norm": MAX_NORM})])
    assert "a batch of 8 sequences: dp=2 replicas of 2 micro-batches of 1 take 4" in results[0][1]


def test_all_three_dimensions_on_eight_ranks_train_like_one_process():
    results = launch(_on_8, 8, timeout=250)
    assert [world_size for _, world_size in results] == [8] * 8
    assert_same(results, CASES_8)
