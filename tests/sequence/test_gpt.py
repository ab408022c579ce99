"""Layers and a GPT with the sequence cut over ranks: `tplab.sequence.gpt`, against plain models on one process.

The layer is compared with `tplab.plain.Layer`, and the GPT with Hugging Face's, as in test_transformer and test_model,
whose tables say which shard of each gradient a rank should hold. Here each rank gets only its own tokens.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from tests.gpt import test_model as gpt
from tests.gpt.test_transformer import BATCH, HIDDEN, cuts, make, run_layer, run_plain
from tests.reference import assert_close, cut
from tests.tensor.on_ranks import GROUPS, assert_refused, assert_shards, own_group, refusals, traffic
from tplab import launch, record
from tplab.gpt.model import ParallelGPT
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
from tplab.tensor.mlp import ParallelMLP
from tplab.tensor.region import TENSOR_PARALLEL
from tplab.tensor.rng import seed_all

SEQUENCE, MEMORY, STEPS = 8, 4, 4
SIZE = BATCH * SEQUENCE * HIDDEN * 8  # bytes of [b, s, h] in float64
RING = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}  # times (p-1)/p of its bytes, sent by each rank

# The layer

LAYER_OPTIONS = ({}, {"gather_again": True}, {"async_grad_allreduce": True})
LAYER_CASES = [(kind, options) for kind in ("encoder", "causal", "decoder") for options in LAYER_OPTIONS]


def layer_run(kind, options, group=None):
    rank, p = dist.get_rank(group), dist.get_world_size(group)
    options = dict(options)
    region = GATHER_AGAIN if options.pop("gather_again", False) else SEQUENCE_PARALLEL
    layer = make(kind, group, region=region, **options)
    result, sent = run_layer(layer, kind, SEQUENCE, MEMORY, part=lambda whole: cut(whole, 1, rank, p))
    with record() as summing:
        allreduce_sequence_parallel_gradients(layer, group)
    return {
        "before": result,
        "after": result | {f"d{name}": parameter.grad for name, parameter in layer.named_parameters()},
        "traffic": [*sent, *traffic(summing)],
        "marked": {name for name, parameter in layer.named_parameters() if hasattr(parameter, "sequence_parallel")},
    }


def _layer_runs():
    return [layer_run(*case) for case in LAYER_CASES]


@pytest.fixture(scope="module")
def layers():
    return launch(_layer_runs, 4, timeout=200)


def assert_layer_equals_plain(kind, results):
    along_the_sequence = dict.fromkeys(("out", "dx", "dmemory"), (1, 1))
    expected = run_plain(kind, SEQUENCE, MEMORY)
    assert_shards([result["after"] for result in results], expected, cuts(kind) | along_the_sequence)


def test_a_layer_equals_the_plain_one_in_output_and_every_gradient(layers):
    for case, (kind, _) in enumerate(LAYER_CASES):
        assert_layer_equals_plain(kind, [result[case] for result in layers])


def small(name):
    """Whether every rank holds all of a parameter."""
    return "norm" in name or name.endswith(("out.bias", "down.bias"))


def test_without_the_all_reduce_the_gradients_of_what_is_not_cut_are_summands(layers):
    for case in range(0, len(LAYER_CASES), len(LAYER_OPTIONS)):
        kind = LAYER_CASES[case][0]
        gradients, names = run_plain(kind, SEQUENCE, MEMORY), set(filter(small, cuts(kind)))
        for name in names:
            summands, gradient = [result[case]["before"][f"d{name}"] for result in layers], gradients[f"d{name}"]
            assert_close(sum(summands), gradient)
            assert not any(torch.allclose(summand, gradient, rtol=0.01) for summand in summands)
        assert all(result[case]["marked"] == names for result in layers)


def test_what_a_layer_sends(layers):
    gather, scatter = ("all_gather", None, SIZE), ("reduce_scatter", "sum", SIZE)
    small_bytes = 8 * 6 * HIDDEN  # two norms, two biases
    for result in layers:
        for case, (kind, options) in enumerate(LAYER_CASES):
            if kind != "causal":
                continue
            forward, backward, summing = result[case]["traffic"]
            one_block = [gather, gather, scatter] if options.get("gather_again") else [gather, scatter]
            assert forward == [gather, scatter] * 2
            assert backward == one_block * 2
            assert summing == [("all_reduce", "sum", small_bytes)]


def _masks():
    """Where dropout behind a block, and behind the embedding, left something on this rank."""
    rng = seed_all(1)
    layer = make("causal", hidden_dropout=0.5, region=SEQUENCE_PARALLEL)
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
    sizes = {"num_layers": 2, "hidden_size": HIDDEN, "num_heads": 4, "vocab_size": gpt.VOCAB, "seq_length": SEQUENCE}
    return GPTConfig(**(sizes | options))


# What autograd keeps


def one_byte_dropout(x, p=0.5, training=True):
    """F.dropout as on a GPU, with a mask of one byte an element; on a CPU it keeps one of the dtype of x."""
    return torch.native_dropout(x, p, True)[0] if training and p else x


def _kept_bytes(config, recompute):
    """Bytes that autograd keeps of a layer on a rank: as in chapter 10; cut, gathering once; cut, gathering again."""
    dropped = {"hidden_dropout": config.dropout, "attention_dropout": 0.0 if config.flash_attention else config.dropout}
    p, kept = dist.get_world_size(), []
    for region in (TENSOR_PARALLEL, SEQUENCE_PARALLEL, GATHER_AGAIN):
        layer = ParallelTransformerLayer(
            config.hidden_size, config.num_heads, **dropped, recompute_attention=recompute, region=region,
            dtype=torch.bfloat16,
        )  # fmt: skip
        tokens_ = config.seq_length // (p if region.sequence_parallel else 1)
        x = torch.ones(BATCH, tokens_, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        with saved_for_backward(layer) as pieces:
            layer(x)
        kept.append(sum(size for shape, _, size in pieces.pieces if shape != (BATCH, tokens_, 1)))  # norms: 2 a token
    return kept


def _a_layer_keeps_what_the_formula_says():
    """The scores either as FlashAttention leaves them, or with dropout, computed again in backward."""
    torch.nn.functional.dropout, p = one_byte_dropout, dist.get_world_size()
    for again, recompute in ((False, "nothing"), (True, "attention")):
        config = small_config(hidden_size=64, seq_length=32, num_heads=8, dropout=0.1, flash_attention=not again)
        whole = sum(layer_activations(config, BATCH, p, recompute=recompute).values())
        cut_ = sum(layer_activations(config, BATCH, p, sequence_parallel=True, recompute=recompute).values())
        inputs = 2 * 2 * BATCH * config.seq_length * config.hidden_size  # of two blocks, in 16 bits
        assert _kept_bytes(config, again) == [whole, cut_ + inputs - inputs // p, cut_]


@pytest.mark.parametrize("p", [1, 4])
def test_a_layer_keeps_what_the_formula_says(p):
    launch(_a_layer_keeps_what_the_formula_says, p, timeout=120)


# The GPT

GPT_CASES = [
    ("gpt2", {}),
    ("gpt2", {"gather_again": True, "recompute": "layers"}),
    ("llama", {"async_grad_allreduce": True}),
    ("llama 1 kv", {"recompute": "attention"}),
]


def tokens(step=0):
    generator = torch.Generator().manual_seed(step)
    ids, targets = (torch.randint(0, gpt.VOCAB, (BATCH, SEQUENCE), generator=generator) for _ in range(2))
    targets[0, :3] = -100  # the tokens that count are not spread evenly over the ranks
    return ids, targets


BATCHES = [tokens(step) for step in range(STEPS)]


def gpt_run(options, source, group=None, model_class=SequenceParallelGPT):
    state, config, _, dtype = source
    model = gpt.make(state, config, dtype, group, model_class, **options)
    with torch.no_grad():
        logits = model(BATCHES[0][0], gather=True)
    result = gpt.steps(model, model, BATCHES, lambda: allreduce_sequence_parallel_gradients(model, group))
    with record() as section:
        model(*BATCHES[0]).backward()
    return result | {"logits": logits, "ring": sum(RING[call.kind] * call.bytes for call in section)}


def _gpt_runs(cases):
    sequence_parallel = [gpt_run(*case) for case in cases]
    return sequence_parallel, gpt_run({}, cases[0][1], model_class=ParallelGPT)["ring"]


def assert_gpt_equals_plain(kind, results):
    plain, p = gpt.plain_steps(kind, 0, torch.float64, BATCHES), len(results)
    for rank, result in enumerate(results):
        assert_close(result["logits"], plain["logits"], 1e-9)
        assert result["losses"] == pytest.approx(plain["losses"], rel=1e-9)
        for what, tolerance in (("gradients", 1e-9), ("weights", 1e-6)):  # Adam divides by a gradient's size
            for name, tensor in result[what].items():
                assert_close(tensor, gpt.part(kind, name, plain[what], rank, p), tolerance)


def test_a_gpt_equals_hugging_faces_in_logits_gradients_and_steps_and_sends_the_same():
    sources = [(options, gpt.given(kind, 0, torch.float64)) for kind, options in GPT_CASES]
    results = launch(_gpt_runs, 4, args=(sources,), timeout=250)
    for case, (kind, _) in enumerate(GPT_CASES):
        assert_gpt_equals_plain(kind, [result[case] for result, _ in results])
    assert all(result[0]["ring"] == plain_ring > 0 for result, plain_ring in results)


def _in_groups(source):
    group = own_group()
    return layer_run("decoder", {"gather_again": True}, group), gpt_run({"gather_again": True}, source, group)


def test_two_groups_side_by_side_do_not_mix():
    results = launch(_in_groups, 4, args=(gpt.given("gpt2", 0, torch.float64),), timeout=250)
    for members in GROUPS:
        assert_layer_equals_plain("decoder", [results[rank][0] for rank in members])
        assert_gpt_equals_plain("gpt2", [results[rank][1] for rank in members])


# On two ranks


def _with_dropout():
    """What is run again drops the same places: with nothing, some and all of a layer, the gradients are the same."""
    gradients = []
    for recompute in ("nothing", "attention", "layers"):
        rng = seed_all(3)
        model = SequenceParallelGPT(small_config(dropout=0.3), recompute=recompute, dtype=torch.float64)
        model(*tokens(), rng=rng).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for once, *again in zip(*gradients, strict=True):
        for twice in again:
            assert_close(twice, once)


def _marks():
    """New parameters of a copy are found, and a block alone can be sequence-parallel."""
    model = SequenceParallelGPT(small_config(dropout=0.0))
    twin = copy.deepcopy(model).to_empty(device="cpu")
    twin.load_state_dict(model.state_dict(), assign=True)
    for each in (model, twin):  # of two layers, the final norm, the positions
        assert len(sequence_parallel_parameters(each)) == 2 * 6 + 2 + 1
    mlp = ParallelMLP(HIDDEN, region=GATHER_AGAIN)
    assert [list(m.shape) for m in sequence_parallel_parameters(mlp)] == [[HIDDEN]]
    assert mlp(torch.ones(2, 3, HIDDEN)).shape == (2, 3, HIDDEN)


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
    _with_dropout()
    _marks()
    return _masks(), _loss_of_logits(), _refused()


def test_every_rank_drops_other_places_of_its_tokens_and_padding_of_the_vocabulary_does_not_count():
    masks, padding, refused = zip(*launch(_on_two_ranks, 2, timeout=120), strict=True)
    for one, other in zip(*masks, strict=True):
        assert one.shape == (BATCH, SEQUENCE // 2, HIDDEN)
        for mask in (one, other):
            assert 0.3 < mask.double().mean() < 0.7
        assert 0.3 < (one == other).double().mean() < 0.7
    assert sum(padding) == BATCH * SEQUENCE * (256 - gpt.VOCAB)
    assert_refused(refused, "sequence length s=9 can't be divided over 2 ranks", "generate with a ParallelGPT")
