"""ParallelTransformerLayer: `tplab.gpt.transformer`, against `tplab.plain.Layer` on one process.

tests/test_plain.py compares the plain layer with torch's own encoder and decoder layers.
"""

import copy
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from tests.reference import assert_close, random
from tests.tensor.on_ranks import assert_shards, on_ranks, results_of, traffic
from tplab import launch, record
from tplab.gpt.transformer import ParallelTransformerLayer
from tplab.memory.config import GPTConfig
from tplab.plain import Layer
from tplab.tensor.full_state import full_state_dict, load_full_state_dict
from tplab.tensor.rng import seed_all

WORLD_SIZES = (1, 2, 4)
HIDDEN, HEADS, FFN = 16, 4, 24
BATCH, SEQUENCE, MEMORY = 2, 5, 7

CONFIG = GPTConfig(
    num_layers=1, hidden_size=HIDDEN, num_heads=HEADS, ffn_hidden_size=FFN, vocab_size=1, seq_length=1, dropout=0.0
)
KINDS = {"encoder": {"causal": False}, "causal": {}, "decoder": {"cross_attention": True}}
CUTS = {"qkv": (0, 3), "q": (0, 1), "kv": (0, 2), "up": (0, 1), "out": (1, 1), "down": (1, 1)}  # dimension, blocks


def cuts(kind):
    """How each parameter is cut over ranks: {name: (dimension, blocks)}, (None, 1) for one that every rank holds."""
    found = {}
    for name in plain_layer(kind).state_dict():
        module, end = name.split(".")[-2:]
        dim, blocks = CUTS.get(module, (None, 1))
        found[name] = (None, 1) if (dim, end) == (1, "bias") else (dim, blocks)
    return found


@cache
def plain_layer(kind, key="", dropout=0.0, **options):
    """A plain layer with random weights, which nobody may change. Another key gives other weights."""
    layer = Layer(replace(CONFIG, dropout=dropout), **KINDS[kind], **options, dtype=torch.float64)
    layer.load_state_dict({name: random(tuple(t.shape), key, name) / 2 for name, t in layer.state_dict().items()})
    return layer


def inputs(kind, sequence=SEQUENCE, memory_tokens=MEMORY):
    x, dy = (random((BATCH, sequence, HIDDEN), name) for name in ("x", "dy"))
    memory = random((BATCH, memory_tokens, HIDDEN), "memory") if kind == "decoder" else None
    keys = memory_tokens if kind == "decoder" else sequence
    padding = torch.arange(keys) >= torch.tensor([[keys], [keys - 2]])
    return x, memory, padding, dy


def gradients_of(layers):
    return [{name: p.grad for name, p in layer.named_parameters()} for layer in layers]


def run_plain(kind, *sizes):
    """Output and all gradients of the plain layer."""
    return run_layer(copy.deepcopy(plain_layer(kind)), kind, *sizes)[0]


def make(kind, group=None, dtype=torch.float64, **options):
    layer = ParallelTransformerLayer(
        HIDDEN, HEADS, None, FFN, causal=kind != "encoder", cross_attention=kind == "decoder", group=group, dtype=dtype,
        **options,
    )  # fmt: skip
    load_full_state_dict(layer, plain_layer(kind).state_dict(), group)
    return layer


def run_layer(layer, kind, *sizes, part=lambda whole: whole):
    """Output, all gradients, and the traffic. part: what a rank is given of x, memory and dy."""
    x, memory, padding, dy = inputs(kind, *sizes)
    leaves = {"x": part(x).requires_grad_()} | ({} if memory is None else {"memory": part(memory).requires_grad_()})
    masks = {"decoder": {"memory_padding_mask": padding}, "encoder": {"key_padding_mask": padding}, "causal": {}}
    with record() as forward:
        out = layer(*leaves.values(), **masks[kind])
    with record() as backward:
        out.backward(part(dy))
    leaves |= dict(layer.named_parameters())
    gradients = {f"d{name}": leaf.grad.clone() for name, leaf in leaves.items()}
    return {"out": out.detach(), **gradients}, traffic(forward, backward)


CASES = [(kind, options) for kind in KINDS for options in ({}, {"async_grad_allreduce": True})]


