"""Layers and a GPT with the sequence split over ranks: `tplab.sequence.gpt`, against plain models on one process.

The models and the layers are those of tests/gpt. Here each rank gets only its own tokens.
"""

import copy

import torch
import torch.distributed as dist
from torch.nn import functional as F

from tests.gpt.twins import (
    BATCH,
    GPT2,
    HIDDEN,
    KINDS,
    LLAMA,
    ONE_KV_HEAD,
    VOCAB,
    gpt_batches,
    ids_and_targets,
    layer_batches,
    parallel_gpt,
    parallel_layer,
    plain_gpt,
    plain_layer,
)
from tests.memory.test_memory import as_on_a_gpu
from tests.reference import assert_close, random
from tests.tensor.on_ranks import assert_refused, assert_trains_like, own_group, refusals, traffic
from tplab import launch, record
from tplab.collectives.by_hand import rank_and_size
from tplab.gpt.transformer import ParallelTransformerLayer
from tplab.memory.config import GPTConfig
from tplab.memory.memory_bill import layer_activations
from tplab.memory.meter import saved_for_backward
from tplab.sequence.gpt import (
    SequenceParallelGPT,
    allreduce_sequence_parallel_gradients,
    sequence_parallel_parameters,
)
from tplab.sequence.linear import GATHER_AGAIN, SEQUENCE_PARALLEL
from tplab.tensor.cross_entropy import vocab_parallel_cross_entropy
from tplab.tensor.region import TENSOR_PARALLEL
from tplab.tensor.rng import seed_all

SEQUENCE, MEMORY = 8, 4
SIZE = BATCH * SEQUENCE * HIDDEN * 8  # bytes of [b, s, h] in float64
ALONG_THE_SEQUENCE = dict.fromkeys(("x", "memory", "out"), (1, 1))


# The layer


def _train_layers(group=None):
    """With the all-reduce after backward, all gradients are those of plain layers."""
    gather, scatter = ("all_gather", None, SIZE), ("reduce_scatter", "sum", SIZE)
    for region, overlap in ((SEQUENCE_PARALLEL, False), (GATHER_AGAIN, False), (SEQUENCE_PARALLEL, True)):
        for kind in KINDS:
            layer = parallel_layer(kind, group, region=region, async_grad_allreduce=overlap)
            steps = layer_batches(kind, SEQUENCE, MEMORY)
            sent = assert_trains_like(
                plain_layer(kind), layer, steps, group, cuts=ALONG_THE_SEQUENCE, lr=0.1,
                after_backward=lambda model: allreduce_sequence_parallel_gradients(model, group),
            )  # fmt: skip
            if kind == "causal":
                of_a_block = [gather, gather, scatter] if region is GATHER_AGAIN else [gather, scatter]
                assert sent == [[gather, scatter] * 2, of_a_block * 2]