def _run_all(group):
    return [run_layer(make(kind, group, **options), kind) for kind, options in CASES]


@on_ranks
def test_outputs_all_gradients_and_traffic_are_those_of_the_plain_layer(p, in_groups):
    text, memory = (("all_reduce", "sum", 8 * BATCH * length * HIDDEN) for length in (SEQUENCE, MEMORY))
    for results in results_of(_run_all, p, in_groups):
        for number, (kind, _) in enumerate(CASES):
            assert_shards([result[number][0] for result in results], run_plain(kind), cuts(kind))
            forward = [text] * (3 if kind == "decoder" else 2)
            backward = sorted([*forward, memory] if kind == "decoder" else forward)
            for sent in (result[number][1] for result in results):
                assert [sent[0], sorted(sent[1])] == ([forward, backward] if len(results) > 1 else [[], []])


# Post-LN


def run_stack(layers):
    x, _, _, dy = inputs("encoder")
    x.requires_grad_()
    out = layers[1](layers[0](x))
    out.backward(dy)
    return {"out": out.detach(), "dx": x.grad}, gradients_of(layers)


def _post_norm_stack(states):
    options = {"apply_residual_connection_post_layernorm": True, "causal": False, "dtype": torch.float64}
    layers = [ParallelTransformerLayer(HIDDEN, HEADS, None, FFN, **options) for _ in states]
    for layer, state in zip(layers, states, strict=True):
        load_full_state_dict(layer, state)
    return run_stack(layers)


@pytest.mark.parametrize("p", WORLD_SIZES)
def test_with_post_layernorm_two_layers_equal_two_plain_ones(p):
    layers = [copy.deepcopy(plain_layer("encoder", number, post_norm=True)) for number in range(2)]
    expected, gradients = run_stack(layers)
    results = launch(_post_norm_stack, p, args=([layer.state_dict() for layer in layers],))
    assert_shards([result for result, _ in results], expected, {})
    for number, whole in enumerate(gradients):
        assert_shards([layers[number] for _, layers in results], whole, cuts("encoder"))


# Dropout


def _with_dropout(seed, kind, hidden, attention):
    """Two outputs while training, the gradient of both, one in evaluation; whether torch's current state moved."""
    rng = seed_all(seed)
    layer = make(kind, hidden_dropout=hidden, attention_dropout=attention)
    x, memory, _, _ = inputs(kind)
    x.requires_grad_()
    before = torch.get_rng_state()
    outs = [layer(x, memory, rng=rng) for _ in range(2)]
    sum(out.square().sum() for out in outs).backward()
    kept = layer.eval()(x, memory, rng=rng)
    return [out.detach() for out in outs], x.grad, kept.detach(), not torch.equal(torch.get_rng_state(), before)


def plain_with_dropout(seed, kind, rate):
    """The same of the plain layer with dropout behind its blocks alone, and the seed of the state "replicated"."""
    layer = copy.deepcopy(plain_layer(kind, dropout=rate)).train()
    for module in (layer.attention, layer.cross_attention):
        if module is not None:
            module.dropout = 0.0
    x, memory, _, _ = inputs(kind)
    x.requires_grad_()
    torch.manual_seed(seed + 1359)
    outs = [layer(x, memory) for _ in range(2)]
    sum(out.square().sum() for out in outs).backward()
    return [out.detach() for out in outs], x.grad, layer.eval()(x, memory).detach()


@pytest.mark.parametrize("kind", ["causal", "decoder"])
def test_what_a_block_adds_is_dropped_as_in_the_plain_layer_alike_on_every_rank_and_for_every_p(kind):
    expected, dx, kept = plain_with_dropout(3, kind, 0.4)
    assert not torch.equal(expected[0], expected[1])  # a second call draws another mask
    for p in WORLD_SIZES:
        for outs, gradient, quiet, moved in launch(_with_dropout, p, args=(3, kind, 0.4, 0.0)):
            assert not moved
            assert_close(outs[0], expected[0])
            assert_close(outs[1], expected[1])
            assert_close(gradient, dx)
            assert_close(quiet, kept)  # none in evaluation