def _all_gradients_are_summed_at_once():
    layer = parallel_layer("causal", region=SEQUENCE_PARALLEL)
    layer(random((BATCH, SEQUENCE // dist.get_world_size(), HIDDEN), "x")).sum().backward()
    with record() as summing:
        allreduce_sequence_parallel_gradients(layer)
    assert traffic(summing) == [[("all_reduce", "sum", 8 * 6 * HIDDEN)]]  # two norms, two biases


def _masks():
    """Where dropout behind a block, and behind the embedding, left something on this rank."""
    rng = seed_all(1)
    layer = parallel_layer("causal", hidden_dropout=0.5, region=SEQUENCE_PARALLEL)
    model = SequenceParallelGPT(small_config(dropout=0.5))
    with torch.no_grad():
        for parameter in [*layer.parameters(), *model.parameters()]:
            parameter.zero_()
        layer.mlp.down.bias.fill_(1)
        model.positions.weight.copy_(torch.arange(HIDDEN) + 1)
        model.final_norm.weight.fill_(1)
    p = dist.get_world_size()
    behind_block = layer(torch.zeros(BATCH, SEQUENCE // p, HIDDEN, dtype=torch.float64), rng=rng)
    behind_embedding = model.features(torch.zeros(BATCH, SEQUENCE, dtype=torch.long), rng=rng)
    smallest = behind_embedding.amin(-1, keepdim=True)  # what was dropped is 0, less than all else
    return behind_block != 0, behind_embedding != smallest


def small_config(**options):
    sizes = {"num_layers": 2, "hidden_size": HIDDEN, "num_heads": 4, "vocab_size": VOCAB, "seq_length": SEQUENCE}
    return GPTConfig(**(sizes | options))


# What autograd keeps


def _a_layer_keeps_what_the_formula_says():
    """With attention that keeps no scores: as in chapter 10; cut, gathering once; cut, gathering again."""
    p, kept = rank_and_size()[1], []
    config = small_config(hidden_size=64, seq_length=32, num_heads=8, dropout=0.1, flash_attention=True)
    for region in (TENSOR_PARALLEL, SEQUENCE_PARALLEL, GATHER_AGAIN):
        layer = ParallelTransformerLayer(64, 8, hidden_dropout=0.1, region=region, dtype=torch.bfloat16)
        tokens_here = 32 // (p if region.sequence_parallel else 1)
        with as_on_a_gpu(), saved_for_backward(layer) as pieces:
            layer(torch.ones(BATCH, tokens_here, 64, dtype=torch.bfloat16, requires_grad=True))
        norms = BATCH, tokens_here, 1  # 2 numbers a token
        kept.append(sum(size for shape, _, size in pieces.pieces if shape != norms))
    whole, cut = (
        sum(layer_activations(config, BATCH, p, sequence_parallel=sequence_parallel).values())
        for sequence_parallel in (False, True)
    )
    inputs = 2 * 2 * BATCH * 32 * 64  # of two blocks, in 16 bits
    assert kept == [whole, cut + inputs - inputs // p, cut]


# The GPT

GPT_CASES = [
    (GPT2, {}),
    (GPT2, {"gather_again": True, "recompute": "layers"}),
    (LLAMA, {"async_grad_allreduce": True}),
    (ONE_KV_HEAD, {"recompute": "attention"}),
]


def tokens():
    return ids_and_targets(SEQUENCE)


def _train_gpts(cases, group=None):
    for config, options in cases:
        twin, model = plain_gpt(config), parallel_gpt(config, group, SequenceParallelGPT, **options)
        assert_trains_like(
            twin, model, gpt_batches(SEQUENCE), group, lr=0.05, momentum=0.9,
            after_backward=lambda model: allreduce_sequence_parallel_gradients(model, group),
        )  # fmt: skip
        ids, _ = tokens()
        assert_close(model(ids, gather=True).detach(), twin(ids).detach())


def _on_four_ranks():
    _train_layers()
    _train_gpts(GPT_CASES)
    _all_gradients_are_summed_at_once()
    group = own_group()
    _train_layers(group)
    _train_gpts(GPT_CASES[1:2], group)
    _a_layer_keeps_what_the_formula_says()


def test_layers_and_gpts_are_plain_ones_in_outputs_gradients_and_steps_also_in_two_groups_side_by_side():
    launch(_on_four_ranks, 4, timeout=250)


# On two ranks


def _marks():
    """New parameters of a copy are found."""
    model = SequenceParallelGPT(small_config(dropout=0.0))
    twin = copy.deepcopy(model).to_empty(device="cpu")
    twin.load_state_dict(model.state_dict(), assign=True)
    for each in (model, twin):  # of two layers, the final norm, the positions
        assert len(sequence_parallel_parameters(each)) == 2 * 6 + 2 + 1


def _loss_of_logits():
    """Padding of the vocabulary doesn't count in the loss of its logits. Return how much of it this rank has."""
    model = SequenceParallelGPT(small_config(dropout=0.0), dtype=torch.float64)
    ids, targets = tokens()
    logits = model(ids)
    plain = F.cross_entropy(model(ids, gather=True).flatten(0, 1), targets.flatten()).detach()
    assert_close(model(ids, targets).detach(), plain)
    assert_close(vocab_parallel_cross_entropy(logits, targets).detach(), plain)
    return int(logits.isneginf().sum())


def _refused():
    model = SequenceParallelGPT(small_config(seq_length=12))
    return refusals(
        lambda: model.features(torch.zeros(2, 9, dtype=torch.long)),
        lambda: model.features(tokens()[0], cache=model.new_cache(2, 8)),
    )


def _on_two_ranks():
    _marks()
    return _masks(), _loss_of_logits(), _refused()


def test_every_rank_drops_other_places_of_its_tokens_and_padding_of_the_vocabulary_does_not_count():
    masks, padding, refused = zip(*launch(_on_two_ranks, 2, timeout=120), strict=True)
    for one, other in zip(*masks, strict=True):
        assert one.shape == (BATCH, SEQUENCE // 2, HIDDEN)
        for mask in (one, other):
            assert 0.3 < mask.double().mean() < 0.7
        assert 0.3 < (one == other).double().mean() < 0.7
    assert sum(padding) == BATCH * SEQUENCE * (256 - VOCAB)
    assert_refused(refused, ("s=9", "2 ranks"), ("cache", "ParallelGPT"))