def _attention_masks(seed):
    """The pattern of what attention drops, per rank, seen through uniform scores and values of one."""
    rng = seed_all(seed)
    layer = ParallelTransformerLayer(HIDDEN, HEADS, None, FFN, causal=False, attention_dropout=0.5, dtype=torch.float64)
    seen = []
    layer.attention.out.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    with torch.no_grad():
        layer.attention.qkv.weight.zero_()
        layer.attention.qkv.bias.fill_(1.0)
    out = layer(torch.ones(1, 32, HIDDEN, dtype=torch.float64), rng=rng)
    return seen[0], out.detach()


def test_attention_dropout_differs_between_the_ranks_and_leaves_the_output_replicated():
    (first, out), (second, other) = launch(_attention_masks, 2, args=(5,))
    assert first.unique().numel() > 2  # something is dropped
    assert not torch.equal(first, second)
    assert torch.equal(out, other)


# A cache


def _step_by_step(kind):
    layer = make(kind).eval()
    x, memory, padding, _ = inputs(kind)
    options = {"memory_padding_mask": padding} if kind == "decoder" else {}
    with torch.no_grad():
        whole = layer(x, memory, **options)
        cache = layer.new_cache(BATCH, SEQUENCE, MEMORY)
        parts = [layer(x[:, :2], memory, cache=cache, **options)]
        parts += [layer(x[:, i : i + 1], memory, cache=cache, **options) for i in range(2, SEQUENCE)]
        with record() as without_memory:  # its keys and values are there; only this rank's heads are computed
            again = layer.new_cache(BATCH, SEQUENCE, MEMORY)
            first = layer(x[:, :2], memory, cache=again, **options)
            last = layer(x[:, 2:], cache=again, **options)
    sizes = [t.shape[1] for t in (cache.text.keys, *([cache.memory.keys] if cache.memory else []))]
    return whole, torch.cat(parts, 1), torch.cat([first, last], 1), sizes, len(without_memory)


@pytest.mark.parametrize("p", WORLD_SIZES)
@pytest.mark.parametrize("kind", ["causal", "decoder"])
def test_token_by_token_with_a_cache_gives_what_the_whole_text_gives(kind, p):
    blocks = 3 if kind == "decoder" else 2
    for whole, parts, again, heads, calls in launch(_step_by_step, p, args=(kind,)):
        assert_close(whole, run_plain(kind)["out"])
        assert_close(parts, whole)
        assert_close(again, whole)
        assert heads == [HEADS // p] * (blocks - 1)
        assert calls == (2 * blocks if p > 1 else 0)


# Precision


def _in_bfloat16(residual_dtype):
    torch.manual_seed(0)
    layers = [ParallelTransformerLayer(HIDDEN, HEADS, None, FFN, causal=False, dtype=torch.bfloat16) for _ in range(3)]
    exact = [copy.deepcopy(layer).double() for layer in layers]
    x = random((BATCH, SEQUENCE, HIDDEN), "x") * 100  # small additions to large numbers: bfloat16 loses them
    low, high = x.to(torch.bfloat16).to(residual_dtype), x.to(torch.bfloat16).double()
    for layer, twin in zip(layers, exact, strict=True):
        low, high = layer(low), twin(high)
    low.float().sum().backward()
    return low.dtype, ((low.double() - high).norm() / high.norm()).item(), layers[0].mlp.up.weight.grad.dtype


def test_a_residual_in_float32_stays_there_and_is_nearer_to_the_truth():
    coarse, fine = (launch(_in_bfloat16, 2, args=(dtype,))[0] for dtype in (torch.bfloat16, torch.float32))
    assert (coarse[0], fine[0]) == (torch.bfloat16, torch.float32)
    assert fine[1] < coarse[1] / 4
    assert fine[2] == torch.bfloat16


@pytest.mark.parametrize(("norm", "plain", "bias"), [("layer", nn.LayerNorm, True), ("rms", nn.RMSNorm, False)])
def test_a_norm_computes_in_the_dtype_of_the_residual_not_of_its_weight(norm, plain, bias):
    layer = ParallelTransformerLayer(HIDDEN, HEADS, norm=norm, norm_eps=1e-3, bias=bias, dtype=torch.bfloat16)
    assert bias or not [name for name, _ in layer.named_parameters() if name.endswith("bias")]
    x, right = random((BATCH, SEQUENCE, HIDDEN), "x").float(), plain(HIDDEN, eps=1e-3)
    right.weight.data = random((HIDDEN,), "norm").bfloat16().float()
    layer.mlp_norm.weight.data = right.weight.data.bfloat16()
    normed = layer.mlp_norm(x).detach()
    assert normed.dtype == torch.float32
    assert_close(normed, right(x).detach(), 1e-6)


# First values, options, misuse


def _fresh():
    torch.manual_seed(7)
    layer = ParallelTransformerLayer(HIDDEN, HEADS, 2, FFN, cross_attention=True, activation="swiglu")
    return full_state_dict(layer), torch.rand(1).item()


def test_first_values_are_the_same_for_every_p():
    expected, after = launch(_fresh, 1)[0]
    for p in (2, 4):
        for state, then in launch(_fresh, p):
            assert state.keys() == expected.keys()
            assert all(torch.equal(state[name], expected[name]) for name in expected)
            assert then == after


def test_every_option_reaches_the_blocks():
    layer = ParallelTransformerLayer(
        HIDDEN, HEADS, 2, FFN, cross_attention=True, rotary_base=50.0, activation="swiglu", per_rank_init=True,
        async_grad_allreduce=True, init_method=lambda w: nn.init.constant_(w, 1.0), norm_eps=1e-3,
        output_init_method=lambda w: nn.init.constant_(w, 2.0), attention_dropout=0.3,
    )  # fmt: skip
    assert [norm.eps for norm in (layer.attention_norm, layer.cross_norm, layer.mlp_norm)] == [1e-3] * 3
    assert (layer.attention.dropout, layer.cross_attention.dropout) == (0.3, 0.3)
    readers = [layer.attention.qkv, layer.cross_attention.q, layer.cross_attention.kv, layer.mlp.up]
    writers = [layer.attention.out, layer.cross_attention.out, layer.mlp.down]
    assert all(bool((block.weight == 1).all()) and block.async_grad_allreduce for block in readers)
    assert all(bool((block.weight == 2).all()) for block in writers)
    assert all(block.per_rank_init for block in readers + writers)
    assert (layer.attention.num_kv_heads, layer.cross_attention.num_kv_heads) == (2, 2)
    assert layer.attention.rotary_base == 50.0
    assert (layer.mlp.activation, layer.mlp.up.weight.shape[0]) == ("swiglu", 2 * FFN)


@torch.no_grad()
def test_masks_and_positions_reach_attention():
    x = inputs("encoder")[0]
    mask = nn.Transformer.generate_square_subsequent_mask(SEQUENCE, dtype=torch.float64)
    assert_close(make("encoder")(x, attn_mask=mask), make("causal")(x))
    rotary = make("causal", rotary_base=50.0)
    assert_close(rotary(x, positions=torch.arange(SEQUENCE)), rotary(x))
    assert (rotary(x, positions=2 * torch.arange(SEQUENCE)) - rotary(x)).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"norm": "batch"}, "'layer', 'rms'"),
        ({"hidden_dropout": 1.0}, "hidden_dropout=1.0"),
        ({"attention_dropout": -0.1}, "dropout=-0.1"),
        ({"activation": "relu"}, "swiglu"),
    ],
)
def test_an_option_that_does_not_fit_is_refused_with_what_does(options, says):
    with pytest.raises(ValueError, match=says):
        ParallelTransformerLayer(HIDDEN, HEADS, **options)


def test_a_memory_is_asked_for_where_it_is_read_and_refused_where_it_is_not():
    x = torch.zeros(1, 2, HIDDEN)
    with pytest.raises(ValueError, match="cross_attention=True"):
        ParallelTransformerLayer(HIDDEN, HEADS)(x, x)
    reader = ParallelTransformerLayer(HIDDEN, HEADS, cross_attention=True)
    with pytest.raises(ValueError, match="needs its memory"):
        reader(x)
    with pytest.raises(ValueError, match="needs its memory"), torch.no_grad():
        reader(x, cache=reader.new_cache(1, 4, 4))
